"""The environment variables through which a process speaks to the processes it starts.

Two conversations: the parent (`gym env start`) tells a server which pipe to watch, and a server's main process
tells its workers what they are. No other module reads or sets these variables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PARENT_PIPE: Final = "NEMO_GYM_PARENT_PIPE"
_MAIN_PID: Final = "NEMO_GYM_WORKER_MAIN_PID"
_ENTRYPOINT: Final = "NEMO_GYM_WORKER_ENTRYPOINT"
_SERVER_CLASS: Final = "NEMO_GYM_WORKER_SERVER_CLASS"
_SOCKET_DIR: Final = "NEMO_GYM_WORKER_SOCKET_DIR"


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


@dataclass(frozen=True)
class WorkerEnv:
    """What a worker of a server with several workers has to know.

    Attributes:
        entrypoint: The file that the main process runs.
        server_class: The server's class as `module:qualified name`; the module is `__main__` for a class that the
            entrypoint itself defines.
        socket_dir: The folder of the workers' private sockets; None where sessions are not routed.
    """

    entrypoint: Path
    server_class: str
    socket_dir: Path | None

    def write(self) -> None:
        """Leave this for the workers that this process is about to start."""
        os.environ[_MAIN_PID] = str(os.getpid())
        os.environ[_ENTRYPOINT] = str(self.entrypoint)
        os.environ[_SERVER_CLASS] = self.server_class
        if self.socket_dir is not None:
            os.environ[_SOCKET_DIR] = str(self.socket_dir)

    @staticmethod
    def clear() -> None:
        """Take back what `write` left."""
        for name in (_MAIN_PID, _ENTRYPOINT, _SERVER_CLASS, _SOCKET_DIR):
            os.environ.pop(name, None)

    @classmethod
    def read(cls) -> Self | None:
        """Return what the main process left, or None in a process that is no worker.

        A process that a worker starts inherits the variables too; only a child of the main process is a worker.
        """
        if os.environ.get(_MAIN_PID) != str(os.getppid()):
            return None
        socket_dir = os.environ.get(_SOCKET_DIR)
        return cls(
            entrypoint=Path(os.environ[_ENTRYPOINT]),
            server_class=os.environ[_SERVER_CLASS],
            socket_dir=Path(socket_dir) if socket_dir else None,
        )
