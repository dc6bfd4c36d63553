"""Files about collections of rollouts in the user's state directory, for who wants to watch a run from elsewhere.

`runs/<run id>.json` holds how far a run is, replaced as a whole about once a second; `runs/<run id>.lock` is locked
for as long as its process writes it. The kernel drops the lock with the process, however it ends, so an unfinished
record that can be locked is of a run that was killed. The files of the last `KEPT_RUNS` runs stay.

A record is for onlookers: trouble with its files is told once in the log, and never a run's trouble.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final, Self

import orjson

from nemo_gym.paths import state_dir

KEPT_RUNS: Final = 20
FOLDER: Final = "runs"

COMPLETED: Final = "completed"
INTERRUPTED: Final = "interrupted"
FAILED: Final = "failed"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a collection of rollouts is. Times are unix seconds.

    Args:
        run_id: Which run; begins with its time, so that ids sort by age.
        pid: The collector's process.
        head_url: The head server of the deployment whose agent it asks, `http://host:port`; None where none is known.
        agent: The agent that was asked for; empty where each row names its own.
        output: The absolute path of the rollouts file.
        started_at: When the run began.
        updated_at: When this was written.
        finished: None while it runs, else "completed" (each rollout has its result or has failed), "interrupted"
            (stopped by somebody, or killed) or "failed" (it could not go on).
        total: Rollouts that the collection has.
        already_done: How many of them an earlier run finished.
        done: How many this run finished.
        failed: How many failed in this run.
        run_again: Attempts that were made anew.
        running: Rollouts under way.
        lost_sessions: Attempts that were made anew because their session was lost (410).
        reward_sum: The sum of this run's rewards.
        reward_count: How many they are.
        reward_bounds: The bounds of the histogram, ascending.
        reward_histogram: How many rewards are below the first bound, from each bound up to the next, and from the
            last bound on.
        rate_per_s: Rollouts that end per second, lately.
        history: `[at, done, failed, reward_sum]` from the beginning on, thinned out as it grows; ascending.
    """

    run_id: str
    pid: int = 0
    head_url: str | None = None
    agent: str = ""
    output: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    finished: str | None = None
    total: int = 0
    already_done: int = 0
    done: int = 0
    failed: int = 0
    run_again: int = 0
    running: int = 0
    lost_sessions: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    reward_bounds: list[float] = field(default_factory=list)
    reward_histogram: list[int] = field(default_factory=list)
    rate_per_s: float = 0.0
    history: list[list[float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the record of a JSON object: unknown keys are passed over, missing ones have their defaults."""
        known = {one.name for one in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class ProgressRecord:
    """The record of one run: `write` as often as there is something to tell, then `close`.

    Opening and writing raise nothing: where the state directory can't be used, the log says so once.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{self.pid}-{secrets.token_hex(2)}"
        self._path: Path | None = None
        self._lock: FileIO | None = None
        self._troubled = self._is_stale = False

    def write(self, progress: RunProgress) -> None:
        """Replace the record at once, so that readers see it whole or not at all. Blocks for one small write."""
        content = orjson.dumps(progress)
        unfinished: Path | None = None
        try:
            path = self._path or self._open()
            unfinished = path.with_suffix(".new")
            unfinished.write_bytes(content)
            unfinished.replace(path)
            self._is_stale = False
        except (OSError, RuntimeError) as error:  # a RuntimeError when there is no home directory
            self._is_stale = True
            if not self._troubled:
                self._troubled = True
                logger.warning("the run's progress can't be shown elsewhere: %s", error)
            if unfinished is not None:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the record; its file stays, unless the last of it could not be written."""
        if self._path is not None:
            with suppress(OSError):
                if self._is_stale:
                    self._path.unlink(missing_ok=True)
                _lock_path(self._path).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self) -> Path:
        folder = state_dir() / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{self.run_id}.json"
        if self._lock is None:
            # Before the record: an unfinished one without a lock is of a run that was killed.
            self._lock = _lock_path(path).open("wb", buffering=0)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            _remove_old(folder)
        self._path = path
        return path


def read_runs() -> list[RunProgress]:
    """Return the records of runs that go on and of those that have lately ended, oldest first. Blocks.

    A run whose process was killed is "interrupted", at the time of its last record. What can't be read is left out.
    """
    with suppress(OSError, RuntimeError):
        paths = sorted((state_dir() / FOLDER).glob("*.json"))
        return [run for run in map(_read, paths) if run is not None]
    return []


def _read(path: Path) -> RunProgress | None:
    run = _parsed(path)
    if run is None or run.finished is not None or _is_written(path):
        return run
    # It may have been finished since it was read.
    run = _parsed(path)
    return run if run is None or run.finished is not None else replace(run, finished=INTERRUPTED, running=0)


def _parsed(path: Path) -> RunProgress | None:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return RunProgress.from_json(orjson.loads(path.read_bytes()))
    return None


def _is_written(path: Path) -> bool:
    """Whether the process that writes a record lives."""
    try:
        with _lock_path(path).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _remove_old(folder: Path) -> None:
    """Leave the newest records, and those of runs that go on, and make room for one."""
    over = [path for path in sorted(folder.glob("*.json")) if not _is_written(path)]
    for path in over[: max(0, len(over) - KEPT_RUNS + 1)]:
        for one in (path, _lock_path(path), path.with_suffix(".new")):
            one.unlink(missing_ok=True)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")
