"""Memory in which one worker leaves a piece of a body for another, so that large bodies spare the socket two copies.

The sender makes it and tells its own process id, a descriptor and an inode; the receiver opens that, to read only. It
holds one piece. When it may be written and read is for the two ends to agree on: see `frames`.

Each end holds a descriptor for as long as its memory lives: Python's `mmap` keeps one of its own.

Where the system has no such memory, keeps a process from opening another one's descriptors, or has few descriptors
left, there is an error here, and bodies go by the socket alone.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import struct
from typing import Final

LARGEST_PIECE: Final = 262_144
"""Bytes that fit. A server receives about as many at once."""

_OFFER: Final = struct.Struct("!QQQ")
OFFER_SIZE: Final = _OFFER.size


class OutgoingMemory:
    """The sender's end.

    Attributes:
        offer: What the receiver has to know.

    Raises:
        OSError: The system has no memory or too few descriptors left, or no memory of this kind.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system shares no memory by a descriptor")
        descriptor = os.memfd_create("nemo-gym-body", os.MFD_CLOEXEC)
        self._descriptor: int | None = descriptor
        try:
            _leave_some(descriptor)
            os.ftruncate(descriptor, LARGEST_PIECE)
            self._memory = mmap.mmap(descriptor, LARGEST_PIECE)
            self.offer = _OFFER.pack(os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        except BaseException:
            self.was_opened()
            raise

    def put(self, piece: bytes) -> None:
        """Leave a piece; the one before must have been taken."""
        self._memory[: len(piece)] = piece

    def was_opened(self) -> None:
        """Close the descriptor that was offered: the receiver has opened the memory, or never will."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class IncomingMemory:
    """The receiver's end.

    Args:
        offer: What the sender has told.

    Raises:
        OSError: It can't be opened, or too few descriptors are left.
        ValueError: It is not what was offered.
    """

    def __init__(self, offer: bytes) -> None:
        pid, number, inode = _OFFER.unpack(offer)
        # A sender that has ended may have left its numbers to others: nothing of theirs may block, or be taken for it.
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _leave_some(descriptor)
            if os.fstat(descriptor).st_ino != inode:
                raise ValueError("another file stands where the memory was offered")
            self._memory = mmap.mmap(descriptor, LARGEST_PIECE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def take(self, length: int) -> bytes:
        """Return the piece that was left."""
        return self._memory[:length]


def _leave_some(descriptor: int) -> None:
    """Refuse a descriptor of the upper half: a connection can't do without, a large body can.

    Raises:
        OSError: It is one of those.
    """
    # The system gives the lowest number that is free, so this tells how many are taken.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptor >= limit // 2:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
