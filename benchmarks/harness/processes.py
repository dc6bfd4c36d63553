"""What processes use: processor time and memory, of all processes of a server together."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_HELPERS: Final = ("resource_tracker",)
_MB: Final = 2**20


def tree(roots: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of `roots` and everything they have started that is alive."""
    found = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            found += [process, *process.children(recursive=True)]
    return found


def workers_of(root: int) -> list[int]:
    """Return the processes of a server that answer requests: the leaves of its tree."""
    serving = []
    for process in tree([root]):
        with suppress(psutil.NoSuchProcess):
            children = [it for it in process.children() if not _is_helper(it)]
            if not children and not _is_helper(process):
                serving.append(process.pid)
    return serving


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time that the processes have used so far, in user and kernel mode."""
    total = 0.0
    for process in processes:
        with suppress(OSError, psutil.NoSuchProcess):
            total += _cpu_seconds(process)
    return total


def memory_mb(pid: int) -> float:
    """Return the memory of a process; what it shares with others counts in part, where the system can tell."""
    process = psutil.Process(pid)
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.rss)) / _MB


def forget_peak_memory(pid: int) -> bool:
    """Begin to look for the process's peak of resident memory anew; return whether the system can."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc_pid_clear_refs(5)
    except OSError:
        return False
    return True


def peak_memory_mb(pid: int) -> float:
    """Return the most resident memory that a process had since its peak was forgotten."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/{pid}/status says nothing of VmHWM")


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return float(psutil.Process(pid).memory_info().rss) / _MB


def total_memory_mb(pids: Sequence[int]) -> float:
    """Return the memory of several processes together."""
    return sum(memory_mb(pid) for pid in pids)


def _is_helper(process: psutil.Process) -> bool:
    return any(helper in part for part in process.cmdline() for helper in _HELPERS)


def _cpu_seconds(process: psutil.Process) -> float:
    if sys.platform == "linux":
        # The clock of another process, as clock_getcpuclockid(3) makes it: exact, where /proc counts in ticks of 10 ms.
        return time.clock_gettime((~process.pid << 3) | 2)
    times = process.cpu_times()
    return float(times.user + times.system)
