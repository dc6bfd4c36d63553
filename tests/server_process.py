"""A server in a process of its own, as `gym env start` starts it, configured by the environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import psutil

from nemo_gym.global_config import find_open_port
from nemo_gym.server.worker_env import parent_pipe_env
from nemo_gym.session_routing import SOCKET_DIR_ENV
from tests.support import command_of

SERVER = """
import asyncio
import os
from pathlib import Path
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import *
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint

class Config(BaseResourcesServerConfig):
    greeting: str = "hello"

class Server(SimpleResourcesServer):
    config: Config

    def setup_webserver(self) -> FastAPI:
        with (Path(os.environ["BUILDS"]) / str(os.getpid())).open("a") as file:
            file.write(f"built by {type(self).__module__}\\n")
        app = super().setup_webserver()
        values: dict[str, int] = {}

        @app.post("/add")
        async def add(request: Request) -> dict:
            session_id = request.session[SESSION_ID_KEY]
            values[session_id] = values.get(session_id, 0) + 1
            return {"pid": os.getpid(), "greeting": self.config.greeting, "value": values[session_id]}

        @app.post("/slow")
        async def slow() -> dict:
            await asyncio.sleep(0.5)
            return {"slow": True}

        return app

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)
"""
WITH_APP = """
if __name__ == "__main__":
    Server.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = Server.run_webserver()
"""
OWN_APP = """
app = FastAPI()

if __name__ == "__main__":
    Server.run_webserver()
"""
WITHOUT_APP = """
if __name__ == "__main__":
    Server.run_webserver()
"""


class Process:
    """A server in a process of its own, with the reading end of a pipe whose writing end the test holds.

    With `forks=False` several workers are spawned, as by `python app.py`. What is in `above` stands at the top of the
    configuration.
    """

    def __init__(self, folder: Path, sockets: Path, source: str, **settings: Any) -> None:
        self.folder = folder
        self.builds = folder / "builds"
        self.builds.mkdir()
        entrypoint = settings.setdefault("entrypoint", "app.py")
        (folder / entrypoint).parent.mkdir(exist_ok=True)
        (folder / entrypoint).write_text(textwrap.dedent(source))
        self.port = settings.pop("port", None) or find_open_port()
        self.dry_run = settings.pop("dry_run", False)
        forks = settings.pop("forks", settings.get("num_workers", 1) > 1)
        launcher = ["-m", "nemo_gym.server.launcher", "nemo_gym.base_resources_server"] if forks else []
        above = settings.pop("above", {})
        inner = {"host": "127.0.0.1", "port": self.port, "num_workers": 1, **settings}
        config = {"server": {"resources_servers": {"it": inner}}, "dry_run": self.dry_run, **above}
        self.pipe_read, self.pipe_write = os.pipe()
        self.log = folder / "log"
        environment = {
            **os.environ,
            **parent_pipe_env(self.pipe_read),
            "NEMO_GYM_CONFIG_DICT": json.dumps(config),
            "NEMO_GYM_CONFIG_PATH": "server",
            "BUILDS": str(self.builds),
            SOCKET_DIR_ENV: str(sockets),
        }
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, *launcher, entrypoint],
                cwd=folder,
                env=environment,
                pass_fds=[self.pipe_read],
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        os.close(self.pipe_read)

    def call(self, path: str, cookie: str | None = None) -> tuple[int, Any, str | None]:
        method = "GET" if path == "/health" else "POST"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        if cookie:
            request.add_header("Cookie", cookie)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                jar: SimpleCookie = SimpleCookie(reply.headers.get("set-cookie", ""))
                value = next((f"{name}={morsel.value}" for name, morsel in jar.items()), None)
                return reply.status, json.loads(reply.read()), value
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), None

    def wait_until_ready(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.call("/health")[0] == 200
            except OSError:
                return False

        eventually(answers)

    def template(self) -> psutil.Process:
        """The process from which the workers are forked."""
        (template,) = (child for child in self.process.children() if "launcher" in " ".join(command_of(child)))
        return template

    def workers(self) -> list[psutil.Process]:
        """The workers, forked or spawned; multiprocessing's resource tracker is a child too."""
        workers = []
        for child in self.family()[1:]:
            with contextlib.suppress(psutil.Error):
                spawned = "spawn_main" in " ".join(child.cmdline())
                # What the template has forked; or who has taken its place as the parent.
                forked = "launcher" in " ".join(child.cmdline()) and child.ppid() != self.process.pid
                if spawned or forked:
                    workers.append(child)
        return workers

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def close(self) -> None:
        family = self.family() if self.process.is_running() else []
        for member in family:
            if member.is_running():
                member.kill()
        self.process.wait()
        if self.pipe_write is not None:
            os.close(self.pipe_write)


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(_lives(process) for process in processes)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        # It has ended between the two questions.
        return False
