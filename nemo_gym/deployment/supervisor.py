"""All servers of one configuration, as one thing that is entered and left.

Lifecycle: entering checks the ports, starts the head server in this process and one process per server
instance, and returns when each answers `/health`: with several workers, when all of them serve. With
`dry_run` it returns when each has built its application and ended. Leaving sends SIGTERM to each, and after a grace
SIGKILL to the group of each that is still there.

Failure policy: a server that exits or is not ready in time ends the start with `ServerStartError`; a server that
exits later cancels the block's task, and the block ends with `ServerStoppedError`. Either way all others are stopped
first. Cancelling the task while it waits for servers to stop kills them at once. Every server also holds the read
end of a pipe whose only write end is here, and ends when this process does, even by SIGKILL.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

import aiohttp
from starlette.routing import BaseRoute

from nemo_gym.config_types import BaseRunServerConfig, ServerInstance, server_url
from nemo_gym.deployment.process import ServerProcess
from nemo_gym.deployment.records import RunFiles, RunRecord
from nemo_gym.errors import ConfigError, ServerStartError, ServerStoppedError
from nemo_gym.global_config import (
    DRY_RUN_KEY_NAME,
    HEAD_SERVER_KEY_NAME,
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    GlobalConfig,
)
from nemo_gym.paths import component_roots
from nemo_gym.server.head import running_head_server
from nemo_gym.server.worker_env import parent_pipe_env

START_TIMEOUT_KEY: Final = "server_start_timeout"
DEFAULT_START_TIMEOUT: Final = 300.0
STOP_GRACE_KEY: Final = "server_stop_grace"
_STOP_MARGIN: Final = 5.0


EventKind: TypeAlias = Literal["starting", "ready", "failed", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """Something that happened to one server, for whoever shows it.

    Args:
        kind: What happened.
        instance: To which server.
        seconds: Since its process was started; for "stopped", since it was asked to stop.
    """

    kind: EventKind
    instance: ServerInstance
    seconds: float


Dashboard: TypeAlias = "Callable[[Deployment], AbstractAsyncContextManager[Sequence[BaseRoute]]]"


def ignore_event(event: ServerEvent) -> None:
    """Do nothing with an event."""


class Deployment:
    """Runs the servers of a configuration for the length of an `async with` block.

    Args:
        config: The resolved configuration. Its top-level keys `server_start_timeout` (seconds, 300 by default)
            and `server_stop_grace` (seconds between SIGTERM and SIGKILL; by default what the servers' own
            `shutdown_grace_s` can take) are read here.
        on_event: Called on the event loop at each change of a server.
        working_dir: The user's folder, in which components are looked for first; the process's when None.
        dashboard: Gives the head server's further routes for the time that the context is open. None: there are none.

    Raises:
        ConfigError: A time in the configuration is not a number of seconds.
    """

    def __init__(
        self,
        config: GlobalConfig,
        *,
        on_event: Callable[[ServerEvent], None] = ignore_event,
        working_dir: Path | None = None,
        dashboard: Dashboard | None = None,
    ) -> None:
        self.config = config
        self.working_dir = (working_dir or Path.cwd()).resolve()
        self.dry_run = bool(config.config_dict.get(DRY_RUN_KEY_NAME))
        self.start_timeout = _seconds(config, START_TIMEOUT_KEY, DEFAULT_START_TIMEOUT)
        self.stop_grace = _seconds(config, STOP_GRACE_KEY, _longest_stop(config))
        self.servers: list[ServerProcess] = []
        self._on_event = on_event
        self._dashboard = None if self.dry_run else dashboard
        self._files = RunFiles()
        self._resources = AsyncExitStack()
        self._owner: asyncio.Task[object] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._failure: ServerStoppedError | None = None

    @property
    def head_url(self) -> str:
        """Where the head server answers."""
        return server_url(*_head_address(self.config))

    @property
    def log_dir(self) -> Path:
        """The folder with one log file per server."""
        return self._files.log_dir

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cancelled = isinstance(exc, asyncio.CancelledError)
        # A failure cancels the owner. If the block ended otherwise in the same moment, that is still to come.
        await self._end(expected_cancellations=1 if self._failure and not cancelled else 0)
        if self._failure is not None:
            assert self._owner is not None
            self._owner.uncancel()
            raise self._failure from (None if cancelled else exc)

    async def _start(self) -> None:
        check_ports(self.config)
        log_dir = self._files.open_log_dir()
        self._resources.callback(self._files.close)
        routes = await self._resources.enter_async_context(self._dashboard(self)) if self._dashboard else ()
        await self._resources.enter_async_context(running_head_server(self.config, routes))
        self._files.publish(self._record())
        read_end, write_end = os.pipe()
        self._resources.callback(os.close, write_end)
        try:
            for instance in self.config.instances.values():
                server = ServerProcess(instance, log_dir / f"{instance.name}.log")
                await server.start(self._environment(instance, read_end), (read_end,))
                self.servers.append(server)
                self._emit("starting", server, 0.0)
        finally:
            os.close(read_end)
        await self._wait_all_ready()

    async def _wait_all_ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            waits = [asyncio.create_task(self._wait_ready(server, session)) for server in self.servers]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def _wait_ready(self, server: ServerProcess, session: aiohttp.ClientSession) -> None:
        try:
            if self.dry_run:
                await server.wait_built(self.start_timeout)
            else:
                await server.wait_ready(session, self.start_timeout)
        except ServerStartError:
            self._emit("failed", server, server.seconds)
            raise
        self._emit("ready", server, server.seconds)
        if self.dry_run:
            return
        self._watchers.append(asyncio.create_task(self._watch(server)))

    async def _watch(self, server: ServerProcess) -> None:
        await server.wait()
        if self._failure is None:
            self._failure = server.stopped_error()
            self._emit("failed", server, server.seconds)
            assert self._owner is not None
            self._owner.cancel()

    async def _end(self, expected_cancellations: int = 0) -> None:
        """Stop everything, then let a cancellation that came meanwhile go on."""
        for watcher in self._watchers:
            watcher.cancel()
        stopping = asyncio.create_task(self._stop())
        interruption: asyncio.CancelledError | None = None
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError as cancellation:
                if expected_cancellations:
                    expected_cancellations -= 1
                    continue
                interruption = cancellation
                for server in self.servers:
                    server.kill()
        if interruption is not None:
            raise interruption
        stopping.result()

    async def _stop(self) -> None:
        try:
            await asyncio.gather(*(self._stop_server(server) for server in self.servers))
        finally:
            await self._resources.aclose()

    async def _stop_server(self, server: ServerProcess) -> None:
        asked_at = time.monotonic()
        was_running = server.is_running
        if was_running:
            self._emit("stopping", server, server.seconds)
        await server.stop(self.stop_grace)
        if was_running:
            self._emit("stopped", server, time.monotonic() - asked_at)

    def _emit(self, kind: EventKind, server: ServerProcess, seconds: float) -> None:
        # A terminal that went away (SIGHUP) can't be written to; the servers must be stopped all the same.
        with suppress(OSError):
            self._on_event(ServerEvent(kind, server.instance, seconds))

    def _record(self) -> RunRecord:
        return RunRecord(
            pid=os.getpid(),
            head_url=self.head_url,
            working_dir=str(self.working_dir),
            started_at=self._files.started_at.isoformat(timespec="seconds"),
            log_dir=str(self.log_dir),
            config_paths=[str(path) for path in self.config.sources],
        )

    def _environment(self, instance: ServerInstance, pipe_fd: int) -> Mapping[str, str]:
        python_path = [str(root) for root in component_roots(self.working_dir)]
        if inherited := os.environ.get("PYTHONPATH"):
            python_path.append(inherited)
        return {
            **os.environ,
            NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME: self.config.to_json(),
            NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME: instance.name,
            "PYTHONPATH": os.pathsep.join(python_path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            **parent_pipe_env(pipe_fd),
        }


def check_ports(config: GlobalConfig) -> None:
    """Make sure that every configured address can be listened on, before anything is started.

    Raises:
        ServerStartError: Another program has a port, or the address is not one of this machine.
    """
    wanted = [(HEAD_SERVER_KEY_NAME, *_head_address(config))]
    wanted += [(instance.name, instance.host, instance.port) for instance in config.instances.values()]
    for name, host, port in wanted:
        problem = _why_not_bindable(host, port)
        if problem:
            raise ServerStartError(f"{name}: {problem}")


def _head_address(config: GlobalConfig) -> tuple[str, int]:
    head = config.config_dict[HEAD_SERVER_KEY_NAME]
    return str(head.host), int(head.port)


def _why_not_bindable(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return (
                    f"port {port} on {host} is in use by another program\n"
                    "Set another port, or leave it out and a free one is chosen. "
                    "`gym env status` shows deployments that are running."
                )
            return f"can't listen on {host}, port {port}: {error.strerror or error}"
    return None


def _longest_stop(config: GlobalConfig) -> float:
    """Return how many seconds the slowest server may take to stop by itself: it may use its grace three times."""
    default = BaseRunServerConfig.model_fields["shutdown_grace_s"].default
    graces = [instance.settings.get("shutdown_grace_s", default) for instance in config.instances.values()]
    return 3.0 * max(graces, default=0) + _STOP_MARGIN


def _seconds(config: GlobalConfig, key: str, default: float) -> float:
    value = config.config_dict.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"expected a number of seconds above 0, got {value!r}", key=key)
    return float(value)
