"""What a provider of sandboxes is: one class that starts them, one that each running sandbox is.

A provider turns what goes wrong into the errors of `nemo_gym.errors`: `SandboxCreateError` when a start fails (and
then leaves nothing behind), `SandboxStoppedError` once a sandbox is gone, `SandboxFileError` for files. A command
that fails, runs out of time or exceeds a limit is a `SandboxExecResult`, never an exception.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from nemo_gym.errors import SandboxCreateError as SandboxCreateError
from nemo_gym.sandbox.spec import (
    SandboxExecResult as SandboxExecResult,
    SandboxHandle as SandboxHandle,
    SandboxResources as SandboxResources,
    SandboxSpec as SandboxSpec,
    SandboxStatus as SandboxStatus,
)

DEFAULT_EXEC_TIMEOUT_S: Final = 60.0
DEFAULT_OUTPUT_BYTES: Final = 1_000_000
DEFAULT_READ_BYTES: Final = 64 * 2**20
DEFAULT_DOWNLOAD_BYTES: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class ExecRequest:
    """One command to run in a sandbox.

    Attributes:
        command: A shell's command line, or a program and its arguments.
        timeout_s: Seconds it may run.
        cwd: Where it runs; relative to the workdir.
        env: Variables beside the sandbox's own.
        stdin: What it reads; nothing when None.
        max_output_bytes: Bytes kept of each output stream: the beginning and the end of it.
    """

    command: str | Sequence[str]
    timeout_s: float = DEFAULT_EXEC_TIMEOUT_S
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | None = None
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES


class RunningSandbox(ABC):
    """A sandbox that a provider has started."""

    handle: SandboxHandle

    @property
    @abstractmethod
    def status(self) -> SandboxStatus:
        """Running, stopped, or failed when it died by itself."""

    @abstractmethod
    async def exec(self, request: ExecRequest) -> SandboxExecResult:
        """Run a command. When the calling task is cancelled, the command and its children are killed.

        Raises:
            SandboxStoppedError: When the sandbox is gone, or goes while the command runs.
        """

    @abstractmethod
    async def read(self, path: str, max_bytes: int) -> bytes:
        """Return a file's content; `SandboxFileError` when it is no regular file or longer than `max_bytes`."""

    @abstractmethod
    async def write(self, path: str, data: bytes, mode: int | None) -> None:
        """Replace a file's content, making missing folders; `mode` None keeps an existing file's permissions."""

    @abstractmethod
    async def upload(self, local: Path, path: str) -> None:
        """Write a file of this machine, its permissions too, to `path`."""

    @abstractmethod
    async def download(self, path: str, local: Path, max_bytes: int) -> None:
        """Write a file of the sandbox to `local` on this machine; the permissions are this machine's default."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything that runs in the sandbox and remove what it wrote. Twice is fine."""


async def stop_all(sandboxes: Iterable[RunningSandbox]) -> None:
    """Stop sandboxes at one time; where some can't be, the first error is raised once all the others have stopped."""
    results = await asyncio.gather(*(sandbox.stop() for sandbox in list(sandboxes)), return_exceptions=True)
    for error in results:
        if error is not None:
            raise error


class SandboxProvider(ABC):
    """Starts sandboxes of one kind.

    Args:
        config: The provider's configuration, `type` included. A subclass checks its settings here, without
            blocking: looking at the machine belongs into `start`.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        """Start a sandbox, with `spec.files` written.

        Raises:
            SandboxCreateError: When it does not start within `spec.start_timeout_s`, or can't. Nothing is left.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop every sandbox that it started and that still runs. Twice is fine."""
