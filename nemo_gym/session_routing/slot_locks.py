"""Locks on the slots of a file, one byte each, which the kernel releases however their holder ends.

They belong to the open file and not to the process: what else a process opens and closes does not touch them, and a
process that it forks shares them until it has closed and unmapped the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

_LOCK: Final = struct.Struct("hhqqi")  # struct flock where off_t has 64 bits
_SET: Final[int | None] = getattr(fcntl, "F_OFD_SETLK", None)
_GET: Final[int | None] = getattr(fcntl, "F_OFD_GETLK", None)


def is_locked(descriptor: int, slot: int) -> bool:
    """Tell whether another open file holds the lock of a slot.

    Raises:
        OSError: This system has no such locks.
    """
    found = fcntl.fcntl(descriptor, _supported(_GET), _request(fcntl.F_WRLCK, slot))
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def try_lock(descriptor: int, slot: int) -> bool:
    """Take the lock of a slot; False where another open file holds it.

    Raises:
        OSError: This system has no such locks.
    """
    try:
        fcntl.fcntl(descriptor, _supported(_SET), _request(fcntl.F_WRLCK, slot))
    except OSError as error:
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise
        return False
    return True


def unlock(descriptor: int, slot: int) -> None:
    """Give up the lock of a slot."""
    fcntl.fcntl(descriptor, _supported(_SET), _request(fcntl.F_UNLCK, slot))


def _request(kind: int, slot: int) -> bytes:
    return _LOCK.pack(kind, os.SEEK_SET, slot, 1, 0)


def _supported(command: int | None) -> int:
    if command is None:
        raise OSError(errno.ENOTSUP, "this system has no locks that belong to an open file (F_OFD_SETLK)")
    return command
