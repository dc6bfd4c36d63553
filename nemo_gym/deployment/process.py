"""One server as a process: its start, its readiness, its log, its end."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp

from nemo_gym.config_types import ServerInstance
from nemo_gym.errors import ERROR_STANDS_ABOVE, ConfigError, ServerStartError, ServerStoppedError
from nemo_gym.logs import TRACEBACK_MARK, read_line
from nemo_gym.server.launcher import can_fork_workers

LOG_TAIL_LINES: Final = 30
LOG_TAIL_BYTES: Final = 64 * 1024
LOG_LINE_LENGTH: Final = 500
FIRST_POLL_SECONDS: Final = 0.05
LONGEST_POLL_SECONDS: Final = 1.0
# So that the last wait is a tenth of what the start took.
POLL_GROWTH: Final = 1.1
HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)

_LAUNCHER: Final = "nemo_gym.server.launcher"
_BASE_MODULES: Final = {
    "resources_servers": "nemo_gym.base_resources_server",
    "responses_api_agents": "nemo_gym.base_responses_api_agent",
    "responses_api_models": "nemo_gym.base_responses_api_model",
}
_MCP_MODULE: Final = "nemo_gym.mcp_auto_exposure.endpoint"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The last line of a traceback, such as `ValueError: no`, `pkg.errors.ConfigError: no` or `SystemExit: 2`.
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b")
_ERROR_LEVELS: Final = ("ERROR", "CRITICAL")
_ORDINARY_LEVELS: Final = ("DEBUG", "INFO")
_PORT_TAKEN = re.compile(r"address already in use", re.IGNORECASE)


class ServerProcess:
    """The process of one server instance, leader of its own session and process group.

    The group is the unit of killing: workers and whatever else the server has started go with it.

    Args:
        instance: What to run.
        log_path: The file that gets the process's output, both streams, in UTF-8.
    """

    def __init__(self, instance: ServerInstance, log_path: Path) -> None:
        self.instance = instance
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._last_answer = "nothing answered at its port"

    @property
    def pid(self) -> int | None:
        """The id of the process and of its group; None before `start`."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started_at

    async def start(self, environment: Mapping[str, str], inherited_fds: tuple[int, ...]) -> None:
        """Start the process in the implementation's folder.

        Raises:
            ServerStartError: The entrypoint is missing, or the system refuses to start it.
            ConfigError: The configuration is larger than the system lets the environment be.
        """
        entrypoint = self.instance.folder / self.instance.entrypoint
        if not entrypoint.is_file():
            raise ServerStartError(f"{self.instance.name}: its entrypoint {entrypoint} does not exist")
        self._started_at = time.monotonic()
        with self.log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *self._arguments(),
                    cwd=self.instance.folder,
                    env=dict(environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=inherited_fds,
                    start_new_session=True,
                )
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise _too_large(environment) from error
                raise ServerStartError(f"{self.instance.name}: could not be started: {error}") from error

    def _arguments(self) -> list[str]:
        """Return what the interpreter gets: the entrypoint, and what forks its workers where there are several."""
        instance = self.instance
        if instance.num_workers == 1 or not can_fork_workers():
            return [instance.entrypoint]
        shared = [_BASE_MODULES[instance.kind]]
        if instance.settings.get("expose_tools_over_mcp"):
            shared.append(_MCP_MODULE)
        return ["-m", _LAUNCHER, *shared, instance.entrypoint]

    async def wait_ready(self, session: aiohttp.ClientSession, timeout_seconds: float) -> None:
        """Return once `GET /health` is answered with 200, asked at growing intervals.

        Raises:
            ServerStartError: The process exited, or the time ran out; with the end of its log.
        """
        exited = asyncio.ensure_future(self.wait())
        interval = FIRST_POLL_SECONDS
        try:
            async with asyncio.timeout(timeout_seconds):
                while not await self._is_healthy(session):
                    await asyncio.wait({exited}, timeout=interval)
                    if exited.done():
                        raise ServerStartError(self._report(f"{self._describe_exit()} while it was starting"))
                    interval = min(interval * POLL_GROWTH, LONGEST_POLL_SECONDS)
        except TimeoutError:
            problem = (
                f"was not ready after {timeout_seconds:g} s ({self._last_answer}; server_start_timeout is the limit)"
            )
            raise ServerStartError(self._report(problem)) from None
        finally:
            exited.cancel()

    async def wait_built(self, timeout_seconds: float) -> None:
        """Return once the process, started for a dry run, has ended well.

        Raises:
            ServerStartError: It ended otherwise, or the time ran out; with the end of its log.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                code = await self.wait()
        except TimeoutError:
            raise ServerStartError(self._report(f"was not built after {timeout_seconds:g} s")) from None
        if code:
            raise ServerStartError(self._report(f"{self._describe_exit()} in a dry run"))

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.instance.url}/health", timeout=HEALTH_TIMEOUT) as response:
                self._last_answer = f"/health answered {response.status}"
                return response.status == 200
        except TimeoutError:
            self._last_answer = "/health did not answer in time"
        except (aiohttp.ClientError, OSError) as error:
            self._last_answer = f"/health failed: {error}"
        return False

    async def wait(self) -> int:
        """Return the exit code (negative: the signal's number) once the process has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_seconds: float) -> None:
        """End the process: SIGTERM, and after the grace SIGKILL to its whole group. Returns when it is gone."""
        if self._process is None:
            return
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._process.wait()
        # Also after a graceful end: what the server started and forgot is in its group.
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the process's group."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stopped_error(self) -> ServerStoppedError:
        """Return the error for a process that ended although it was still needed."""
        return ServerStoppedError(self._report(f"{self._describe_exit()} while it was running"))

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> list[str]:
        """Return the last lines of the log, shortened, without colour codes and trailing blank lines."""
        try:
            with self.log_path.open("rb") as log:
                # A log may be far larger than memory should hold.
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [_ANSI.sub("", line)[:LOG_LINE_LENGTH] for line in text.rstrip().splitlines()[-lines:]]

    def _describe_exit(self) -> str:
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:
            return f"was killed by {_signal_name(-code)}"
        return f"exited with code {code}"

    def _report(self, problem: str) -> str:
        instance = self.instance
        tail = self.log_tail()
        lines = [f"{instance.name} ({instance.kind}/{instance.implementation}) {problem}"]
        cause = find_cause(tail, ended=not self.is_running)
        if any(_PORT_TAKEN.search(line) for line in tail):
            cause = f"port {instance.port} on {instance.host} is in use by another program"
        if cause:
            lines.append(f"cause: {cause}")
        lines.append(f"log: {self.log_path}")
        lines += [f"  | {line}" for line in tail] if tail else ["  (the log is empty)"]
        return "\n".join(lines)


def _too_large(environment: Mapping[str, str]) -> ConfigError:
    name = max(environment, key=lambda name: len(environment[name]))
    size = len(os.fsencode(environment[name])) // 1024
    return ConfigError(
        f"the configuration is too large: servers get it in the environment variable {name}, which has {size} KB "
        "now; Linux takes 128 KB in one variable",
        hint="Put what is large into a file, and its path into the configuration.",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def find_cause(log_lines: list[str], *, ended: bool = True) -> str | None:
    """Return the line of a log that most likely says why its process ended, or why it is not ready.

    That is the last line which names an exception, else the last that was logged as an error (and does not only say
    that there is one), else, where the process has ended, the last one that was not logged as ordinary news.
    """
    newest_first = [line.removeprefix(TRACEBACK_MARK) for line in log_lines[::-1]]
    named = next((line for line in newest_first if _ERROR_LINE.match(line)), None)
    if named:
        return named
    read = [(line, read_line(line)) for line in newest_first]
    errors = (found for _, found in read if found is not None and found.level in _ERROR_LEVELS)
    logged = next((found.message for found in errors if ERROR_STANDS_ABOVE not in found.message), None)
    if logged or not ended:
        return logged
    others = (line.strip() for line, found in read if found is None or found.level not in _ORDINARY_LEVELS)
    return next(filter(None, others), None)
