"""What a process that a worker forks must not keep of it.

Such a process has everything that was open in the worker: the private socket, the connections to it, the lock of the
worker's slot. As long as it kept them, a dead worker would look like one that is only busy, and would be waited for.
What a worker starts as a new program has none of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import weakref
from pathlib import Path
from typing import Final, Protocol

_DESCRIPTORS: Final = "/dev/fd"


class Inherited(Protocol):
    """Something that a forked process is to let go of."""

    def let_go(self) -> None:
        """Called in the forked process, maybe more than once."""


def let_go_in_children(inherited: Inherited) -> None:
    """Have each process that this one forks from here on let go of something, as long as that is there."""
    _all_inherited().add(inherited)


def let_go_of_sockets(folder: Path) -> None:
    """Close the Unix sockets of which either end has its name in a folder."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in [int(entry.name) for entry in Path(_DESCRIPTORS).iterdir()]:
            if _has_end_in(descriptor, f"{folder}/"):
                # Its number stays taken: the object that it belongs to may close it once more.
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)


@functools.cache
def _all_inherited() -> weakref.WeakSet[Inherited]:
    """Return what forked processes let go of. Cached, as nothing can be taken back from the interpreter's list."""
    every: weakref.WeakSet[Inherited] = weakref.WeakSet()

    def let_go() -> None:
        for inherited in list(every):
            inherited.let_go()

    os.register_at_fork(after_in_child=let_go)
    return every


def _has_end_in(descriptor: int, prefix: str) -> bool:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if sock.family != socket.AF_UNIX:
            return False
        ends = [sock.getsockname()]
        with contextlib.suppress(OSError):
            ends.append(sock.getpeername())
    finally:
        sock.detach()
    return any(isinstance(end, str) and end.startswith(prefix) for end in ends)
