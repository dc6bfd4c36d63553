"""One command in a sandbox: started, its output kept within bounds, ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any, Final

from nemo_gym.sandbox.supervision.frames import CHUNK, send_frame
from nemo_gym.sandbox.supervision.processes import (
    PR_SET_DUMPABLE,
    Parent,
    Wake,
    descendants,
    die_with_parent,
    kill_descendants,
    kill_group,
    prctl,
    reap,
    signal_all,
)

TERM_GRACE_S: Final = 1.0
"""Seconds between the SIGTERM and the SIGKILL of a command that ran out of time."""
DRAIN_GRACE_S: Final = 0.25
"""Seconds after the command's end in which output of children that it left behind still counts."""
OVER_PROCESSES: Final = signal.SIGUSR1
OVER_MEMORY: Final = signal.SIGUSR2


class Output:
    """What is kept of a stream: the beginning and the end. Memory stays below the limit and a megabyte."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.head, self.tail = bytearray(), bytearray()
        self.head_size = limit // 2
        self.tail_size = limit - self.head_size

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self.total += len(data)
        room = self.head_size - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > self.tail_size + (1 << 20):
            del self.tail[: len(self.tail) - self.tail_size]

    @property
    def cut(self) -> bool:
        """Whether the middle is left out."""
        return self.total > self.limit

    def text(self) -> bytes:
        """Return the whole, or the beginning and the end with a mark between."""
        if not self.cut:
            return bytes(self.head + self.tail)
        mark = f"\n[... {self.total - self.limit} bytes left out ...]\n".encode()
        return bytes(self.head) + mark + bytes(self.tail[len(self.tail) - self.tail_size :])


class Command:
    """One command of a request, from its start to the end of the last process that it left behind."""

    def __init__(
        self, channel: socket.socket, request: dict[str, Any], stdin: bytearray, config: dict[str, Any]
    ) -> None:
        self.channel, self.request, self.config = channel, request, config
        self.wake, self.server = Wake(OVER_PROCESSES, OVER_MEMORY), Parent()
        self.outputs: dict[int, Output] = {}
        self.out, self.err = Output(request["max_output"]), Output(request["max_output"])
        self.poll = select.poll()
        self.poll.register(self.wake.fd, select.POLLIN)
        self.poll.register(channel.fileno(), select.POLLIN | select.POLLRDHUP)
        self.timed_out = self.cancelled = False
        self.exceeded: str | None = None
        self.ended_at: float | None = None
        self.started_at = time.monotonic()
        self.kill_at: float = self.started_at + request["timeout"]
        self.pid = self._start(stdin)
        self.codes: dict[int, int | None] = {self.pid: None}

    def _start(self, stdin: bytearray) -> int:
        pipes = {}
        for output in (self.out, self.err):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.outputs[reader] = output
            pipes[output] = writer
            self.poll.register(reader, select.POLLIN)
        if stdin:
            source = os.memfd_create("stdin")
            with open(os.dup(source), "wb") as file:  # noqa: PTH123
                file.write(stdin)
            os.lseek(source, 0, os.SEEK_SET)
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        pid = os.fork()
        if not pid:
            become(self.request, self.config, (source, pipes[self.out], pipes[self.err]))
        for fd in (source, *pipes.values()):
            os.close(fd)
        return pid

    def run(self) -> None:
        """Reply once the command is done; return when nothing of it is left."""
        while not self._done():
            self._step(self._wait_until())
        self._take_signals()  # what killed the command was told before it was done
        if self.timed_out or self.cancelled or self.exceeded:
            self._kill()
            for fd in list(self.outputs):
                while self._read(fd):
                    pass
        if not self.cancelled:
            self._reply()
        self.poll.unregister(self.channel.fileno())
        self.channel.close()
        # What it left in the background may go on, and write to pipes that somebody empties.
        self.outputs = dict.fromkeys(self.outputs, Output(0))
        while not reap(self.codes):
            self._step(None)
            if self.exceeded or self.server.gone:
                kill_descendants(self.codes)

    def _kill(self) -> None:
        kill_group(self.pid)  # before anything is listed: where a fork bomb runs, every step is slow
        kill_descendants(self.codes)

    def _done(self) -> bool:
        now = time.monotonic()
        gone = reap(self.codes)
        if self.ended_at is None and self.codes[self.pid] is not None:
            self.ended_at = now
        if self.cancelled or self.exceeded:
            return True
        if self.timed_out:
            return gone or now >= self.kill_at
        if self.ended_at is not None:
            return not self.outputs or now >= self.ended_at + DRAIN_GRACE_S
        if now >= self.kill_at:
            self.timed_out = True
            self.kill_at = now + TERM_GRACE_S
            signal_all(descendants(os.getpid()), signal.SIGTERM)
        return False

    def _wait_until(self) -> float:
        if self.ended_at is not None and not self.timed_out:
            return self.ended_at + DRAIN_GRACE_S
        return self.kill_at

    def _step(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic()) * 1000 + 1
        for fd, _ in self.poll.poll(timeout):
            if fd in self.outputs:
                self._read(fd)
            elif fd == self.wake.fd:
                self._take_signals()
            else:
                self.cancelled = True

    def _take_signals(self) -> None:
        signals = self.wake.take()
        for signum, what in ((OVER_PROCESSES, "processes"), (OVER_MEMORY, "memory")):
            if signum in signals:
                self.exceeded = what
        if self.server.gone:
            self.cancelled = True

    def _read(self, fd: int) -> bool:
        """Take what is there of an output; True when there may be more."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.outputs[fd].add(data)
        else:
            self.poll.unregister(fd)
            os.close(fd)
            del self.outputs[fd]
        return bool(data)

    def _reply(self) -> None:
        out, err = self.out.text(), self.err.text()
        header = {
            "end": True,
            "return_code": None if self.timed_out or self.exceeded else self.codes[self.pid],
            "timed_out": self.timed_out,
            "exceeded": self.exceeded,
            "cut": self.out.cut or self.err.cut,
            "duration": (self.ended_at or time.monotonic()) - self.started_at,
            "out": len(out),
        }
        with contextlib.suppress(OSError):
            send_frame(self.channel, header, out + err)


def become(request: dict[str, Any], config: dict[str, Any], stdio: tuple[int, int, int]) -> None:
    """Turn this freshly forked process into the command; never returns."""
    code = 126
    try:
        die_with_parent()
        os.setsid()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        os.closerange(3, 1 << 20)
        for signum in range(1, signal.SIGRTMIN):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(signum, signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write("500")  # where memory runs out, not the worker goes but this
        os.chdir(os.path.join(config["workdir"], request["cwd"] or ""))  # noqa: PTH118
        for name, (soft, hard) in config["limits"].items():
            _, allowed = resource.getrlimit(getattr(resource, name))
            within = [value if allowed == resource.RLIM_INFINITY else min(value, allowed) for value in (soft, hard)]
            resource.setrlimit(getattr(resource, name), (within[0], within[1]))
        argv = request["argv"]
        if isinstance(argv, str):
            argv = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", argv]  # noqa: PTH110
        code = 127
        os.execvpe(argv[0], argv, config["env"] | request["env"])  # noqa: S606 - the shell is what was asked for
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or "the command could not be started"
        os.write(2, f"sandbox: {where}: {getattr(error, 'strerror', None) or error}\n".encode(errors="replace"))
    finally:
        os._exit(code)
