"""What a process has from the one that starts it, carried to one that was started by another.

A process that the main process spawns has its umask, user, limits and the like from the system. A worker that is
forked from a template has those of the template, as they were before the user's code ran; so it takes over the main
process's. What is not carried: scheduling policies, capabilities beyond what goes with the user, namespaces and the
root folder, filters of system calls, ignored signals, and descriptors.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

_RESOURCES: Final = frozenset(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class ProcessState:
    """What `adopt` gives to another process. For Linux.

    Attributes:
        umask: What new files are denied.
        blocked_signals: The calling thread's signal mask.
        niceness: Its nice value.
        processors: Those that it may run on.
        limits: Soft and hard limit of each resource.
        users: The real, effective and saved user.
        groups: The real, effective and saved group.
        further_groups: The supplementary groups.
    """

    umask: int
    blocked_signals: frozenset[int]
    niceness: int
    processors: frozenset[int]
    limits: dict[int, tuple[int, int]]
    users: tuple[int, int, int]
    groups: tuple[int, int, int]
    further_groups: tuple[int, ...]

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the state of this process and the calling thread."""
        # It can only be read by setting it; other threads are denied more for that moment, never less.
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            umask=umask,
            blocked_signals=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            processors=frozenset(os.sched_getaffinity(0)),
            limits={number: resource.getrlimit(number) for number in _RESOURCES},
            users=os.getresuid(),
            groups=os.getresgid(),
            further_groups=tuple(os.getgroups()),
        )

    def adopt(self) -> None:
        """Put this process and the calling thread into that state.

        What no longer can be had without a privilege, such as a higher hard limit, stays as it is. The user and the
        groups do not.

        Raises:
            OSError: They can't be taken over.
        """
        present = type(self).of_this_process()
        os.umask(self.umask)
        if present.niceness != self.niceness:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        if present.processors != self.processors:
            with suppress(OSError):
                os.sched_setaffinity(0, self.processors)
        for number, limit in self.limits.items():
            if present.limits[number] != limit:
                with suppress(OSError, ValueError):
                    resource.setrlimit(number, limit)
        # Last, the users after the groups: each takes the right to what stands before it.
        if present.further_groups != self.further_groups:
            os.setgroups(self.further_groups)
        if present.groups != self.groups:
            os.setresgid(*self.groups)
        if present.users != self.users:
            os.setresuid(*self.users)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)
