"""What each worker of a server is loaded with: one small file that all of them have mapped into memory.

A worker takes a slot of the file by a lock on one byte of it, which the kernel releases however the worker ends. What
stands in a slot whose lock is free never counts, and whoever finds it clears it. Every number has one writer, so that
nobody waits for anybody:

- the sessions that a worker holds with the requests that it handles and that may begin one, how many have ended in the
  last seconds, and when the worker's event loop ran last, are written by that worker; one whose loop has not run for a
  second is not chosen;
- the requests on their way to a worker that may begin a session there are counted by their senders, each in a cell of
  its own. They count at once: a burst is spread before the first of it has been answered;
- how many of each sender's requests have come is counted by the worker, which from then on counts them as its own:
  their sender hears of their end later if it has much to do, and sooner if their client leaves. What the two count
  drifts apart when a request is lost between them, or comes after its sender has given it up; a sender that waits for
  no answer, or of which more has come than it has sent, puts its cell right.

Failure policy: where there is no such file, no lock of this kind or no free slot, the caller gets an OSError and does
without. What damages the file's content makes the choices worse for a moment and nothing else.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.forked import let_go_in_children
from nemo_gym.session_routing.loads_file import (
    BEAT,
    ENDED,
    HELD,
    ID_WORDS,
    LARGEST,
    LOOK_S,
    PERIOD,
    SENT,
    SIZE,
    SLOTS,
    SPARE_SLOTS,
    STRIDE,
    TAKEN,
    WORD,
    WRAP,
    check_file,
    is_silent,
    load_of,
    make_file,
    milliseconds,
    worker_in,
)
from nemo_gym.session_routing.slot_locks import is_locked, try_lock, unlock

BEAT_S: Final = 0.25
"""How often a worker's event loop is to call `SharedLoads.beat`."""

_PERIOD_S: Final = 10.0
_LONGEST_AGO: Final = 32

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
        self._sessions = self._handled = 0
        # Whom this worker's cells count for; a cell is cleared when its slot has another worker.
        self._workers: list[str | None] = [None] * SLOTS
        self._unreachable: set[str] = set()
        if not path.exists():
            make_file(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            check_file(self._descriptor)
            self._map = mmap.mmap(self._descriptor, SIZE)
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
            self._look_at = now + LOOK_S
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
        """Return the sessions that a worker holds, and the requests there and on their way that may begin one."""
        return load_of(self._words, slot, self._counted)

    def ended(self, slot: int) -> int:
        """Return how many sessions of a worker ended in the last seconds; the longer ago, the less they count."""
        first = slot * STRIDE
        ago = int(self._clock() // _PERIOD_S) - self._words[first + PERIOD]
        return self._words[first + ENDED] >> min(max(ago, 0), _LONGEST_AGO)

    def beat(self) -> None:
        """Say that this worker's event loop runs."""
        if not self._has_left:
            self._words[self.slot * STRIDE + BEAT] = milliseconds(self._clock())

    def hold(self, sessions: int) -> None:
        """Say how many sessions this worker holds."""
        if not self._has_left:
            self._sessions = sessions
            self._publish(self.slot)

    def note_end(self) -> None:
        """Say that one of this worker's sessions has ended."""
        if self._has_left:
            return
        first = self.slot * STRIDE
        ended = self.ended(self.slot)
        self._words[first + PERIOD] = int(self._clock() // _PERIOD_S)
        self._words[first + ENDED] = min(ended + 1, LARGEST)

    def sent(self, slot: int) -> str | None:
        """Count a request that goes to a worker; returns what `answered` has to be given."""
        if self._has_left:
            return None
        self._open[slot] += 1
        self._add(slot, SENT + self.slot, 1)
        return self._workers[slot]

    def taken(self, sender: Sender) -> None:
        """Count a request that may begin a session as this worker's own, until `replied` is called for it.

        Args:
            sender: Who placed it; unless that is this worker, or has left since, it counted it as sent.
        """
        self._handled += 1
        if self._has_left:
            return
        self._publish(self.slot)
        slot, worker = sender
        if slot != self.slot and 0 <= slot < SLOTS and self._worker(slot) == worker:
            self._add(self.slot, TAKEN + slot, 1)

    def replied(self) -> None:
        """Count such a request no longer: the session that it began, if any, is counted as held."""
        self._handled -= 1
        if not self._has_left:
            self._publish(self.slot)

    def answered(self, slot: int, worker: str | None, *, was_sent: bool = True) -> None:
        """Wait for its answer no longer, unless its worker's slot has been cleared meanwhile.

        Args:
            slot: The worker's slot.
            worker: What `sent` returned.
            was_sent: False where in the end nothing was sent.
        """
        if worker is None or worker != self._workers[slot] or self._has_left:
            return
        # Those of before the worker was missed for a moment, in a damaged file, are answered too.
        self._open[slot] = max(self._open[slot] - 1, 0)
        if not was_sent:
            self._add(slot, SENT + self.slot, -1)
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
        first = slot * STRIDE * WORD
        self._map[first : first + STRIDE * WORD] = bytes(STRIDE * WORD)
        self._publish(slot)
        self._words[slot * STRIDE + BEAT] = milliseconds(self._clock())
        self._map[first : first + ID_WORDS * WORD] = self._worker_id.encode("ascii")

    def _publish(self, slot: int) -> None:
        self._words[slot * STRIDE + HELD] = self._sessions + self._handled

    def _add(self, slot: int, word: int, number: int) -> None:
        place = slot * STRIDE + word
        self._words[place] = (self._words[place] + number) & WRAP

    def _put_right(self, slot: int) -> None:
        """Where no answer is waited for, nothing is on its way, and nowhere is less than that."""
        first = slot * STRIDE + self.slot
        sent, taken = self._words[first + SENT], self._words[first + TAKEN]
        if not self._open[slot] or (sent - taken) & WRAP > LARGEST:
            self._words[first + SENT] = taken

    def _is_silent(self, slot: int) -> bool:
        return is_silent(self._words, slot, self._clock())

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
                    first = self.slot * STRIDE + slot
                    self._words[first + TAKEN] = self._words[first + SENT]
            if worker is not None and worker not in self._unreachable:
                self._others.append(slot)
        self._peers = [slot for slot in self._others if not self._is_silent(slot)]
        # Some more than there are senders: one that has just come counts at once.
        self._counted = min(1 + max([self.slot, *self._others]) + SPARE_SLOTS, SLOTS)
        self._unreachable.intersection_update(worker for worker in self._workers if worker is not None)

    def _worker(self, slot: int) -> str | None:
        return worker_in(self._words, self._map, slot)

    def _clear_dead(self, slot: int) -> None:
        # Under its lock, for another worker may be about to take it.
        if try_lock(self._descriptor, slot):
            self._clear(slot)
            unlock(self._descriptor, slot)

    def _clear(self, slot: int) -> None:
        """Clear what the slot's worker has written, in its own slot and in the others."""
        first = slot * STRIDE
        for word in range(first, first + SENT):
            self._words[word] = 0
        for cell in range(slot, SLOTS * STRIDE, STRIDE):
            self._words[cell + SENT] = self._words[cell + TAKEN]
