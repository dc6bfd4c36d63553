"""Processes below this one: finding, counting, killing and collecting them (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

KILL_WAIT_S: Final = 5.0
PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
HAS_CHILDREN_FILE: Final = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # noqa: PTH110


class Wake:
    """Makes signals readable: a descriptor to poll, and which signals came since the last look."""

    def __init__(self, *signals: int) -> None:
        self.fd, writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A program of the sandbox that signals every Python it sees shall not hit its own supervisor.
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *signals):
            signal.signal(signum, lambda *_: None)

    def take(self) -> set[int]:
        """Return the signals that came since the last look."""
        with contextlib.suppress(BlockingIOError):
            return set(os.read(self.fd, 1 << 16))
        return set()


def prctl(option: int, argument: Any) -> None:
    """Change what the kernel does for this process (prctl(2))."""
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the process that forked this one ends, however it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Parent:
    """The process that forked this one; its end wakes this one (which has a `Wake`), instead of killing it.

    So a supervisor whose own supervisor was killed has the time to end what it supervises.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    @property
    def gone(self) -> bool:
        """Whether it has ended. A SIGTERM alone says nothing: a program of the sandbox may send it."""
        return os.getppid() != self._pid


def children_of(pid: int) -> list[int]:
    """Return the living and unreaped children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - the standard library's quickest
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def parents() -> dict[int, list[int]]:
    """Return all children by parent, for kernels without the `children` file."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            found.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, nearest first."""
    children: Callable[[int], list[int]] = children_of
    if not HAS_CHILDREN_FILE:
        table = parents()
        children = lambda parent: table.get(parent, [])  # noqa: E731
    found = dict.fromkeys(children(pid))
    queue = list(found)
    while queue:
        for child in children(queue.pop()):
            if child not in found:
                found[child] = None
                queue.append(child)
    return list(found)


def signal_all(pids: list[int], signum: int) -> None:
    """Signal those of the processes that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_all(pids: list[int]) -> None:
    """Kill processes, whole process groups first: one call that no fork outruns, however many there are."""
    groups = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    for group in groups - {os.getpgrp()}:
        kill_group(group)
    signal_all(pids, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Kill a process group, if it still has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def reap(wanted: dict[int, int | None]) -> bool:
    """Collect the children that have ended, noting the exit codes of the wanted; True when no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not pid:
            return False
        if pid in wanted:
            code = os.waitstatus_to_exitcode(status)
            wanted[pid] = code if code >= 0 else 128 - code


def kill_descendants(wanted: dict[int, int | None]) -> bool:
    """Kill until no child is left; False when some still would not go (a process that hangs in the kernel)."""
    deadline = time.monotonic() + KILL_WAIT_S
    while not reap(wanted):
        kill_all(descendants(os.getpid()))
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process holds and no file backs."""
    total = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                total += int(line.split()[1]) * 1024
    return total
