"""The process inside of a sandbox that takes the worker's requests, and the processes that answer them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any, Final

from nemo_gym.sandbox.supervision.command import OVER_MEMORY, OVER_PROCESSES, Command
from nemo_gym.sandbox.supervision.files import Refused, read_file, write_file
from nemo_gym.sandbox.supervision.frames import receive_frame, send_frame
from nemo_gym.sandbox.supervision.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NAME,
    Parent,
    Wake,
    children_of,
    descendants,
    die_with_parent,
    kill_all,
    kill_descendants,
    memory_of,
    prctl,
    reap,
    signal_all,
)

WATCH_INTERVAL_S: Final = 0.05


def run_command(channel: socket.socket, request: dict[str, Any], stdin: bytearray, config: dict[str, Any]) -> None:
    """Run a command, and stay until the last of its processes has ended."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Command(channel, request, stdin, config).run()


def answer(channel: socket.socket, config: dict[str, Any]) -> None:
    """Handle one request, in a process of its own; never returns."""
    try:
        die_with_parent()
        handlers = {"exec": run_command, "read": read_file, "write": write_file}
        request, payload = receive_frame(channel)
        send_frame(channel, {"accepted": True})
        try:
            handlers[request["do"]](channel, request, payload, config)
        except Refused as refusal:
            send_frame(channel, {"end": True, "error": refusal.args[0], "text": refusal.args[1]})
        except OSError as error:
            send_frame(channel, {"end": True, "error": error.errno, "text": error.strerror or str(error)})
    except (OSError, EOFError):
        pass  # the worker has gone, or takes no more interest
    finally:
        os._exit(0)


class Server:
    """Takes requests, and watches what their processes use together."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control, self.config = control, config
        self.requests: dict[int, int | None] = {}

    def run(self) -> None:
        """Serve until the worker goes, or the guard does: then end all that it would have ended."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_NAME, b"sandbox")
        if self.config["private"]:
            prctl(PR_SET_DUMPABLE, 0)
        wake, parent = Wake(), Parent()
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake.fd, select.POLLIN)
        send_frame(self.control, {"ready": True})
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        while True:
            watching = self.requests and (self.config["max_processes"] or self.config["max_memory"])
            ready = {fd for fd, _ in poll.poll(WATCH_INTERVAL_S * 1000 if watching else None)}
            if wake.fd in ready:
                wake.take()
                if parent.gone:
                    kill_descendants(self.requests)
                    return
                self._reap()
            if self.control.fileno() in ready and not self._accept():
                return
            if watching:
                self._watch()

    def _accept(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not fds:  # the end; or no descriptor is free for the socket, and the worker sees that end instead
            return bool(data)
        channel = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError as error:  # the machine is at its limit
            with contextlib.suppress(OSError):
                send_frame(channel, {"error": error.errno, "text": f"no process could be started: {error.strerror}"})
        else:
            if not pid:
                self.control.close()
                answer(channel, self.config)
            self.requests[pid] = None
        channel.close()
        return True

    def _reap(self) -> None:
        reap(self.requests)
        self.requests = {pid: None for pid, code in self.requests.items() if code is None}
        # Whoever is our child without being a request's process lost that process: the command killed it.
        orphans = [pid for pid in children_of(os.getpid()) if pid not in self.requests]
        if orphans:
            kill_all([*orphans, *(inner for pid in orphans for inner in descendants(pid))])

    def _watch(self) -> None:
        below = {pid: descendants(pid) for pid in self.requests}
        most = self.config["max_processes"]
        if most and sum(map(len, below.values())) > most:
            _end(max(below, key=lambda pid: len(below[pid])), below, OVER_PROCESSES)
        if self.config["max_memory"]:
            used = {pid: sum(map(memory_of, inner)) for pid, inner in below.items()}
            if sum(used.values()) > self.config["max_memory"]:
                _end(max(used, key=used.__getitem__), below, OVER_MEMORY)


def _end(request: int, below: dict[int, list[int]], reason: int) -> None:
    """Tell a request's process why, and kill what it runs: it may not get to that itself."""
    signal_all([request], reason)
    kill_all(below[request])
