"""The file of the loads: what stands where in it, and how it is made and read. `loads` tells who writes what."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.ownership import is_worker_id

SLOTS: Final = 64
"""How many workers the file has room for."""

WORD: Final = 8  # bytes
# The words of a slot: its worker's id in ASCII, then numbers, of which the last ones are by sender: what it has sent,
# written by itself, and what of that has come, written by the slot's worker.
ID_WORDS: Final = 4
ENDED: Final = 4
PERIOD: Final = 5
BEAT: Final = 6
HELD: Final = 7
SENT: Final = 8
TAKEN: Final = SENT + SLOTS
STRIDE: Final = TAKEN + SLOTS
SIZE: Final = SLOTS * STRIDE * WORD  # bytes

LOOK_S: Final = 0.2  # between two looks at who is there
SPARE_SLOTS: Final = 8  # for senders that have come since
LARGEST: Final = (1 << 63) - 1
WRAP: Final = (1 << 64) - 1

_SILENT_MS: Final = 1000  # without a beat


def worker_in(words: memoryview, mapped: mmap.mmap, slot: int) -> str | None:
    """Return the worker whose id stands in a slot; None where none does."""
    if not words[slot * STRIDE]:
        return None
    first = slot * STRIDE * WORD
    worker = mapped[first : first + ID_WORDS * WORD].decode("ascii", "replace")
    return worker if is_worker_id(worker) else None


def load_of(words: memoryview, slot: int, senders: int) -> int:
    """Return the sessions that a worker holds, and the requests there and on their way that may begin one.

    Args:
        words: The file.
        slot: The worker's slot.
        senders: How many slots there may be senders in; of those behind them nothing is counted.
    """
    held = slot * STRIDE + HELD
    sent, taken = slot * STRIDE + SENT, slot * STRIDE + TAKEN
    on_their_way = (sum(words[sent : sent + senders]) - sum(words[taken : taken + senders])) & WRAP
    # Beyond half of what a word holds it is less than nothing: more has come than is known to be sent.
    return int(words[held]) + (on_their_way if on_their_way <= LARGEST else 0)


def milliseconds(now: float) -> int:
    """Return a clock's seconds as they stand in the file."""
    return int(now * 1000)


def is_silent(words: memoryview, slot: int, now: float) -> bool:
    """Tell whether the event loop of a slot's worker has not run for a second."""
    return bool(milliseconds(now) - words[slot * STRIDE + BEAT] > _SILENT_MS)


def check_file(descriptor: int) -> None:
    """Raise an OSError where this is no file of loads of this user."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != SIZE:
        raise OSError(errno.EINVAL, "this is no file of loads")


def make_file(path: Path) -> None:
    """Make the file, unless it is there already."""
    # It gets its name when it is whole, in one step, so that no worker meets an unfinished one or makes a second.
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent) as file:
        # Written, and not only made that long: a full disk must show here and not when the memory is touched.
        file.write(bytes(SIZE))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
