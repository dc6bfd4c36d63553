"""The main process of a server with several workers: uvicorn's supervisor, made patient and prompt.

While it serves, nothing here waits for a worker, save for the end of one that was killed; and forking one waits for the
template, at most for some seconds. A worker that dies is replaced at once, and one that has served and then does not
answer for `timeout_worker_healthcheck` seconds is killed and replaced. uvicorn waits for one worker's answer, start or
end at a time: with limits long enough for busy workers, a death or a signal would go unnoticed for as long.

Starting up has no limit, for a worker may load much. One that ends before it has served is replaced after a pause
that grows, so that a broken worker doesn't burn the machine; likewise one that the system refuses to start, for want of
memory, processes or descriptors. When that happens before all the first workers have served, the server has failed to
start. At the end, those that have served get their grace; one that has not is ended almost at once.

Workers are forked from the template where there is one (see `template`), else spawned, as they are once it is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from socket import socket
from typing import Final

from uvicorn import Config
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from nemo_gym.server.template import TemplateGoneError, WorkerTemplate
from nemo_gym.server.worker_env import WorkerEnv
from nemo_gym.server.worker_slots import WorkerSlots
from nemo_gym.server.workers import ALL_SERVE, ForkedWorker, Worker

# Added to the workers' own grace: a worker that is not gone by then won't go by itself.
_JOIN_MARGIN_S: Final = 3.0
# For a worker that has not served when it is to end: nobody waits for anything that it does.
_GRACE_BEFORE_SERVING_S: Final = 1.0
# At the end, for all answers of those that have not been known to serve.
_LAST_ANSWERS_S: Final = 0.3
_ROUND_S: Final = 0.5
# While workers start, so that it is known at once when all of them serve.
_STARTING_ROUND_S: Final = 0.02
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_KILLED_FROM_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)

logger = logging.getLogger(__name__)


@dataclass
class _Watch:
    """What is known of one worker.

    Attributes:
        asked_at: When it was asked and has not answered yet.
        served: Whether it has ever served.
        silent_for: Seconds that it had not answered when it was given up for that.
    """

    asked_at: float | None = None
    served: bool = False
    silent_for: float | None = None


class Supervisor(Multiprocess):
    """Keeps `config.workers` worker processes running until it is told to stop.

    Args:
        config: uvicorn's settings, with the application as an import string.
        sockets: The bound sockets that all workers accept from.
        template: What to fork workers from; None to spawn them. It is closed at the end of `run`.
        slots: Where the workers are accounted for.

    Attributes:
        startup_failed: Whether the server never came up, as a worker was refused or ended before it had served.
    """

    def __init__(
        self,
        config: Config,
        sockets: list[socket],
        template: WorkerTemplate | None = None,
        slots: WorkerSlots | None = None,
    ) -> None:
        super().__init__(config, sockets)
        self.startup_failed = False
        self._template = template
        self._slots = slots or WorkerSlots()
        self._watches: dict[Process, _Watch] = {}
        self._all_have_served = False
        self._failed_starts = 0
        self._start_again_at = 0.0
        self._to_retire: list[Process] = []
        self._newcomer: Process | None = None
        self._leaving: dict[Process, float] = {}

    def run(self) -> None:
        """Start the workers and keep them running until the end."""
        logger.info("Started main process %d", os.getpid())
        try:
            self.init_processes()
            while not self.should_exit.wait(_ROUND_S if self._all_have_served else _STARTING_ROUND_S):
                self.handle_signals()
                if not self.should_exit.is_set():
                    self.keep_subprocess_alive()
            self.terminate_all()
            self.join_all()
        finally:
            if self._template is not None:
                self._template.close()
        logger.info("Stopping main process %d", os.getpid())

    def init_processes(self) -> None:
        """Start the first workers."""
        self._slots.expect(self.processes_num)
        while len(self.processes) < self.processes_num and self._start_worker() is not None:
            pass

    def keep_subprocess_alive(self) -> None:
        """Replace the workers that are dead or have not answered in time."""
        now = time.monotonic()
        self._watches = {worker: self._watches.get(worker) or _Watch() for worker in self.processes}
        for worker, watch in self._watches.items():
            if worker.process.is_alive() and self._answers(worker, watch, now):
                continue
            if self._was_told_to_stop():
                # What has told this process may have told the workers too: their ends mean nothing.
                return
            worker.kill()
            worker.join()
            self.processes.remove(worker)
            self._slots.ended(worker.pid, worker.exitcode, because=_why_given_up(watch))
            self._account_for(worker, watch, now)
            if self.should_exit.is_set():
                return
        if len(self._watches) >= self.processes_num and all(watch.served for watch in self._watches.values()):
            self._note_all_serve()
        self._go_on_restarting()
        self._see_off(now)
        wanted = self.processes_num + (self._newcomer is not None)
        while len(self.processes) < wanted and now >= self._start_again_at:
            if self._start_worker() is None:
                break

    def handle_hup(self) -> None:
        """Replace all workers, one at a time: each leaves when its replacement serves (SIGHUP)."""
        logger.info("Received SIGHUP: replacing all workers")
        self._to_retire = [*self.processes]

    def handle_ttin(self) -> None:
        """Add a worker (SIGTTIN)."""
        logger.info("Received SIGTTIN: adding a worker")
        # The round that follows starts it.
        self.processes_num += 1
        self._slots.expect(self.processes_num)

    def handle_ttou(self) -> None:
        """Take one worker away (SIGTTOU)."""
        if self.processes_num <= 1:
            logger.info("Received SIGTTOU, but there is only one worker")
            return
        logger.info("Received SIGTTOU: taking a worker away")
        self.processes_num -= 1
        self._slots.expect(self.processes_num)
        if len(self.processes) > self.processes_num:
            self._retire(max(self.processes, key=lambda worker: self._slots.slot_of(worker.pid)))

    def terminate_all(self) -> None:
        """Ask the workers to finish."""
        self._ask_once_more()
        for worker in self.processes:
            worker.terminate()

    def join_all(self) -> None:
        """Wait for the workers to finish what they do, for as long as their grace allows."""
        now = time.monotonic()
        deadlines = {**self._leaving, **{worker: now + self._grace_of(worker) for worker in self.processes}}
        for worker, deadline in sorted(deadlines.items(), key=lambda item: item[1]):
            worker.process.join(max(0.0, deadline - time.monotonic()))
            self._end_by_force(worker)

    def _grace_of(self, worker: Process) -> float:
        watch = self._watches.get(worker)
        if watch is None or not watch.served:
            return _GRACE_BEFORE_SERVING_S
        # The public socket's requests may use up the grace before those of the private one get theirs, and then the
        # ends of the worker's sessions.
        return 3 * (self.config.timeout_graceful_shutdown or 0) + _JOIN_MARGIN_S

    def _ask_once_more(self) -> None:
        """Learn which of the workers have begun to serve since they last answered."""
        deadline = time.monotonic() + _LAST_ANSWERS_S
        unsure = [
            (worker, watch)
            for worker in self.processes
            if not (watch := self._watches.setdefault(worker, _Watch())).served
        ]
        # The first answer may be to a question asked long before.
        for _ in range(2):
            asked = [(worker, watch) for worker, watch in unsure if self._answers(worker, watch, time.monotonic())]
            for worker, watch in asked:
                # One that is gone is as good as one that has answered.
                with suppress(OSError):
                    worker.parent_conn.poll(max(0.0, deadline - time.monotonic()))
                self._answers(worker, watch, time.monotonic())

    def _was_told_to_stop(self) -> bool:
        return self.should_exit.is_set() or not {signal.SIGINT, signal.SIGTERM}.isdisjoint(self.signal_queue)

    def _start_worker(self, replaces: Process | None = None) -> Process | None:
        """Start a worker, maybe one that is to replace another one in time; None where the system refuses it."""
        try:
            worker = self._forked_worker() or self._spawned_worker()
        except OSError as error:
            self._account_for_refusal(error)
            return None
        self.processes.append(worker)
        self._slots.started(worker.pid, replaces=None if replaces is None else replaces.pid)
        # From what the figures call a worker to what the log does.
        logger.info("Worker %d is process %s", self._slots.slot_of(worker.pid), worker.pid)
        return worker

    def _spawned_worker(self) -> Worker:
        worker = Worker(self.config, self.sockets)
        worker.start()
        return worker

    def _forked_worker(self) -> Worker | None:
        if self._template is None:
            return None
        try:
            worker = ForkedWorker(self.config, self.sockets, self._template)
            worker.start()
        except TemplateGoneError as error:
            logger.warning("Workers can't be forked any more (%s); spawning them, which takes longer", error)
            self._template.abandon()
            self._template = None
            return None
        return worker

    def _note_all_serve(self) -> None:
        self._failed_starts = 0
        if self._all_have_served:
            return
        self._all_have_served = True
        WorkerEnv.all_have_served()
        for worker in self.processes:
            # One that has just died is found in the next round.
            with suppress(OSError):
                worker.parent_conn.send(ALL_SERVE)

    def _go_on_restarting(self) -> None:
        """Take the next step of a restart of all workers."""
        if self._newcomer is not None:
            watch = self._watches.get(self._newcomer)
            if self._newcomer not in self.processes:
                logger.error("The replacement did not start: the remaining old workers stay")
                self._to_retire.clear()
                self._newcomer = None
            elif watch is not None and watch.served:
                self._newcomer = None
                if self._to_retire:
                    self._retire(self._to_retire.pop(0))
        self._to_retire = [worker for worker in self._to_retire if worker in self.processes]
        if self._newcomer is None and self._to_retire:
            self._newcomer = self._start_worker(self._to_retire[0])
            if self._newcomer is None:
                logger.error("No replacement could be started: the remaining old workers stay")
                self._to_retire.clear()

    def _retire(self, worker: Process) -> None:
        """Ask a worker to finish; `_see_off` does the rest."""
        self.processes.remove(worker)
        self._slots.leaves(worker.pid)
        worker.terminate()
        self._leaving[worker] = time.monotonic() + self._grace_of(worker)

    def _see_off(self, now: float) -> None:
        for worker, deadline in list(self._leaving.items()):
            if now > deadline:
                self._end_by_force(worker)
            if not worker.process.is_alive():
                del self._leaving[worker]
                self._slots.ended(worker.pid, worker.exitcode)

    def _end_by_force(self, worker: Process) -> None:
        if worker.process.is_alive():
            logger.warning("Worker %s did not stop in time; killing it", worker.pid)
            worker.process.kill()
            worker.process.join()

    def _account_for(self, worker: Process, watch: _Watch, now: float) -> None:
        """Decide what a worker's end means: start another now, or later, or give up."""
        if watch.served:
            logger.warning("Worker %s ended with code %s; starting another", worker.pid, worker.exitcode)
            return
        if not self._all_have_served and worker.exitcode not in _KILLED_FROM_OUTSIDE:
            logger.error("Worker %s ended with code %s before it served", worker.pid, worker.exitcode)
            self.startup_failed = True
            self.should_exit.set()
            return
        logger.error(
            "Worker %s ended with code %s before it served; starting another in %.0f s",
            worker.pid,
            worker.exitcode,
            self._pause(now),
        )

    def _account_for_refusal(self, error: OSError) -> None:
        if not self._all_have_served:
            logger.error("A worker could not be started: %s", error)
            self.startup_failed = True
            self.should_exit.set()
            return
        pause = self._pause(time.monotonic())
        logger.error("A worker could not be started (%s); trying again in %.0f s", error, pause)

    def _pause(self, now: float) -> float:
        """Begin a pause before the next start, longer than the one before, and return its seconds."""
        pause: float = min(_FIRST_PAUSE_S * 2**self._failed_starts, _LONGEST_PAUSE_S)
        self._failed_starts += 1
        self._start_again_at = now + pause
        return pause

    def _answers(self, worker: Process, watch: _Watch, now: float) -> bool:
        """Whether the worker still counts as healthy; asks it again once it has answered."""
        try:
            while worker.parent_conn.poll(0):
                watch.served = bool(worker.parent_conn.recv()) or watch.served
                watch.asked_at = None
                if watch.served:
                    self._slots.serves(worker.pid)
            if watch.asked_at is None:
                worker.parent_conn.send(b"ping")
                watch.asked_at = now
        except (OSError, EOFError):
            return False
        silent_for = now - watch.asked_at
        if watch.served and silent_for > self.config.timeout_worker_healthcheck:
            logger.error("Worker %s has not answered for %.0f s; its sessions are lost", worker.pid, silent_for)
            watch.silent_for = silent_for
            return False
        return True


def _why_given_up(watch: _Watch) -> str | None:
    return None if watch.silent_for is None else f"no sign of life for {watch.silent_for:.0f} s"
