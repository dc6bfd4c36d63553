"""A process that has imported the framework, and from which the workers of one server are forked.

Importing the framework is most of what a worker's start costs. The launcher imports it once, in the server's main
process, and forks the template from there before anything of the user's has been imported: no thread, random state,
connection or device of a user's module is ever shared. Each worker imports the entrypoint by itself, as
`__mp_main__`, with the main process's environment, folder, module path and arguments of that moment, and its umask,
signal mask, user and limits (all of `process_state`, which also says what is not carried).

Lifecycle: the template waits at a socket whose other end is in the main process, and ends with that one. It has one
thread, no event loop, and ignores what stops a whole group: the main process alone decides about the workers. It
watches each worker by a descriptor of the process (a pidfd), of which the main process gets a duplicate, and lets the
system forget a worker only after it has ended: neither ever takes another process for it.

Failure policy: a worker that can't be forked for want of memory, processes or descriptors is an `OSError`, and the next
one may be tried later. When the template ends before, its workers go on, and their main process spawns what it starts
from then on.
"""

from __future__ import annotations

import errno
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
from typing import Any, Final, NamedTuple, Self

from nemo_gym.server.limits import raise_descriptor_limit
from nemo_gym.server.process_state import ProcessState
from nemo_gym.server.worker_env import TemplateEnv, mark_forked_worker, take_parent_pipe

_MAX_DESCRIPTORS: Final = 64
_NUMBER: Final = struct.Struct("q")
# The template's answer: the worker's id, and the error's number where there is none.
_ANSWER: Final = struct.Struct("qq")
# A template that does not fork within this time is frozen.
_FORK_TIMEOUT_S: Final = 5.0
# Between a worker's end and the template's word about it.
_WORD_TIMEOUT_S: Final = 1.0
# What a process is taken to have ended with when nobody could tell.
_UNKNOWN_EXIT_CODE: Final = 255
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class TemplateGoneError(Exception):
    """Raised when the template has ended or is frozen."""


class _Child(NamedTuple):
    """A worker, as its template knows it: `status` is where its exit code is told."""

    pid: int
    pidfd: int
    status: int


