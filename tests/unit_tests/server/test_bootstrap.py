"""Server processes as `gym env start` starts them: `python app.py` with the configuration in the environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.global_config import find_open_port
from nemo_gym.server.worker_env import parent_pipe_env
from nemo_gym.session_routing import SOCKET_DIR_ENV

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
    """A server in a process of its own, with the reading end of a pipe whose writing end the test holds."""

    def __init__(self, folder: Path, sockets: Path, source: str, **settings: Any) -> None:
        self.folder = folder
        self.builds = folder / "builds"
        self.builds.mkdir()
        (folder / "app.py").write_text(textwrap.dedent(source))
        self.port = settings.pop("port", None) or find_open_port()
        self.dry_run = settings.pop("dry_run", False)
        inner = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port, "num_workers": 1, **settings}
        config = {"server": {"resources_servers": {"it": inner}}, "dry_run": self.dry_run}
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
                [sys.executable, "app.py"],
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


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path for the workers' sockets; pytest's own are too long for some systems."""
    with tempfile.TemporaryDirectory(prefix="ng-") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, sockets: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def starter(source: str = SERVER + WITH_APP, **settings: Any) -> Process:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        started.append(Process(folder, sockets, source, **settings))
        return started[-1]

    yield starter
    for process in started:
        process.close()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_one_worker_serves_in_process_with_its_own_config_type(start: Callable[..., Process]) -> None:
    server = start(greeting="good morning")
    server.wait_until_ready()
    status, body, cookie = server.call("/add")
    assert (status, body["greeting"], body["pid"]) == (200, "good morning", server.process.pid)
    assert cookie is not None
    assert cookie.startswith("Server___server=")
    assert server.process.children() == []


@pytest.mark.parametrize(
    "source", [SERVER + WITH_APP, SERVER + WITHOUT_APP, SERVER + OWN_APP], ids=["app", "no app", "foreign app"]
)
def test_several_workers_build_their_application_once_each_and_keep_sessions_whole(
    start: Callable[..., Process], source: str
) -> None:
    server = start(source, num_workers=3)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    owners = set()
    for _ in range(12):
        _, first, cookie = server.call("/add")
        owners.add(first["pid"])
        for expected in (2, 3, 4):
            _, again, _ = server.call("/add", cookie)
            assert (again["value"], again["pid"]) == (expected, first["pid"])
    assert {path.read_text() for path in server.builds.iterdir()} == {"built by __mp_main__\n"}
    assert owners <= {int(path.name) for path in server.builds.iterdir()}


def test_a_session_of_a_worker_that_died_is_gone_and_the_others_stay(start: Callable[..., Process]) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 2)
    sessions: dict[int, str] = {}

    def both_own_one() -> bool:
        _, body, cookie = server.call("/add")
        assert cookie is not None
        sessions[body["pid"]] = cookie
        return len(sessions) == 2

    eventually(both_own_one)
    lost, kept = sessions
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: server.call("/add", sessions[lost])[0] == 410)
    assert server.call("/add", sessions[kept])[1]["value"] == 2
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    assert server.call("/add", sessions[lost])[0] == 410


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sigterm_finishes_the_requests_in_flight_and_leaves_nothing(
    start: Callable[..., Process], num_workers: int
) -> None:
    server = start(num_workers=num_workers)
    server.wait_until_ready()
    family = server.family()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.2)
        server.process.terminate()
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 200")
    server.process.wait(15)
    eventually(lambda: gone(family))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_follows_its_parent(start: Callable[..., Process], num_workers: int) -> None:
    server = start(num_workers=num_workers)
    server.wait_until_ready()
    family = server.family()
    os.close(server.pipe_write)
    server.pipe_write = None  # type: ignore[assignment]
    eventually(lambda: gone(family))


def test_workers_follow_a_main_process_that_was_killed(start: Callable[..., Process]) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 2)
    family = server.family()
    server.process.kill()
    eventually(lambda: gone(family))


def test_the_sockets_of_a_killed_main_process_are_swept_at_the_next_start(
    start: Callable[..., Process], sockets: Path
) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    (left,) = sockets.iterdir()
    server.process.kill()
    server.process.wait()
    again = start(num_workers=2)
    again.wait_until_ready()
    assert left not in sockets.iterdir()
    again.process.terminate()
    again.process.wait(15)
    assert list(sockets.iterdir()) == []


def test_a_taken_port_is_named(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.process.wait(20) == 1
    log = server.log.read_text()
    assert f"server can't listen on 127.0.0.1:{port}: Address already in use" in log
    assert "Traceback" not in log


def test_settings_of_a_wrong_type_are_named_without_a_traceback(start: Callable[..., Process]) -> None:
    server = start(greeting=["not", "text"])
    assert server.process.wait(20) == 2
    log = server.log.read_text()
    assert "server.greeting: Input should be a valid string" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_that_cant_be_built_ends_instead_of_restarting_for_ever(
    start: Callable[..., Process], num_workers: int
) -> None:
    broken = SERVER.replace("app = super().setup_webserver()", "raise RuntimeError('no such data')")
    server = start(broken + WITH_APP, num_workers=num_workers)
    assert server.process.wait(30) == 1
    log = server.log.read_text()
    assert "no such data" in log
    assert "ERROR" in log


def test_a_dry_run_builds_the_application_and_ends(start: Callable[..., Process]) -> None:
    server = start(dry_run=True)
    assert server.process.wait(20) == 0
    assert [path.read_text() for path in server.builds.iterdir()] == ["built by __main__\n"]


def test_started_by_hand_without_configuration_it_says_how_servers_are_started(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SERVER + WITH_APP)
    result = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "gym env start" in result.stderr
    assert "Traceback" not in result.stderr
