"""What each worker of a server is loaded with: one small file that all of them have mapped into memory.

A worker takes a slot of the file by a lock on one byte of it, which the kernel releases however the worker ends. What
stands in a slot whose lock is free never counts, and whoever finds it clears it. Every number has one writer, so that
nobody waits for anybody:

- the sessions that a worker holds, how many have ended in the last seconds, and when the worker's event loop ran last,
  are written by that worker; one whose loop has not run for a second is not chosen;
- the requests on their way to a worker that may begin a session there are counted by their senders, each in a cell of
  its own. They count at once: a burst is spread before the first of it has been answered;
- how many of each sender's requests it has answered is counted by the worker, when it counts their sessions as held: a
  sender with much to do hears of it later, and until then they would count twice. What the two count drifts apart when
  a request is lost between them; a sender that waits for no answer puts its cell right.

Failure policy: where there is no such file, no lock of this kind or no free slot, the caller gets an OSError and does
without. What damages the file's content makes the choices worse for a moment and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.forked import let_go_in_children
from nemo_gym.session_routing.ownership import is_worker_id
from nemo_gym.session_routing.slot_locks import is_locked, try_lock, unlock

SLOTS: Final = 64
"""How many workers the file has room for."""

BEAT_S: Final = 0.25
"""How often a worker's event loop is to call `SharedLoads.beat`."""

_WORD: Final = 8  # bytes
# The words of a slot: its worker's id in ASCII, then numbers, of which the last ones are by sender: what it has sent,
# written by itself, and what of that was answered, written by the slot's worker.
_ID_WORDS: Final = 4
_ENDED: Final = 4
_PERIOD: Final = 5
_BEAT: Final = 6
_HELD: Final = 7
_SENT: Final = 8
_TAKEN: Final = _SENT + SLOTS
_STRIDE: Final = _TAKEN + SLOTS
_SIZE: Final = SLOTS * _STRIDE * _WORD

_LOOK_S: Final = 0.2  # between two looks at who is there
_SILENT_MS: Final = 1000  # without a beat
_LARGEST: Final = (1 << 63) - 1
_WRAP: Final = (1 << 64) - 1
_PERIOD_S: Final = 10.0
_LONGEST_AGO: Final = 32
_SPARE_SLOTS: Final = 8


Sender = tuple[int, str]
"""A worker that has counted a request as sent: its slot and its id."""