@dataclass(frozen=True)
class _Job:
    """What a worker is to be: the main process's state at its start, and what it runs."""

    state: ProcessState
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
            state=ProcessState.of_this_process(),
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
        self.job.state.adopt()
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
        pidfd: The worker as a descriptor.
        status: The reading end of the pipe through which the template tells its exit code.
    """

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._exit_code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """What the worker ended with, a signal's number as negative; None while it runs."""
        self.join(0)
        return self._exit_code

    def is_alive(self) -> bool:
        """Whether the worker has not ended."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Send SIGTERM, if it has not ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it has not ended."""
        self._send(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the worker has ended, at most for `timeout` seconds."""
        if self._exit_code is not None or not wait([self._pidfd], timeout):
            return
        self._exit_code = _read_number(self._status, _WORD_TIMEOUT_S)
        if self._exit_code is None:
            self._exit_code = _UNKNOWN_EXIT_CODE
        _close_all([self._pidfd, self._status])

    def _send(self, number: signal.Signals) -> None:
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


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
        if left is None:
            return None
        try:
            control = socket.socket(fileno=left.control)
        except OSError:
            # The program has closed descriptors that it did not know.
            return None
        return cls(control, left.life, left.pid)

    def fork(
        self, target: Callable[[Any, list[int]], None], argument: Any, descriptors: Sequence[int]
    ) -> ForkedProcess:
        """Start a worker that calls `target`.

        Args:
            target: A function of the framework; called with `argument` and the descriptors' numbers in the worker.
            argument: Whatever can be pickled.
            descriptors: What the worker gets duplicates of.

        Raises:
            TemplateGoneError: The template has ended or is frozen.
            OSError: The system lacks what a worker takes, here or in the template; later it may have that again.
        """
        status, status_end = os.pipe()
        try:
            self._order(_Job.of_this_process(target, argument), [status_end, *descriptors])
            pid, pidfd = self._answer()
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(status_end)
        return ForkedProcess(pid, pidfd, status)

    def abandon(self) -> None:
        """End the template. Its workers are not touched: they follow this process."""
        self._control.close()
        with suppress(OSError):
            # It may be frozen.
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def close(self) -> None:
        """End the template, and what workers it still has as if this process had ended."""
        self.abandon()
        os.close(self._life)

    def _order(self, job: _Job, descriptors: list[int]) -> None:
        payload = os.memfd_create("nemo_gym_worker")
        try:
            with os.fdopen(os.dup(payload), "wb") as file:
                pickle.dump(job, file)
            sent = [payload, *descriptors]
            socket.send_fds(self._control, [_NUMBER.pack(len(sent))], sent)
        except ConnectionError as error:
            raise TemplateGoneError("the template has ended") from error
        finally:
            os.close(payload)

    def _answer(self) -> tuple[int, int]:
        if not wait([self._control], _FORK_TIMEOUT_S):
            raise TemplateGoneError(f"the template has not answered for {_FORK_TIMEOUT_S:.0f} s")
        try:
            answer, received = _receive(self._control, _ANSWER.size, 1)
        except ConnectionError as error:
            raise TemplateGoneError("the template has ended") from error
        if len(answer) < _ANSWER.size:
            raise TemplateGoneError("the template has ended")
        pid, error_number = _ANSWER.unpack(answer)
        if error_number:
            raise OSError(error_number, f"The template can't fork: {os.strerror(error_number)}")
        if not received:
            # The worker ends by itself, as nobody keeps the pipe to it.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pid, received[0]


def fork_template() -> Order | None:
    """Fork the template from this process.

    Returns:
        In the process that called this, None: its template can be had by `WorkerTemplate.take`. In each worker, later,
        what it has to run.

    Raises:
        OSError: The system has no room for another process, or lacks what starting workers takes.
    """
    os.close(os.pidfd_open(os.getpid()))
    os.close(os.memfd_create("nemo_gym_probe"))
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
        # Each worker costs two. The workers themselves get the main process's limits.
        raise_descriptor_limit()
        return _fork_on_demand(inner, life_end)
    except BaseException:  # noqa: BLE001
        # Nothing may come out of here but a worker.
        traceback.print_exc()
        os._exit(1)


def _fork_on_demand(control: socket.socket, main_life: int) -> Order:
    """Fork a worker for each message until the main process is gone; returns in the workers."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    # Where it is ignored, the system forgets a worker at once, and its exit code.
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children: dict[int, _Child] = {}
    while True:
        for ready in wait([control, *children]):
            if isinstance(ready, int):
                _tell_end(children.pop(ready))
                continue
            received = _receive_order(control)
            pid = _fork(control) if received else None
            if pid == 0:
                control.close()
                _close_all([descriptor for child in children.values() for descriptor in (child.pidfd, child.status)])
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                return _read_order(received, main_life)
            child = _tell_start(control, pid, received[1]) if pid else None
            if child is not None:
                children[child.pidfd] = child
                received.remove(child.status)
            _close_all(received)


def _receive_order(control: socket.socket) -> list[int]:
    """Return the descriptors of an order; none when the order did not come whole, which the main process is told."""
    message, received = _receive(control, _NUMBER.size, _MAX_DESCRIPTORS)
    if not message:
        os._exit(0)
    if len(received) == _NUMBER.unpack(message)[0]:
        return received
    # This process has no room for all of them.
    _close_all(received)
    _refuse(control, errno.EMFILE)
    return []


def _fork(control: socket.socket) -> int | None:
    try:
        return os.fork()
    except OSError as error:
        _refuse(control, error.errno)
        return None


def _tell_start(control: socket.socket, pid: int, status: int) -> _Child | None:
    try:
        child = _Child(pid, os.pidfd_open(pid), status)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _refuse(control, error.errno)
        return None
    # The main process may be gone: then the worker and this process learn it by their pipes.
    with suppress(ConnectionError):
        socket.send_fds(control, [_ANSWER.pack(pid, 0)], [child.pidfd])
    return child


def _refuse(control: socket.socket, error_number: int | None) -> None:
    with suppress(ConnectionError):
        control.send(_ANSWER.pack(0, error_number or errno.EAGAIN))


def _read_order(received: list[int], main_life: int) -> Order:
    payload, status, *descriptors = received
    os.close(status)
    with os.fdopen(payload, "rb") as file:
        file.seek(0)
        return Order(pickle.load(file), descriptors, main_life)  # noqa: S301 - from the main process alone


def _tell_end(child: _Child) -> None:
    _, ended = os.waitpid(child.pid, 0)
    # The main process may be gone.
    with suppress(BrokenPipeError):
        os.write(child.status, _NUMBER.pack(os.waitstatus_to_exitcode(ended)))
    _close_all([child.pidfd, child.status])


def _receive(sock: socket.socket, size: int, max_descriptors: int) -> tuple[bytes, list[int]]:
    message, received, _, _ = socket.recv_fds(sock, size, max_descriptors)
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    return message, received


def _read_number(pipe: int, timeout: float) -> int | None:
    if not wait([pipe], timeout):
        return None
    data = os.read(pipe, _NUMBER.size)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
