"""What each worker of a server is loaded with: one small file that all of them have mapped into memory.

A worker takes a slot of the file by a lock on one byte of it, which the kernel releases however the worker ends. What
stands in a slot whose lock is free never counts, and whoever finds it clears it. Every number has one writer, so that
nobody waits for anybody:

- the sessions that a worker holds, and how many have ended in the last seconds, are written by that worker;
- the requests on their way to a worker that may begin a session there are counted by their senders, each in a cell of
  its own. They count at once: a burst is spread before the first of it has been answered.

Failure policy: where there is no such file, no lock of this kind or no free slot, the caller gets an OSError and does
without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.ownership import is_worker_id

SLOTS: Final = 64
"""How many workers the file has room for."""

_WORD: Final = 8  # bytes
# The words of a slot: its worker's id in ASCII, then numbers, of which the last ones are the senders' cells.
_ID_WORDS: Final = 4
_ENDED: Final = 4
_PERIOD: Final = 5
_HELD: Final = 6
_SENT: Final = 7
_STRIDE: Final = _SENT + SLOTS
_SIZE: Final = SLOTS * _STRIDE * _WORD

_LOCK: Final = struct.Struct("hhqqi")  # struct flock where off_t has 64 bits
_SET: Final[int | None] = getattr(fcntl, "F_OFD_SETLK", None)
_GET: Final[int | None] = getattr(fcntl, "F_OFD_GETLK", None)

_LOOK_S: Final = 0.2  # between two looks at who is there
_PERIOD_S: Final = 10.0
_LONGEST_AGO: Final = 32
_SPARE_SLOTS: Final = 8


class SharedLoads:
    """The loads as one worker counts and sees them. Not for several threads.

    Args:
        path: The file; it is made where there is none.
        worker_id: This worker.
        clock: Seconds that all workers count alike.

    Attributes:
        slot: This worker's slot.

    Raises:
        OSError: The file can't be made, mapped or locked, or all slots are taken.
    """

    def __init__(self, path: Path, worker_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._peers: list[int] = []
        self._counted = 1 + SLOTS
        # Whom this worker's cells count for; a cell is cleared when its slot has another worker.
        self._workers: list[str | None] = [None] * SLOTS
        self._unreachable: set[str] = set()
        if not path.exists():
            _make_file(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(self._descriptor, _SIZE)
            self._words = memoryview(self._map).cast("Q")
            self.slot = self._take_slot(worker_id)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._has_left = False

    def peers(self) -> list[int]:
        """Return the slots of the other workers, as they were a moment ago at most."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        return self._peers

    def worker_at(self, slot: int) -> str | None:
        """Return the worker that has a slot of `peers` and still runs."""
        worker = self._worker(slot)
        if worker is None or worker != self._workers[slot] or not self._is_locked(slot):
            self._look_at = 0.0
            return None
        return worker

    def load(self, slot: int) -> int:
        """Return the sessions that a worker holds, and those that are on their way to it."""
        first = slot * _STRIDE + _HELD
        return sum(self._words[first : first + self._counted])

    def ended(self, slot: int) -> int:
        """Return how many sessions of a worker ended in the last seconds; the longer ago, the less they count."""
        first = slot * _STRIDE
        ago = int(self._clock() // _PERIOD_S) - self._words[first + _PERIOD]
        return self._words[first + _ENDED] >> min(max(ago, 0), _LONGEST_AGO)

    def hold(self, sessions: int) -> None:
        """Say how many sessions this worker holds."""
        if not self._has_left:
            self._words[self.slot * _STRIDE + _HELD] = sessions

    def note_end(self) -> None:
        """Say that one of this worker's sessions has ended."""
        if self._has_left:
            return
        first = self.slot * _STRIDE
        ended = self.ended(self.slot)
        self._words[first + _PERIOD] = int(self._clock() // _PERIOD_S)
        self._words[first + _ENDED] = ended + 1

    def sent(self, slot: int) -> str | None:
        """Count a request that goes to a worker; returns what `answered` has to be given."""
        if self._has_left:
            return None
        self._words[slot * _STRIDE + _SENT + self.slot] += 1
        return self._workers[slot]

    def answered(self, slot: int, worker: str | None) -> None:
        """Count it no longer, unless its worker's slot has been cleared meanwhile."""
        if worker is not None and worker == self._workers[slot] and not self._has_left:
            self._words[slot * _STRIDE + _SENT + self.slot] -= 1

    def unreachable(self, worker: str) -> None:
        """Leave a worker out for good: a process that it forked may keep its lock."""
        self._unreachable.add(worker)
        self._look_at = 0.0

    def snapshot(self) -> dict[str, int]:
        """Return the load of each worker that runs."""
        self._look()
        slots = self._peers if self._has_left else [self.slot, *self._peers]
        return {worker: self.load(slot) for slot in slots if (worker := self._worker(slot)) is not None}

    def fileno(self) -> int:
        """Return the descriptor of the file, to which the lock of the slot belongs."""
        return self._descriptor

    @property
    def has_left(self) -> bool:
        """Whether this worker has given up its slot; it still sees the others."""
        return self._has_left

    def leave(self) -> None:
        """Give up the slot: nobody chooses this worker any more."""
        if not self._has_left:
            self._has_left = True
            self._clear(self.slot)
            self._unlock(self.slot)

    def close(self) -> None:
        """Leave, and see nothing any more. Calling it again is harmless."""
        if self._descriptor >= 0:
            self.leave()
            self._words.release()
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_slot(self, worker_id: str) -> int:
        for slot in range(SLOTS):
            if self._try_lock(slot):
                self._clear(slot)
                first = slot * _STRIDE * _WORD
                self._map[first : first + _ID_WORDS * _WORD] = worker_id.encode("ascii")
                self._workers[slot] = worker_id
                return slot
        raise OSError(errno.EUSERS, f"all {SLOTS} slots for workers are taken")

    def _look(self) -> None:
        self._peers = []
        for slot in range(SLOTS):
            if slot == self.slot and not self._has_left:
                continue
            worker = self._worker(slot)
            if worker is not None and not self._is_locked(slot):
                self._clear_dead(slot)
                worker = None
            if worker != self._workers[slot]:
                if not self._has_left:
                    self._words[slot * _STRIDE + _SENT + self.slot] = 0
                self._workers[slot] = worker
            if worker is not None and worker not in self._unreachable:
                self._peers.append(slot)
        # Some more than there are senders: one that has just come counts at once.
        self._counted = min(1 + max([self.slot, *self._peers]) + _SPARE_SLOTS, 1 + SLOTS)
        self._unreachable.intersection_update(worker for worker in self._workers if worker is not None)

    def _worker(self, slot: int) -> str | None:
        if not self._words[slot * _STRIDE]:
            return None
        first = slot * _STRIDE * _WORD
        worker = self._map[first : first + _ID_WORDS * _WORD].decode("ascii", "replace")
        return worker if is_worker_id(worker) else None

    def _clear_dead(self, slot: int) -> None:
        # Under its lock, for another worker may be about to take it.
        if self._try_lock(slot):
            self._clear(slot)
            self._unlock(slot)

    def _clear(self, slot: int) -> None:
        """Clear what the slot's worker has written, in its own slot and in the others."""
        first = slot * _STRIDE
        for word in range(first, first + _SENT):
            self._words[word] = 0
        for cell in range(_SENT + slot, SLOTS * _STRIDE, _STRIDE):
            self._words[cell] = 0

    def _is_locked(self, slot: int) -> bool:
        found = fcntl.fcntl(self._descriptor, _supported(_GET), _request(fcntl.F_WRLCK, slot))
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _try_lock(self, slot: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, _supported(_SET), _request(fcntl.F_WRLCK, slot))
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
            return False
        return True

    def _unlock(self, slot: int) -> None:
        fcntl.fcntl(self._descriptor, _supported(_SET), _request(fcntl.F_UNLCK, slot))


def _make_file(path: Path) -> None:
    # It gets its name when it is whole, in one step, so that no worker meets an unfinished one or makes a second.
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent) as file:
        # Written, and not only made that long: a full disk must show here and not when the memory is touched.
        file.write(bytes(_SIZE))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _request(kind: int, slot: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, slot, 1, 0)


def _supported(command: int | None) -> int:
    if command is None:
        raise OSError(errno.ENOTSUP, "this system has no locks that belong to an open file (F_OFD_SETLK)")
    return command