class SharedLoads:
    """The loads as one worker counts and sees them. Not for several threads.

    Args:
        path: The file; it is made where there is none.
        worker_id: This worker.
        clock: Seconds that all workers count alike.

    Attributes:
        slot: This worker's slot.
        sender: This worker, for those that it sends requests to.

    Raises:
        OSError: The file can't be made, mapped or locked, or all slots are taken.
    """

    def __init__(self, path: Path, worker_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._others: list[int] = []
        self._peers: list[int] = []
        self._counted = SLOTS
        # How many of this worker's requests are not answered, by slot.
        self._open = [0] * SLOTS
        self._worker_id = worker_id
        self._sessions = 0
        # Whom this worker's cells count for; a cell is cleared when its slot has another worker.
        self._workers: list[str | None] = [None] * SLOTS
        self._unreachable: set[str] = set()
        if not path.exists():
            _make_file(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _check_file(self._descriptor)
            self._map = mmap.mmap(self._descriptor, _SIZE)
            self._words = memoryview(self._map).cast("Q")
            self.slot = self._take_slot()
        except BaseException:
            os.close(self._descriptor)
            raise
        self.sender: Sender = (self.slot, worker_id)
        self._has_left = False
        let_go_in_children(self)

    def peers(self) -> list[int]:
        """Return the slots of the other workers whose event loops run, as they were a moment ago at most."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        return self._peers

    def worker_at(self, slot: int) -> str | None:
        """Return the worker that has a slot of `peers` and still runs and beats."""
        worker = self._worker(slot)
        if (
            worker is None
            or worker != self._workers[slot]
            or self._is_silent(slot)
            or not is_locked(self._descriptor, slot)
        ):
            self._look_at = 0.0
            return None
        return worker

    def load(self, slot: int) -> int:
        """Return the sessions that a worker holds, and those that are on their way to it."""
        return _load(self._words, slot, self._counted)

    def ended(self, slot: int) -> int:
        """Return how many sessions of a worker ended in the last seconds; the longer ago, the less they count."""
        first = slot * _STRIDE
        ago = int(self._clock() // _PERIOD_S) - self._words[first + _PERIOD]
        return self._words[first + _ENDED] >> min(max(ago, 0), _LONGEST_AGO)

    def beat(self) -> None:
        """Say that this worker's event loop runs."""
        if not self._has_left:
            self._words[self.slot * _STRIDE + _BEAT] = _milliseconds(self._clock())

    def hold(self, sessions: int) -> None:
        """Say how many sessions this worker holds."""
        if not self._has_left:
            self._sessions = sessions
            self._words[self.slot * _STRIDE + _HELD] = sessions

    def note_end(self) -> None:
        """Say that one of this worker's sessions has ended."""
        if self._has_left:
            return
        first = self.slot * _STRIDE
        ended = self.ended(self.slot)
        self._words[first + _PERIOD] = int(self._clock() // _PERIOD_S)
        self._words[first + _ENDED] = min(ended + 1, _LARGEST)

    def sent(self, slot: int) -> str | None:
        """Count a request that goes to a worker; returns what `answered` has to be given."""
        if self._has_left:
            return None
        self._open[slot] += 1
        self._add(slot, _SENT + self.slot, 1)
        return self._workers[slot]

    def taken(self, sender: Sender) -> None:
        """Say that this worker answers a request that was sent to it: what it began is counted as held.

        Args:
            sender: Who counted it as sent; one that has left since does not count.
        """
        slot, worker = sender
        if not self._has_left and 0 <= slot < SLOTS and self._worker(slot) == worker:
            self._add(self.slot, _TAKEN + slot, 1)

    def answered(self, slot: int, worker: str | None, *, was_sent: bool = True) -> None:
        """Wait for its answer no longer, unless its worker's slot has been cleared meanwhile.

        Args:
            slot: The worker's slot.
            worker: What `sent` returned.
            was_sent: False where in the end nothing was sent.
        """
        if worker is None or worker != self._workers[slot] or self._has_left:
            return
        self._open[slot] -= 1
        if not was_sent:
            self._add(slot, _SENT + self.slot, -1)
        self._put_right(slot)

    def unreachable(self, worker: str) -> None:
        """Leave a worker out for good: it may keep its lock for an instant longer than its socket."""
        self._unreachable.add(worker)
        self._look_at = 0.0

    def snapshot(self) -> dict[str, int]:
        """Return the load of each worker that runs."""
        self._look()
        slots = self._others if self._has_left else [self.slot, *self._others]
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
            unlock(self._descriptor, self.slot)

    def close(self) -> None:
        """Leave, and see nothing any more. Calling it again is harmless."""
        if self._descriptor >= 0:
            self.leave()
            self._unmap()

    def let_go(self) -> None:
        """Keep nothing of the worker that has forked this process: its lock is the open file's, mapped or not."""
        if self._descriptor >= 0:
            self._has_left = True
            self._unmap()

    def _unmap(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
        self._words.release()
        self._map.close()

    def _take_slot(self) -> int:
        for slot in range(SLOTS):
            if try_lock(self._descriptor, slot):
                self._workers[slot] = self._worker_id
                self._write_own(slot)
                return slot
        raise OSError(errno.EUSERS, f"all {SLOTS} slots for workers are taken")

    def _write_own(self, slot: int) -> None:
        self._clear(slot)
        first = slot * _STRIDE * _WORD
        self._map[first : first + _STRIDE * _WORD] = bytes(_STRIDE * _WORD)
        self._words[slot * _STRIDE + _HELD] = self._sessions
        self._words[slot * _STRIDE + _BEAT] = _milliseconds(self._clock())
        self._map[first : first + _ID_WORDS * _WORD] = self._worker_id.encode("ascii")

    def _add(self, slot: int, word: int, number: int) -> None:
        place = slot * _STRIDE + word
        self._words[place] = (self._words[place] + number) & _WRAP

    def _put_right(self, slot: int) -> None:
        """Where no answer is waited for, nothing is on its way."""
        if not self._open[slot]:
            first = slot * _STRIDE + self.slot
            self._words[first + _SENT] = self._words[first + _TAKEN]

    def _is_silent(self, slot: int) -> bool:
        return _is_silent(self._words, slot, self._clock())

    def _look(self) -> None:
        self._others = []
        for slot in range(SLOTS):
            if slot == self.slot and not self._has_left:
                if self._worker(slot) != self._worker_id:
                    self._write_own(slot)  # somebody has damaged the file
                continue
            worker = self._worker(slot)
            if worker is not None and not is_locked(self._descriptor, slot):
                self._clear_dead(slot)
                worker = None
            if worker != self._workers[slot]:
                self._open[slot] = 0
                self._workers[slot] = worker
            if not self._has_left:
                self._put_right(slot)
                if worker is None:
                    # A sender that is gone sends nothing, whatever of its was under way when it went.
                    first = self.slot * _STRIDE + slot
                    self._words[first + _TAKEN] = self._words[first + _SENT]
            if worker is not None and worker not in self._unreachable:
                self._others.append(slot)
        self._peers = [slot for slot in self._others if not self._is_silent(slot)]
        # Some more than there are senders: one that has just come counts at once.
        self._counted = min(1 + max([self.slot, *self._others]) + _SPARE_SLOTS, SLOTS)
        self._unreachable.intersection_update(worker for worker in self._workers if worker is not None)

    def _worker(self, slot: int) -> str | None:
        return _worker_in(self._words, self._map, slot)

    def _clear_dead(self, slot: int) -> None:
        # Under its lock, for another worker may be about to take it.
        if try_lock(self._descriptor, slot):
            self._clear(slot)
            unlock(self._descriptor, slot)

    def _clear(self, slot: int) -> None:
        """Clear what the slot's worker has written, in its own slot and in the others."""
        first = slot * _STRIDE
        for word in range(first, first + _SENT):
            self._words[word] = 0
        for cell in range(slot, SLOTS * _STRIDE, _STRIDE):
            self._words[cell + _SENT] = self._words[cell + _TAKEN]


class LoadsView:
    """The loads as a client sees them: it takes no slot and writes nothing. Not for several threads.

    Args:
        path: The file.
        clock: Seconds.

    Raises:
        OSError: There is no such file of this user, or it can't be mapped.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._look_at = 0.0
        self._workers: list[tuple[int, str]] = []
        self._first_words: list[tuple[int, int]] = []
        self._counted = SLOTS
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        # Clients have no end of life at which they would close it.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            _check_file(self._descriptor)
            self._map = mmap.mmap(self._descriptor, _SIZE, access=mmap.ACCESS_READ)
        except BaseException:
            self._close()
            raise
        self._words = memoryview(self._map).cast("Q")

    def workers(self) -> list[tuple[int, str]]:
        """Return the slots and ids of the workers whose event loops run, as they were a moment ago.

        One that has left is never among them.
        """
        if self._clock() >= self._look_at:
            self._look()
            return self._workers
        words = self._words
        for place, word in self._first_words:
            if words[place] != word:
                self._look()
                break
        return self._workers

    def load(self, slot: int) -> int:
        """Return the sessions that a worker holds, and those that are on their way to it."""
        return _load(self._words, slot, self._counted)

    def leave_out(self, worker: str) -> None:
        """Leave a worker out until the next look."""
        self._workers = [other for other in self._workers if other[1] != worker]

    def close(self) -> None:
        """See nothing any more. Calling it again is harmless."""
        if self._close.alive:
            self._words.release()
            self._map.close()
            self._close()

    def _look(self) -> None:
        now = self._clock()
        self._look_at = now + _LOOK_S
        self._workers = [
            (slot, worker)
            for slot in range(SLOTS)
            if (worker := _worker_in(self._words, self._map, slot)) is not None
            and not _is_silent(self._words, slot, now)
            and is_locked(self._descriptor, slot)
        ]
        places = [slot * _STRIDE for slot, _ in self._workers]
        self._first_words = [(place, self._words[place]) for place in places]
        last = self._workers[-1][0] if self._workers else 0
        self._counted = min(1 + last + _SPARE_SLOTS, SLOTS)


def _worker_in(words: memoryview, mapped: mmap.mmap, slot: int) -> str | None:
    if not words[slot * _STRIDE]:
        return None
    first = slot * _STRIDE * _WORD
    worker = mapped[first : first + _ID_WORDS * _WORD].decode("ascii", "replace")
    return worker if is_worker_id(worker) else None


def _load(words: memoryview, slot: int, senders: int) -> int:
    held = slot * _STRIDE + _HELD
    sent, taken = slot * _STRIDE + _SENT, slot * _STRIDE + _TAKEN
    on_their_way = (sum(words[sent : sent + senders]) - sum(words[taken : taken + senders])) & _WRAP
    # Beyond half of what a word holds it is less than nothing: more was answered than is known to be sent.
    return int(words[held]) + (on_their_way if on_their_way <= _LARGEST else 0)


def _milliseconds(now: float) -> int:
    return int(now * 1000)


def _is_silent(words: memoryview, slot: int, now: float) -> bool:
    return bool(_milliseconds(now) - words[slot * _STRIDE + _BEAT] > _SILENT_MS)


def _check_file(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != _SIZE:
        raise OSError(errno.EINVAL, "this is no file of loads")


def _make_file(path: Path) -> None:
    # It gets its name when it is whole, in one step, so that no worker meets an unfinished one or makes a second.
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent) as file:
        # Written, and not only made that long: a full disk must show here and not when the memory is touched.
        file.write(bytes(_SIZE))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
