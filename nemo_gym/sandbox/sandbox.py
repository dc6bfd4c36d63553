"""`AsyncSandbox`: the one class that environments use, whatever provides the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nemo_gym.errors import SandboxError, SandboxFileError, SandboxStoppedError
from nemo_gym.sandbox.providers.base import (
    DEFAULT_DOWNLOAD_BYTES,
    DEFAULT_EXEC_TIMEOUT_S,
    DEFAULT_OUTPUT_BYTES,
    DEFAULT_READ_BYTES,
    ExecRequest,
    RunningSandbox,
    SandboxProvider,
)
from nemo_gym.sandbox.providers.registry import create_provider
from nemo_gym.sandbox.spec import SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus, check_env


class AsyncSandbox:
    """A place where commands run that nobody trusts, started from a spec.

    For one event loop; any number of its tasks may use it at one time. As an async context manager it starts on
    entering and stops on leaving. Relative paths are relative to `workdir`.

    Args:
        provider: A provider, or what `create_provider` makes one from: a name, or a mapping with the key `type`.
        spec: What it starts with.
    """

    def __init__(
        self, provider: SandboxProvider | Mapping[str, Any] | str | None = None, spec: SandboxSpec | None = None
    ) -> None:
        self._owns_provider = not isinstance(provider, SandboxProvider)
        self._provider = provider if isinstance(provider, SandboxProvider) else create_provider(provider)
        self.spec = spec or SandboxSpec()
        self._starting: asyncio.Task[RunningSandbox] | None = None
        self._running: RunningSandbox | None = None
        self._ended: SandboxStatus | None = None

    @property
    def status(self) -> SandboxStatus:
        """Created, running, stopped, or failed when it did not start or died by itself."""
        if self._ended is not None:
            return self._ended
        return self._running.status if self._running is not None else SandboxStatus.CREATED

    @property
    def handle(self) -> SandboxHandle:
        """Its name; SandboxError before it has started."""
        if self._running is None:
            raise SandboxError("the sandbox has not been started: await start() first")
        return self._running.handle

    @property
    def workdir(self) -> str:
        """Where its commands run; SandboxError before it has started."""
        return self.handle.workdir

    async def start(self) -> SandboxHandle:
        """Start it; a second call returns the same handle.

        Raises:
            SandboxCreateError: When it does not start. Nothing of it is left.
            SandboxStoppedError: When it has been stopped.
        """
        if self._ended is not None:
            raise SandboxStoppedError(f"the sandbox is {self._ended}: make a new one")
        if self._starting is None:
            self._starting = asyncio.create_task(self._provider.start(self.spec))
        task = self._starting
        try:
            self._running = await asyncio.shield(task)
        except asyncio.CancelledError:
            await self.stop()
            raise
        except BaseException:
            self._ended = self._ended or SandboxStatus.FAILED
            await self._close_provider()
            raise
        return self._running.handle

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_EXEC_TIMEOUT_S,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> SandboxExecResult:
        """Run a command to its end, its time-out, or the cancellation of the calling task.

        A time-out ends the command and everything it started: SIGTERM, a second of grace, SIGKILL. What a command
        leaves in the background otherwise lives on until `stop`, and does not hold up the result.

        Args:
            command: A shell's command line (bash where there is one), or a program and its arguments.
            timeout_s: Seconds it may run.
            cwd: Where it runs instead of the workdir.
            env: Variables beside the spec's.
            stdin: What it can read; nothing when None.
            max_output_bytes: Bytes kept of each of its two output streams; of a longer one the beginning and the end.

        Raises:
            SandboxStoppedError: When the sandbox is gone, or goes meanwhile.
        """
        if not timeout_s > 0 or max_output_bytes < 0:
            raise ValueError(f"timeout_s must be above 0, max_output_bytes not below: {timeout_s}, {max_output_bytes}")
        if not command or (not isinstance(command, str) and not all(isinstance(part, str) for part in command)):
            raise ValueError(f"a command is a string or a sequence of strings, and not empty: {command!r}")
        request = ExecRequest(
            command=command,
            timeout_s=timeout_s,
            cwd=cwd,
            env=check_env(dict(env or {})),
            stdin=stdin,
            max_output_bytes=max_output_bytes,
        )
        return await self._sandbox().exec(request)

    async def read(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> bytes:
        """Return a file's content.

        Raises:
            SandboxFileNotFoundError: When there is no such file.
            SandboxFileError: When it is no regular file, can't be read, or has more than `max_bytes`.
        """
        return await self._sandbox().read(_checked(path), max_bytes)

    async def read_text(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> str:
        """Return a file's content as text; bytes that are no UTF-8 are replaced."""
        return (await self.read(path, max_bytes=max_bytes)).decode(errors="replace")

    async def write(self, path: str, data: str | bytes, *, mode: int | None = None) -> None:
        """Replace a file's content at once, making missing folders.

        Args:
            path: The file; where it is a link, what it points to.
            data: The content; text is written as UTF-8.
            mode: Its permissions; an existing file's own, else 0644, when None.

        Raises:
            SandboxFileError: When it can't be written.
        """
        await self._sandbox().write(_checked(path), data.encode() if isinstance(data, str) else data, mode)

    async def upload(self, local: str | Path, path: str) -> None:
        """Copy a file of this machine into the sandbox, with its permissions.

        Raises:
            SandboxFileError: When one of the two files can't be used.
        """
        await self._sandbox().upload(Path(local), _checked(path))

    async def download(self, path: str, local: str | Path, *, max_bytes: int = DEFAULT_DOWNLOAD_BYTES) -> None:
        """Copy a file of the sandbox to this machine: whole, or not at all.

        Raises:
            SandboxFileError: When one of the two files can't be used, or it has more than `max_bytes`.
        """
        await self._sandbox().download(_checked(path), Path(local), max_bytes)

    async def stop(self) -> None:
        """End everything that runs in it and remove what it wrote; also while it starts, and twice is fine."""
        if self._starting is not None and not self._starting.done():
            self._ended = SandboxStatus.STOPPED
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._starting is not None and not self._starting.cancelled() and self._starting.exception() is None:
            self._running = self._starting.result()
            await self._running.stop()
            self._ended = self._running.status
        self._ended = self._ended or SandboxStatus.STOPPED
        await self._close_provider()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def _sandbox(self) -> RunningSandbox:
        if self._running is None:
            raise SandboxStoppedError(f"the sandbox is {self.status}: await start() first")
        return self._running

    async def _close_provider(self) -> None:
        if self._owns_provider:
            await self._provider.close()


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise SandboxFileError(f"{path!r} is no path")
    return path
