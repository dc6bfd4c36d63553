"""A process that has imported the framework, and from which the workers of one server are forked.

Importing the framework is most of what a worker's start costs. The launcher imports it once, in the server's main
process, and forks the template from there before anything of the user's has been imported: no thread, random state,
connection or device of a user's module is ever shared. Each worker imports the entrypoint by itself, as
`__mp_main__`, with the main process's environment, folder and module path of that moment.

Lifecycle: the template waits at a socket whose other end is in the main process, and ends with that one. It has one
thread, no event loop, and ignores what stops a whole group: the main process alone decides about the workers.

Failure policy: when the template ends before, its workers go on. Their main process knows each by a descriptor of the
process (a pidfd), not by its template, and spawns what it starts from then on.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, Self

from nemo_gym.server.worker_env import TemplateEnv, mark_forked_worker, take_parent_pipe

_MAX_DESCRIPTORS: Final = 64
_NUMBER: Final = struct.Struct("q")
# A template that does not fork within this time is frozen.
_FORK_TIMEOUT_S: Final = 5.0
# Between a worker's end and the template's word about it.
_WORD_TIMEOUT_S: Final = 1.0
# What a process is taken to have ended with when nobody could tell.
_UNKNOWN_EXIT_CODE: Final = 255
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class TemplateGoneError(Exception):
    """Raised when the template does not fork a worker."""


@dataclass(frozen=True)
class _Job:
    """What a worker is to be: the main process's state at its start, and what it runs."""

    environment: dict[str, str]
    folder: str | None
    module_path: list[str]
    arguments: list[str]
    main_file: str | None
    target: Callable[[Any, list[int]], None]
    argument: Any

    @classmethod
    def of_this_process(cls, target: Callable[[Any, list[int]], None], argument: Any) -> Self:
        folder = None
        with suppress(FileNotFoundError):
            folder = str(Path.cwd())
        main_file = getattr(sys.modules["__main__"], "__file__", None)
        return cls(
            environment=dict(os.environ),
            folder=folder,
            module_path=list(sys.path),
            arguments=list(sys.argv),
            main_file=str(Path(main_file).absolute()) if main_file else None,
            target=target,
            argument=argument,
        )


@dataclass(frozen=True)
class Order:
    """A worker's start, seen from the worker: it has just been forked and has to `run`."""

    job: _Job
    descriptors: list[int]
    main_life: int

    def run(self) -> None:
        """Become the worker, and return when it has ended."""
        os.environ.clear()
        os.environ.update(self.job.environment)
        mark_forked_worker(self.main_life)
        if self.job.folder is not None:
            os.chdir(self.job.folder)
        sys.path = list(self.job.module_path)
        sys.argv = list(self.job.arguments)
        if self.job.main_file is not None:
            spawn.import_main_path(self.job.main_file)
        self.job.target(self.job.argument, self.descriptors)


class ForkedProcess:
    """A worker that the template has forked, with what uvicorn's supervisor uses of `multiprocessing.Process`.

    Args:
        pid: The worker.
        status: The reading end of the pipe through which the template tells its exit code.

    Raises:
        OSError: The system can't watch the process.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._exit_code: int | None = None
        self._pidfd = _pidfd(pid)

    @property
    def exitcode(self) -> int | None:
        """What the worker ended with, a signal's number as negative; None while it runs."""
        self.join(0)
        return self._exit_code

    def is_alive(self) -> bool:
        """Whether the worker has not ended."""
        return self.exitcode is None

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended."""
        if self._exit_code is None and self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the worker has ended, at most for `timeout` seconds."""
        if self._exit_code is not None:
            return
        if self._pidfd is not None:
            if not wait([self._pidfd], timeout):
                return
            os.close(self._pidfd)
            self._pidfd = None
        self._exit_code = _read_number(self._status, _WORD_TIMEOUT_S)
        if self._exit_code is None:
            self._exit_code = _UNKNOWN_EXIT_CODE
        os.close(self._status)


