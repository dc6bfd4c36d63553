"""The errors a user can meet.

One root, a few causes. An error's text is written for the person who has to act on it: it names the file, key
or value, says what was expected, and what to do next. The command line shows the text alone, without a
traceback, and exits with the error's `exit_code`: 2 when the call or its input was wrong, 1 when the work
failed. A failed rollout is data, not an exception; it is written to the failures file with its reason.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Final

ERROR_STANDS_ABOVE: Final = "its error stands above"
"""How an error ends that only says that the log has another one, which tells more."""


class NemoGymError(Exception):
    """Root of the errors that nemo_gym raises for a user to read."""

    exit_code: ClassVar[int] = 1


class UsageError(NemoGymError):
    """Raised when a command was called in a way that can't work."""

    exit_code = 2


class ConfigError(NemoGymError):
    """Raised when the configuration can't be used.

    Args:
        problem: What is wrong and what was expected.
        source: The file (or "command line") in which the value stands, where it is known.
        key: The dotted path of the key within the configuration.
        hint: What to do next, for example a "did you mean".
    """

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        source: Path | str | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.source = source
        self.key = key
        self.hint = hint
        where = ", ".join(str(part) for part in (source, key) if part)
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text}\n{hint}" if hint else text)


class MissingExtraError(NemoGymError):
    """Raised when something needs a package that only an optional extra of nemo-gym installs.

    Args:
        extra: The extra's name.
        needed_by: What needs it.
    """

    exit_code = 2

    def __init__(self, extra: str, needed_by: str) -> None:
        super().__init__(f"{needed_by} needs the extra '{extra}': pip install 'nemo-gym[{extra}]'")


class DatasetError(NemoGymError):
    """Raised when an input or rollouts file can't be read as JSON lines of the expected shape."""

    exit_code = 2


class ServerStartError(NemoGymError):
    """Raised when a server did not become ready: it exited, its port is taken, or it ran out of time."""


class ServerStoppedError(NemoGymError):
    """Raised when a server that was running has exited while it was still needed."""


class Interrupted(NemoGymError):  # noqa: N818 - nothing went wrong: the work was asked to stop
    """Raised when a signal asked the work to stop, once everything that was running has been stopped.

    Args:
        signum: The signal; the first one where several came.
    """

    def __init__(self, signum: signal.Signals) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signum.name}")


class ServerNotFoundError(NemoGymError):
    """Raised when a call names a server that the running configuration does not have."""


class ConversionError(NemoGymError):
    """Raised when a request or reply of one model API can't be said in the other."""


class ModelBackendError(NemoGymError):
    """Raised when a model backend gave no usable answer.

    Args:
        problem: What the backend did, continuing the sentence "The model backend at <url> ...".
        url: The address that was called, without credentials or query.
        status: The HTTP status the backend answered; None when it did not answer.
        body: The beginning of what it answered.
        timed_out: Whether it ran out of time.
        retryable: Whether the same request may succeed later.
        retry_after_s: Seconds the backend asked to wait.

    Attributes:
        attempts: How often the request was tried.
    """

    def __init__(
        self,
        problem: str,
        *,
        url: str,
        status: int | None = None,
        body: str = "",
        timed_out: bool = False,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        self.problem = problem
        self.url = url
        self.status = status
        self.body = body
        self.timed_out = timed_out
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.attempts = 1
        super().__init__(problem)

    def __str__(self) -> str:
        tries = f" (after {self.attempts} attempts)" if self.attempts > 1 else ""
        return f"The model backend at {self.url} {self.problem}{tries}"

    @property
    def http_status(self) -> int:
        """The status a model server answers: the backend's own where that is an error, else 502 or 504.

        A 410 becomes 502, for between our servers 410 means that a session is lost.
        """
        if self.timed_out:
            return 504
        if self.status is None or self.status < 400 or self.status == 410:
            return 502
        return self.status


class SandboxError(NemoGymError):
    """Raised when a sandbox could not do what it was asked; what a command does in it is a result instead."""


class SandboxCreateError(SandboxError):
    """Raised when a sandbox did not start. Nothing of it is left."""


class SandboxStoppedError(SandboxError):
    """Raised when a sandbox is used that has been stopped, or that has died."""


class SandboxFileError(SandboxError):
    """Raised when a file of a sandbox can't be read or written."""


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """Raised when a sandbox has no such file."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """Return `Did you mean 'x'?` for the candidate nearest to `name`, or None where nothing is near."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"Did you mean '{matches[0]}'?" if matches else None
