"""The servers that benchmarks compare, each kept in a task of its own: one that crashes takes no other with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil

from benchmarks.harness.processes import cpu_seconds, tree, workers_of
from benchmarks.harness.run import ROOT, Run
from benchmarks.load.wire import Connection, open_connections
from nemo_gym.deployment import Deployment, ServerEvent
from nemo_gym.errors import NemoGymError
from nemo_gym.global_config import GlobalConfig, load_global_config

COUNTER: Final = "example_session_state_mgmt"
UNROUTED: Final = "unrouted_counter"
PROBE: Final = "load_probe"

_START_S: Final = 60.0
_STOP_S: Final = 5.0
_SHOWN: Final = 300
_PAUSE_S: Final = 0.05
_AT_ONCE: Final = 3


@dataclass(slots=True)
class Server:
    """A server that runs.

    Attributes:
        host: Its address.
        port: Its port.
        roots: The processes that it was started as; what they have started belongs to it.
        workers: The processes that answer requests.
        accepting: Those of them that clients connect to; none where something stands in front of them.
        config: Its configuration, for `ServerClient`; empty for servers that are not ours.
        name: Its name in there.
    """

    host: str
    port: int
    roots: list[int]
    workers: list[int]
    accepting: list[int] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    _processes: list[psutil.Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processes = tree(self.roots)

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes so far."""
        return cpu_seconds(self._processes)


ServerStarter: TypeAlias = Callable[[Run], AbstractAsyncContextManager[Server]]


@asynccontextmanager
async def started(run: Run, starters: Mapping[str, ServerStarter]) -> AsyncIterator[dict[str, Server]]:
    """Start servers, a few at a time, and stop them all at the end; one that fails is left out with a notice."""
    servers: dict[str, Server] = {}
    turn = asyncio.Semaphore(_AT_ONCE)
    over = asyncio.Event()

    async def keep(name: str, starter: ServerStarter, up: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with turn:
                    servers[name] = await stack.enter_async_context(starter(run))
                up.set()
                await over.wait()
        except (NemoGymError, OSError, psutil.Error, MissingToolError) as error:
            run.notice(f"{name}: {in_a_line(error)}")
        finally:
            up.set()

    run.step(f"starting {len(starters)} servers")
    ups = {name: asyncio.Event() for name in starters}
    keepers = [asyncio.create_task(keep(name, starter, ups[name])) for name, starter in starters.items()]
    try:
        for up in ups.values():
            await up.wait()
        yield {name: servers[name] for name in starters if name in servers}
    finally:
        over.set()
        try:
            await asyncio.gather(*keepers)
        except BaseException:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            raise


def in_a_line(error: BaseException) -> str:
    """Return the first line of what an error says, or else its name."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class MissingToolError(Exception):
    """Raised when a program that an alternative needs is not installed."""


def gym_server(component: str, workers: int, **settings: Any) -> ServerStarter:
    """Return what starts one of our resources servers, through the whole framework."""

    @asynccontextmanager
    async def start(run: Run) -> AsyncIterator[Server]:
        config = gym_config(run, {"counter": (component, {"num_workers": workers, **settings})})
        async with deployed(run, config) as deployment:
            instance, pid = deployment.servers[0].instance, deployment.servers[0].pid
            assert pid is not None
            serving = await all_accepting(run, instance.host, instance.port, pid, workers)
            as_dict = json.loads(config.to_json())
            yield Server(instance.host, instance.port, [pid], serving, serving, as_dict, instance.name)

    return start


def bare_counter(workers: int) -> ServerStarter:
    """Return what starts the bare FastAPI counter."""

    @asynccontextmanager
    async def start(run: Run) -> AsyncIterator[Server]:
        port = free_port()
        arguments = [sys.executable, "-m", "benchmarks.apps.bare_counter", str(port), str(workers)]
        async with running_process(run, arguments) as pid:
            serving = await all_accepting(run, "127.0.0.1", port, pid, workers)
            yield Server("127.0.0.1", port, [pid], serving, serving)

    return start


def gym_config(run: Run, instances: Mapping[str, tuple[str, Mapping[str, Any]]]) -> GlobalConfig:
    """Return the configuration of resources servers, given by name as component and settings."""
    content = {
        name: {"resources_servers": {component: {"entrypoint": "app.py", **settings}}}
        for name, (component, settings) in instances.items()
    }
    path = run.folder / "work" / f"{time.monotonic_ns()}.yaml"
    path.write_text(json.dumps(content))
    return load_global_config([path], working_dir=run.folder / "work")


@asynccontextmanager
async def deployed(
    run: Run, config: GlobalConfig, on_event: Callable[[ServerEvent], None] = lambda _: None
) -> AsyncIterator[Deployment]:
    """Run a deployment in a task of its own: a server that ends does not cancel who measures the others."""
    up: asyncio.Future[Deployment] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def keep() -> None:
        async with Deployment(config, working_dir=run.folder / "work", on_event=on_event) as deployment:
            up.set_result(deployment)
            await over.wait()

    keeper = asyncio.create_task(keep())
    try:
        await asyncio.wait({keeper, up}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            keeper.result()
        yield up.result()
        over.set()
        await keeper
    except BaseException:
        keeper.cancel()
        with suppress(BaseException):  # the reason stands above
            await keeper
        raise


@asynccontextmanager
async def running_process(run: Run, arguments: list[str]) -> AsyncIterator[int]:
    """Run a program for the length of the block, and yield its process id; what it has started ends with it.

    It ends too when this process is killed: see `harness.keeper`.
    """
    with (run.folder / "work" / f"{time.monotonic_ns()}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.harness.keeper", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        pid = await process.stdout.readline()
        if not pid:
            raise ChildProcessError("the program did not start")
        yield int(pid)
    except (OSError, TimeoutError) as error:
        raise ChildProcessError(f"{in_a_line(error)}; the program said: {said_in(Path(log.name))}") from error
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
        await process.wait()


def said_in(log: Path) -> str:
    """Return in a line what a program that failed has said: HAProxy's alerts, or else the last line."""
    lines = log.read_text(errors="replace").split("\n")
    alerts = [line.partition(" : ")[2].strip() for line in lines if line.startswith("[ALERT]")]
    said = "; ".join(alerts) or next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    return said if len(said) <= _SHOWN else f"...{said[-_SHOWN:]}"


async def all_accepting(run: Run, host: str, port: int, pid: int, count: int) -> list[int]:
    """Wait until as many workers as there are to be take connections, and return their process ids.

    Raises:
        TimeoutError: There are not as many after a minute.
        OSError: The server has ended, or breaks connections off.
    """
    give_up = time.monotonic() + _START_S
    while psutil.pid_exists(pid):
        serving = workers_of(pid)
        with suppress(ConnectionRefusedError):
            if len(serving) == count:
                await _each_answers(host, port, serving)
                return serving
        if time.monotonic() > give_up:
            raise TimeoutError(f"{len(serving)} of {count} workers are there after {_START_S:g} s")
        await asyncio.sleep(_PAUSE_S)
    raise ChildProcessError("the server ended while it was starting")


async def _each_answers(host: str, port: int, workers: list[int]) -> None:
    connections: list[Connection] = []
    try:
        connections = await open_connections(host, port, len(workers), workers, patience_s=_START_S)
        if len(workers) > 1 and {it.worker for it in connections} != set(workers):
            raise TimeoutError("some workers take no connections")
        if len(workers) == 1:
            await connections[0].ask(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    finally:
        for connection in connections:
            connection.close()


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
