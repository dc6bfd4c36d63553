"""What a server's main process knows of its workers, told to them by a small file, and what a dead worker leaves.

The main process alone sees its workers come and go: which process has which slot, how the ones before it ended, and
what they still held. It writes that into `SLOTS_FILE` in the directory of the workers' sockets, in one step, at each
change; whichever worker is asked for figures reads it there.

A worker has the number of its open sessions in a file of its own, mapped into memory. So the number is there to be
read after the worker was killed, and to keep it costs a store.

Failure policy: these are figures and nothing else. Where a file can't be written or read, the server serves without.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import orjson

from nemo_gym.server.socket_records import write_in_one_step

SLOTS_FILE: Final = "workers.json"
"""Name of the main process's file, in the directory of the workers' sockets."""

TOLD_TO_STOP: Final = "told to stop"
"""How the end of a worker begins that did not die."""

WorkerState = Literal["starting", "serving", "leaving", "ended"]

_WORD: Final = 8  # bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker process that runs, as the main process sees it.

    Attributes:
        slot: Its place among the workers, from 0.
        pid: The process.
        started_at: When it was started, in seconds since 1970.
        restarts: How many processes had this slot before.
        state: A worker is leaving once it has been told to stop. One that has ended, and whose slot is empty until
            another is started, has the process id 0.
        last_exit: How the process before it ended; None where there was none, or it has not ended yet.
        sessions_lost: Sessions that earlier processes of this slot held at their end.
        deaths: How many earlier processes of this slot ended without having been told to stop.
    """

    slot: int
    pid: int
    started_at: float
    restarts: int = 0
    state: WorkerState = "starting"
    last_exit: str | None = None
    sessions_lost: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRecords:
    """All that the main process tells.

    Attributes:
        num_workers: How many workers there are to be.
        workers: Those that there are.
        lost_with_removed: Sessions lost in slots that have no worker any more.
    """

    num_workers: int
    workers: tuple[WorkerRecord, ...] = ()
    lost_with_removed: int = 0

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what the main process has written last; None where there is nothing that can be read."""
        try:
            document: dict[str, Any] = orjson.loads((folder / SLOTS_FILE).read_bytes())
            workers = tuple(WorkerRecord(**worker) for worker in document.pop("workers"))
            return cls(**document, workers=workers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass
class _Slot:
    """What has been in a slot so far."""

    processes: int = 0
    last_exit: str | None = None
    sessions_lost: int = 0
    deaths: int = 0


@dataclass
class WorkerSlots:
    """The main process's account of its workers.

    Its methods take a process's id as uvicorn has it: None for one that was not started.

    Args:
        folder: The directory of the workers' sockets; None where there is none, and nobody is told.
    """

    folder: Path | None = None
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _records: dict[int | None, WorkerRecord] = field(default_factory=dict)
    _num_workers: int = 0

    def expect(self, num_workers: int) -> None:
        """Say how many workers there are to be."""
        if num_workers != self._num_workers:
            self._num_workers = num_workers
            self._write()

    def started(self, pid: int | None, *, replaces: int | None = None) -> None:
        """Account for a worker that has been started.

        Args:
            pid: Its process.
            replaces: The process whose slot it gets, though that one still serves; None for the first free slot.
        """
        taken = {record.slot for record in self._records.values() if record.state != "leaving"}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if replaces in self._records:
            slot = self._records[replaces].slot
        known = self._slots.setdefault(slot, _Slot())
        self._records[pid] = WorkerRecord(slot, pid or 0, time.time(), restarts=known.processes)
        known.processes += 1
        self._write()

    def serves(self, pid: int | None) -> None:
        """Note that a worker has begun to serve."""
        self._set_state(pid, "serving")

    def leaves(self, pid: int | None) -> None:
        """Note that a worker was told to stop."""
        self._set_state(pid, "leaving")

    def ended(self, pid: int | None, exit_code: int | None, *, because: str | None = None) -> None:
        """Account for a worker's end.

        Args:
            pid: Its process.
            exit_code: What it ended with, a signal's number as negative.
            because: Why it was ended, where it did not end by itself.
        """
        record = self._records.pop(pid, None)
        if record is None:
            return
        slot = self._slots[record.slot]
        slot.last_exit = _told_end(record, exit_code, because)
        slot.deaths += not slot.last_exit.startswith(TOLD_TO_STOP)
        slot.sessions_lost += _take_open_sessions(self.folder, record.pid)
        self._write()

    def slot_of(self, pid: int | None) -> int:
        """Return the slot of a process; -1 for one that is not known."""
        record = self._records.get(pid)
        return -1 if record is None else record.slot

    def _set_state(self, pid: int | None, state: WorkerState) -> None:
        record = self._records.get(pid)
        if record is not None and record.state != state:
            self._records[pid] = replace(record, state=state)
            self._write()

    def _told(self) -> WorkerRecords:
        newest = {record.slot: pid for pid, record in self._records.items()}
        oldest = {record.slot: pid for pid, record in reversed(self._records.items())}
        workers = [
            replace(
                record,
                # While one process takes a slot over from another, the one before it has not ended,
                last_exit=self._slots[record.slot].last_exit if oldest[record.slot] == pid else None,
                # and what was lost there counts once.
                sessions_lost=self._slots[record.slot].sessions_lost if newest[record.slot] == pid else 0,
                deaths=self._slots[record.slot].deaths,
            )
            for pid, record in self._records.items()
        ]
        active = {record.slot for record in self._records.values() if record.state != "leaving"}
        # One that does not start is tried again after a pause; it is not forgotten meanwhile.
        empty = sorted(self._slots.keys() - newest.keys())[: max(0, self._num_workers - len(active))]
        for slot in empty:
            known = self._slots[slot]
            restarts = known.processes - 1
            workers.append(
                WorkerRecord(slot, 0, 0.0, restarts, "ended", known.last_exit, known.sessions_lost, known.deaths)
            )
        lost = sum(known.sessions_lost for slot, known in self._slots.items() if slot not in {*newest, *empty})
        return WorkerRecords(self._num_workers, tuple(workers), lost)

    def _write(self) -> None:
        if self.folder is None:
            return
        try:
            write_in_one_step(self.folder / SLOTS_FILE, orjson.dumps(self._told()))
        except OSError as error:
            logger.info("The figures of the workers will not be whole: %s: %s", self.folder, error.strerror or error)


class OpenSessions:
    """How many sessions this process holds, where the main process finds it after this one has died.

    Args:
        folder: The directory of the workers' sockets.

    Raises:
        OSError: The file can't be made or mapped.
    """

    def __init__(self, folder: Path) -> None:
        path = _open_sessions_path(folder, os.getpid())
        # Written, and not only made that long: a full disk must show here and not when the memory is touched.
        path.write_bytes(bytes(_WORD))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _WORD)
        self._word = memoryview(self._map).cast("Q")

    def hold(self, sessions: int) -> None:
        """Say how many there are."""
        self._word[0] = sessions


def describe_exit(code: int | None) -> str:
    """Return in words how a process ended.

    Args:
        code: Its exit code, a signal's number as negative; None where that is not known.
    """
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _told_end(record: WorkerRecord, exit_code: int | None, because: str | None) -> str:
    if because is None and record.state == "leaving":
        because = TOLD_TO_STOP
        # A worker that has ended in good order passes on the signal that told it.
        if exit_code in (0, -signal.SIGTERM):
            return because
    return f"{because}; {describe_exit(exit_code)}" if because else describe_exit(exit_code)


def _open_sessions_path(folder: Path, pid: int) -> Path:
    return folder / f"sessions.{pid}"


def _take_open_sessions(folder: Path | None, pid: int) -> int:
    if folder is None:
        return 0
    path = _open_sessions_path(folder, pid)
    try:
        content = path.read_bytes()
        path.unlink()
    except OSError:
        return 0
    return int.from_bytes(content[:_WORD], sys.byteorder)
