"""The main process of a server with several workers: uvicorn's supervisor, made patient and prompt.

A worker that dies is replaced at once, and a worker that does not answer for `timeout_worker_healthcheck` seconds is
killed and replaced. uvicorn waits for one worker's answer at a time: with a timeout long enough for busy workers, a
death or a signal would go unnoticed for as long. Here the answers are only looked at, never waited for.
"""

from __future__ import annotations

import logging
import time
from socket import socket
from typing import Final
from weakref import WeakKeyDictionary

from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

# Added to the workers' own grace: a worker that is not gone by then won't go by itself.
_JOIN_MARGIN_S: Final = 3.0

logger = logging.getLogger(__name__)


class Supervisor(Multiprocess):
    """Keeps `config.workers` worker processes running until it is told to stop.

    Args:
        config: uvicorn's settings, with the application as an import string.
        sockets: The bound sockets that all workers accept from.

    Attributes:
        startup_failed: Whether a worker ended because its application could not start.
    """

    def __init__(self, config: Config, sockets: list[socket]) -> None:
        super().__init__(config, sockets)
        self.startup_failed = False
        self._asked_at: WeakKeyDictionary[Process, float] = WeakKeyDictionary()

    def keep_subprocess_alive(self) -> None:
        """Replace the workers that are dead or have not answered in time; never waits for one."""
        for index, worker in enumerate(self.processes):
            if self.should_exit.is_set():
                return
            if worker.process.is_alive() and self._answers(worker):
                continue
            worker.kill()
            worker.join()
            self._asked_at.pop(worker, None)
            if worker.exitcode == STARTUP_FAILURE:
                self.startup_failed = True
                self.should_exit.set()
                return
            logger.warning("Worker %s ended with code %s; starting another", worker.pid, worker.exitcode)
            replacement = Process(self.config, self.sockets)
            replacement.start()
            self.processes[index] = replacement

    def join_all(self) -> None:
        """Wait for the workers to finish what they do, for as long as their grace allows."""
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + _JOIN_MARGIN_S
        for worker in self.processes:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                logger.warning("Worker %s did not stop in time; killing it", worker.pid)
                worker.process.kill()
                worker.process.join()

    def _answers(self, worker: Process) -> bool:
        """Whether the worker still counts as healthy; asks it again once it has answered."""
        now = time.monotonic()
        try:
            while worker.parent_conn.poll(0):
                worker.parent_conn.recv()
                self._asked_at.pop(worker, None)
            if worker not in self._asked_at:
                worker.parent_conn.send(b"ping")
                self._asked_at[worker] = now
        except (OSError, EOFError):
            return False
        silent_for = now - self._asked_at[worker]
        if silent_for > self.config.timeout_worker_healthcheck:
            logger.error("Worker %s has not answered for %.0f s; its sessions are lost", worker.pid, silent_for)
            return False
        return True
