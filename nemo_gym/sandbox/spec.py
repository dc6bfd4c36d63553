"""What a sandbox is asked to be, and what it answers: the values every provider shares."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SandboxResources(BaseModel):
    """Limits of a sandbox. None leaves a limit to the provider's default (docs/sandboxes.md names them).

    Attributes:
        cpu: Processors that its programs should use.
        memory_mb: Memory in MiB.
        processes: Processes that may run at one time.
        file_size_mb: Size in MiB of the largest file that a command may write.
        cpu_time_s: Seconds of processor time that one process may use.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    processes: Annotated[int, Field(gt=0)] | None = None
    file_size_mb: Annotated[int, Field(gt=0)] | None = None
    cpu_time_s: Annotated[int, Field(gt=0)] | None = None


class SandboxSpec(BaseModel):
    """What a sandbox starts with.

    Attributes:
        image: What it is made from: a folder below `images_dir` (local), an image's name (docker).
        workdir: Where its commands run, absolute; the provider's choice when None. `AsyncSandbox.workdir` says
            what it became.
        env: Variables its commands see beside the provider's few own. Nothing of the worker's environment is
            handed on.
        files: Contents by path, written before `start` returns. Relative paths are relative to the workdir.
        network: Whether its commands may reach a network.
        resources: Limits.
        start_timeout_s: Seconds that the start may take.
        metadata: Labels for whoever looks at the running sandboxes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    files: dict[str, str | bytes] = {}
    network: bool = False
    resources: SandboxResources = SandboxResources()
    start_timeout_s: float = Field(default=120, gt=0)
    metadata: dict[str, str] = {}

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/") or not value.strip("/")):
            raise ValueError(f"{value!r} must be an absolute path below /, without '..'")
        return value

    @field_validator("env")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        return check_env(value)


class SandboxExecResult(BaseModel):
    """What came of a command.

    Attributes:
        return_code: The exit status, 128 + n where signal n ended it; None where it has none, because it ran out
            of time or was ended for exceeding a limit (stderr says so).
        stdout: What it wrote, as text: bytes that are no UTF-8 are replaced.
        stderr: The same for the error stream.
        timed_out: Whether it ran out of time and was ended.
        truncated: Whether the middle of an output was left out.
        duration_s: Seconds it ran.
    """

    model_config = ConfigDict(frozen=True)

    return_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ran to its end and reported success."""
        return self.return_code == 0 and not self.timed_out


class SandboxStatus(StrEnum):
    """Where a sandbox is in its life."""

    CREATED = "created"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"


class SandboxHandle(BaseModel):
    """Names a running sandbox: fit for a JSON reply or a log line, not for reaching it from elsewhere.

    Attributes:
        provider: The provider's name.
        id: The sandbox's own name, unique for the provider.
        workdir: Where its commands run.
    """

    model_config = ConfigDict(frozen=True)

    provider: str
    id: str
    workdir: str


def check_env(env: dict[str, str]) -> dict[str, str]:
    """Return `env`, or raise ValueError for a name or value that no program could be given."""
    for name, value in env.items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL character")
    return env
