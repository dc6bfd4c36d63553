"""The environment variables through which a process speaks to the processes it starts.

Three conversations: the parent (`gym env start`) tells a server which pipe to watch, the launcher tells the program
that it runs where its template is, and a server's main process tells its workers what they are. No other module reads
or sets these variables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PARENT_PIPE: Final = "NEMO_GYM_PARENT_PIPE"
_TEMPLATE: Final = "NEMO_GYM_WORKER_TEMPLATE"
_MAIN_PID: Final = "NEMO_GYM_WORKER_MAIN_PID"
_FORKED_PID: Final = "NEMO_GYM_WORKER_FORKED_PID"
_ENTRYPOINT: Final = "NEMO_GYM_WORKER_ENTRYPOINT"
_SERVER_CLASS: Final = "NEMO_GYM_WORKER_SERVER_CLASS"
_SOCKET_DIR: Final = "NEMO_GYM_WORKER_SOCKET_DIR"
_STARTING: Final = "NEMO_GYM_WORKER_STARTING"


def parent_pipe_env(read_fd: int) -> dict[str, str]:
    """Return the variables that tell a server process which inherited pipe ends when its parent is gone.

    Args:
        read_fd: The read end, passed on to the process under this number; only the parent holds the write end.
    """
    return {_PARENT_PIPE: str(read_fd)}


def take_parent_pipe() -> int | None:
    """Return the descriptor of the parent's pipe, once, or None for a server started by hand.

    The variable is removed: the number means nothing in the processes that this one starts.
    """
    value = os.environ.pop(_PARENT_PIPE, None)
    return int(value) if value is not None and value.isdecimal() else None


def mark_forked_worker(main_life: int) -> None:
    """Make this process, which a template has forked, known as a worker.

    Args:
        main_life: The reading end of a pipe that ends when the main process is gone.
    """
    os.environ[_FORKED_PID] = str(os.getpid())
    os.environ.update(parent_pipe_env(main_life))


@dataclass(frozen=True)
class TemplateEnv:
    """Where a main process finds the template that the launcher has forked for it.

    Attributes:
        process: The main process; the numbers mean nothing in any other.
        control: The descriptor of the socket to the template.
        life: The writing end of the pipe by which the workers know that the main process lives.
        pid: The template.
    """

    process: int
    control: int
    life: int
    pid: int

    def leave(self) -> None:
        """Leave this for the program that runs in this process."""
        os.environ[_TEMPLATE] = f"{self.process}:{self.control}:{self.life}:{self.pid}"

    @classmethod
    def take(cls) -> Self | None:
        """Return what was left, once, or None in a process that has no template."""
        value = os.environ.pop(_TEMPLATE, "")
        left = [int(part) for part in value.split(":") if part.isdecimal()]
        return cls(*left) if len(left) == 4 and left[0] == os.getpid() else None


@dataclass(frozen=True)
class WorkerEnv:
    """What a worker of a server with several workers has to know.

    Attributes:
        entrypoint: The file that the main process runs.
        server_class: The server's class as `module:qualified name`; the module is `__main__` for a class that the
            entrypoint itself defines.
        socket_dir: The folder of the workers' private sockets; None where there can be none, and sessions are not
            routed.
        is_starting: Whether the server's first workers have not all served yet.
    """

    entrypoint: Path
    server_class: str
    socket_dir: Path | None
    is_starting: bool = True

    def write(self) -> None:
        """Leave this for the workers that this process is about to start."""
        os.environ[_MAIN_PID] = str(os.getpid())
        os.environ[_ENTRYPOINT] = str(self.entrypoint)
        os.environ[_SERVER_CLASS] = self.server_class
        if self.socket_dir is not None:
            os.environ[_SOCKET_DIR] = str(self.socket_dir)
        if self.is_starting:
            os.environ[_STARTING] = "1"

    @staticmethod
    def all_have_served() -> None:
        """Tell the workers started from now on that they replace, or are added to, workers that serve."""
        os.environ.pop(_STARTING, None)

    @staticmethod
    def clear() -> None:
        """Take back what `write` left."""
        for name in (_MAIN_PID, _FORKED_PID, _ENTRYPOINT, _SERVER_CLASS, _SOCKET_DIR, _STARTING):
            os.environ.pop(name, None)

    @classmethod
    def read(cls) -> Self | None:
        """Return what the main process left, or None in a process that is no worker.

        A process that a worker starts inherits the variables too; only a child of the main process is a worker, and
        what was forked and marked as one.
        """
        is_forked = os.environ.get(_FORKED_PID) == str(os.getpid())
        if not is_forked and os.environ.get(_MAIN_PID) != str(os.getppid()):
            return None
        socket_dir = os.environ.get(_SOCKET_DIR)
        return cls(
            entrypoint=Path(os.environ[_ENTRYPOINT]),
            server_class=os.environ[_SERVER_CLASS],
            socket_dir=Path(socket_dir) if socket_dir else None,
            is_starting=_STARTING in os.environ,
        )