class WorkerTemplate:
    """The main process's end of its template.

    Args:
        control: Connected to the template.
        life: The writing end of a pipe that the workers watch: it closes when this process ends.
        pid: The template.
    """

    def __init__(self, control: socket.socket, life: int, pid: int) -> None:
        self._control = control
        self._life = life
        self._pid = pid

    @classmethod
    def take(cls) -> Self | None:
        """Return the template that the launcher left for this process, once; None where there is none."""
        left = TemplateEnv.take()
        return None if left is None else cls(socket.socket(fileno=left.control), left.life, left.pid)

    def fork(
        self, target: Callable[[Any, list[int]], None], argument: Any, descriptors: Sequence[int]
    ) -> ForkedProcess:
        """Start a worker that calls `target`.

        Args:
            target: A function of the framework; called with `argument` and the descriptors' numbers in the worker.
            argument: Whatever can be pickled.
            descriptors: What the worker gets duplicates of.

        Raises:
            TemplateGoneError: The template has ended, is frozen, or can't fork.
        """
        status, status_end = os.pipe()
        payload = os.memfd_create("nemo_gym_worker")
        try:
            with os.fdopen(os.dup(payload), "wb") as file:
                pickle.dump(_Job.of_this_process(target, argument), file)
            socket.send_fds(self._control, [b"f"], [status_end, payload, *descriptors])
        except OSError as error:
            os.close(status)
            raise TemplateGoneError(str(error)) from error
        finally:
            _close_all([payload, status_end])
        pid = _read_number(status, _FORK_TIMEOUT_S)
        if pid is None:
            os.close(status)
            raise TemplateGoneError("the template did not fork one")
        try:
            return ForkedProcess(pid, status)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.close(status)
            raise TemplateGoneError(str(error)) from error

    def close(self) -> None:
        """End the template. Its workers are not touched: they follow the main process."""
        self._control.close()
        with suppress(OSError):
            # It may be frozen.
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def fork_template() -> Order | None:
    """Fork the template from this process.

    Returns:
        In the process that called this, None: its template can be had by `WorkerTemplate.take`. In each worker, later,
        what it has to run.

    Raises:
        OSError: The system has no room for another process, or can't watch processes by descriptors.
    """
    os.close(os.pidfd_open(os.getpid()))
    control, inner = socket.socketpair()
    life_end, life = os.pipe()
    main_process = os.getpid()
    pid = os.fork()
    if pid:
        inner.close()
        os.close(life_end)
        TemplateEnv(process=main_process, control=control.detach(), life=life, pid=pid).leave()
        return None
    try:
        control.close()
        os.close(life)
        parent_pipe = take_parent_pipe()
        if parent_pipe is not None:
            os.close(parent_pipe)
        return _fork_on_demand(inner, life_end)
    except BaseException:  # noqa: BLE001
        # Nothing may come out of here but a worker.
        traceback.print_exc()
        os._exit(1)


def _fork_on_demand(control: socket.socket, main_life: int) -> Order:
    """Fork a worker for each message until the main process is gone; returns in the workers."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready in wait([control, *children]):
            if isinstance(ready, int):
                _tell_end(ready, *children.pop(ready))
                continue
            _, received, _, _ = socket.recv_fds(control, 1, _MAX_DESCRIPTORS)
            if not received:
                os._exit(0)
            status, payload, *descriptors = received
            try:
                pid = os.fork()
            except OSError:
                # The main process sees that nobody holds the other end.
                traceback.print_exc()
                _close_all(received)
                continue
            if pid == 0:
                control.close()
                _close_all([status, *children, *(kept for _, kept in children.values())])
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                return _read_order(payload, descriptors, main_life)
            _tell(status, pid)
            children[os.pidfd_open(pid)] = (pid, status)
            _close_all([payload, *descriptors])


def _read_order(payload: int, descriptors: list[int], main_life: int) -> Order:
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    with os.fdopen(payload, "rb") as file:
        file.seek(0)
        return Order(pickle.load(file), descriptors, main_life)  # noqa: S301 - from the main process alone


def _tell_end(pidfd: int, pid: int, status: int) -> None:
    _, ended = os.waitpid(pid, 0)
    _tell(status, os.waitstatus_to_exitcode(ended))
    _close_all([pidfd, status])


def _tell(status: int, number: int) -> None:
    # The main process may be gone.
    with suppress(BrokenPipeError):
        os.write(status, _NUMBER.pack(number))


def _read_number(pipe: int, timeout: float) -> int | None:
    if not wait([pipe], timeout):
        return None
    data = os.read(pipe, _NUMBER.size)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
