"""Files about runs in the user's state directory: who is running, and what the servers of each run have logged.

A run's record is locked for as long as its parent process lives. The kernel drops the lock with the process,
however it ends, so a record that can be locked is stale; process ids, which the system uses again, decide nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Final

import orjson

from nemo_gym.errors import NemoGymError
from nemo_gym.paths import STATE_DIR_ENV, state_dir

KEPT_LOG_DIRS: Final = 10


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What others may know of a running deployment.

    Args:
        pid: The parent process.
        head_url: The head server, `http://host:port`.
        working_dir: The folder in which it was started.
        started_at: ISO 8601, UTC.
        log_dir: The folder with one log file per server.
        config_paths: The configuration files it was made from.
    """

    pid: int
    head_url: str
    working_dir: str
    started_at: str
    log_dir: str
    config_paths: list[str] = field(default_factory=list)


class RunFiles:
    """The record and the log folder of one run; the record is held from `publish` to `close`.

    Raises:
        NemoGymError: The state directory can't be used; so do the methods that write, and `running_deployments`.
    """

    def __init__(self) -> None:
        self.started_at = datetime.now(UTC)
        self._run_id = f"{self.started_at:%Y%m%dT%H%M%SZ}-{os.getpid()}-{secrets.token_hex(2)}"
        self.log_dir = _folder("logs") / self._run_id
        self._record_path = _folder("deployments") / f"{self._run_id}.json"
        self._lock: FileIO | None = None

    def open_log_dir(self) -> Path:
        """Create the folder for log files, and remove the oldest ones of runs that are over."""
        with _state_dir_errors():
            self.log_dir.mkdir(mode=0o700)
        in_use = {record.log_dir for record in running_deployments()} | {str(self.log_dir)}
        past = sorted(path for path in self.log_dir.parent.iterdir() if path.is_dir() and str(path) not in in_use)
        for path in past[: max(0, len(past) - KEPT_LOG_DIRS + 1)]:
            shutil.rmtree(path, ignore_errors=True)
        return self.log_dir

    def publish(self, record: RunRecord) -> None:
        """Write the record, locked, so that readers see it whole or not at all."""
        unfinished = self._record_path.with_suffix(".new")
        with _state_dir_errors():
            self._lock = unfinished.open("w+b", buffering=0)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._lock.write(orjson.dumps(asdict(record)))
            unfinished.rename(self._record_path)

    def close(self) -> None:
        """Remove the record. The log files stay."""
        if self._lock is not None:
            self._record_path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


def running_deployments() -> list[RunRecord]:
    """Return the records of deployments whose parent process is alive, oldest first; stale ones are removed."""
    found = []
    for path in sorted(_folder("deployments").glob("*.json")):
        with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
            if _can_lock(file.fileno()):
                path.unlink(missing_ok=True)
            else:
                found.append(RunRecord(**orjson.loads(file.read())))
    return found


def _can_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder(name: str) -> Path:
    with _state_dir_errors():
        folder = state_dir() / name
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def _state_dir_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # a RuntimeError when there is no home directory
        raise NemoGymError(
            f"can't write to the state directory: {error}\nSet {STATE_DIR_ENV} to a folder that can be written."
        ) from error
