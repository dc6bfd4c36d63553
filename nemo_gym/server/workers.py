"""The worker processes of a server, as its supervisor sees them and as they see themselves.

Supervisor and worker speak over a pipe: each message asks whether the worker serves, and `ALL_SERVE` also tells it
that all of its fellows do, from when on `GET /health` answers 200.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from socket import socket
from typing import Final

from uvicorn import Config
from uvicorn.supervisors.multiprocess import Process

from nemo_gym.server.template import ForkedProcess, WorkerTemplate

ALL_SERVE: Final = b"all"


class Worker(Process):
    """A worker that is spawned: a new interpreter that imports everything."""

    def pong(self) -> None:
        """Answer one message of the supervisor with whether this worker serves."""
        message = self.child_conn.recv()
        if message == ALL_SERVE and self.server.config.loaded:
            app = self.server.config.loaded_app
            # uvicorn wraps it to log messages.
            getattr(app, "app", app).state.waits_for_workers = False
        self.child_conn.send(self.server.started)


class ForkedWorker(Worker):
    """A worker that is forked from the template.

    Args:
        config: uvicorn's settings, with the application as an import string.
        sockets: The bound sockets that all workers accept from.
        template: What to fork it from.
    """

    process: ForkedProcess  # type: ignore[assignment]

    def __init__(self, config: Config, sockets: list[socket], template: WorkerTemplate) -> None:
        self.config = config
        self._server = None
        self._sockets = sockets
        self._template = template
        self.parent_conn, self.child_conn = Pipe()

    def start(self) -> None:
        """Fork it.

        Raises:
            TemplateGoneError: The template does not fork any more.
            OSError: The system lacks what a worker takes for now.
        """
        descriptors = [self.child_conn.fileno(), *(sock.fileno() for sock in self._sockets)]
        try:
            self.process = self._template.fork(_serve, self.config, descriptors)
        except BaseException:
            self._let_go()
            raise

    def terminate(self) -> None:
        """Ask it to finish."""
        self.process.terminate()
        self._let_go()

    def _let_go(self) -> None:
        self.parent_conn.close()
        self.child_conn.close()


class _ForkedSelf(Worker):
    """A forked worker as it sees itself."""

    def __init__(self, config: Config, connection: int) -> None:
        self.config = config
        self._server = None
        self.child_conn = Connection(connection)

    def always_pong(self) -> None:
        """Answer the supervisor until it lets go of this worker: then end."""
        with suppress(EOFError, OSError):
            super().always_pong()
        # Mostly it has said so as well. But it may have given this worker up before it had learned its id.
        os.kill(os.getpid(), signal.SIGTERM)


def _serve(config: Config, descriptors: list[int]) -> None:
    """Serve, in a worker that has just been forked and has imported the entrypoint."""
    connection, *sockets = descriptors
    config.configure_logging()
    worker = _ForkedSelf(config, connection)
    threading.Thread(target=worker.always_pong, daemon=True).start()
    # As uvicorn's own workers end.
    with suppress(KeyboardInterrupt):
        worker.server.run([socket(fileno=descriptor) for descriptor in sockets])
