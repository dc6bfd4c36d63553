"""The loads as a client of this machine and user sees them."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from nemo_gym.session_routing.loads_file import (
    LOOK_S,
    SIZE,
    SLOTS,
    SPARE_SLOTS,
    STRIDE,
    check_file,
    is_silent,
    load_of,
    worker_in,
)
from nemo_gym.session_routing.slot_locks import is_locked


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
            check_file(self._descriptor)
            self._map = mmap.mmap(self._descriptor, SIZE, access=mmap.ACCESS_READ)
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
        """Return the sessions that a worker holds, and the requests there and on their way that may begin one."""
        return load_of(self._words, slot, self._counted)

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
        self._look_at = now + LOOK_S
        self._workers = [
            (slot, worker)
            for slot in range(SLOTS)
            if (worker := worker_in(self._words, self._map, slot)) is not None
            and not is_silent(self._words, slot, now)
            and is_locked(self._descriptor, slot)
        ]
        places = [slot * STRIDE for slot, _ in self._workers]
        self._first_words = [(place, self._words[place]) for place in places]
        last = self._workers[-1][0] if self._workers else 0
        self._counted = min(1 + last + SPARE_SLOTS, SLOTS)
