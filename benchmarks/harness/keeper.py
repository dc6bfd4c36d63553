"""Runs a program, and ends it with all that it has started when standard input ends.

Run it as `python -m benchmarks.harness.keeper PROGRAM ARGUMENT...`, in a process group of its own. The benchmark holds
the other end of standard input, which the kernel closes however the benchmark ends. The program's process id is told
on standard output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(arguments: list[str]) -> int:
    """Run the program, and return its exit code."""
    # The whole group gets it, and this process waits for the program to end by it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        print(process.pid, flush=True)
        threading.Thread(target=_follow, daemon=True).start()
        return process.wait()


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
