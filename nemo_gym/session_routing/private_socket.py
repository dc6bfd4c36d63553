"""The hop in: the directory of the workers' sockets, and the private server of one worker.

Life of the directory: the main process makes it before any worker starts, hands its path to them, and removes it
at its end. While that process lives it holds a lock on the file `owner` within, which the kernel releases however
the process ends; so the next start can tell a directory left by a crash from one in use, and sweep it.

Life of a socket: a worker's private server is on the worker's own event loop, starts when the application's
start-up has finished and stops before its shutdown begins. The socket's name is the worker's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from nemo_gym.errors import ConfigError
from nemo_gym.session_routing.forked import let_go_in_children, let_go_of_sockets
from nemo_gym.session_routing.frame_server import FrameServer
from nemo_gym.session_routing.frames import BEGINS_A_REQUEST, receive_buffer
from nemo_gym.session_routing.hop import restore_origin

SOCKET_DIR_ENV: Final = "NEMO_GYM_SOCKET_DIR"
"""Names the folder in which socket directories are made, where the usual ones can't be used."""

KEEP_ALIVE: Final = 120
"""Seconds that the private server keeps an idle connection; far longer than the forwarding side does."""

NOBODY_LISTENS: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED})
"""What connecting says when a worker is gone. A full backlog says EAGAIN."""

_PREFIX: Final = "nemo-gym-"
_OWNER_FILE: Final = "owner"
_LONGEST_SOCKET_PATH: Final = 103  # bytes; sockaddr_un holds 108 on Linux and 104 on macOS, with the closing NUL
_UNOWNED_GRACE: Final = 3600.0  # seconds a directory may exist before its owner has locked it
_PLAIN_WORKER_ID: Final = "0" * 32
_DYING_S: Final = 0.1  # seconds in which a process that is being killed may still seem to listen


def worker_socket_path(socket_dir: Path | str, worker_id: str) -> Path:
    """Return the path of a worker's private socket. `worker_id` must have passed `is_worker_id`."""
    return Path(socket_dir) / worker_id


def is_own_socket(path: Path) -> bool:
    """Tell whether a Unix socket of this user stands at `path`: no link to one, no FIFO, no file."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def is_listening(path: Path) -> bool:
    """Tell whether a process of this user takes connections at `path`, be it ever so busy."""
    if not is_own_socket(path):
        return False
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(os.fspath(path))
    except OSError as error:
        return error.errno not in NOBODY_LISTENS
    return True


async def still_listens(path: Path) -> bool:
    """Tell whether `path` takes connections. A dying process may do so for an instant: it is asked twice."""
    if not is_listening(path):
        return False
    await asyncio.sleep(_DYING_S)
    return is_listening(path)


def create_socket_dir(*parents: Path | str) -> Path:
    """Make the socket directory of one server start: new, private to the user, short, locked by this process.

    Args:
        *parents: The folders to make it in; the first that works is taken. When none is given:
            `NEMO_GYM_SOCKET_DIR` where it is set, else `/tmp`, `XDG_RUNTIME_DIR`, `/dev/shm` and the system's
            folder for temporary files.

    Returns:
        The directory. The lock ends with this process; call `remove_socket_dir` at its end.

    Raises:
        ConfigError: No folder can be used: each is missing, read-only, too long, or on a file system without
            Unix sockets.
    """
    refused: list[str] = []
    for candidate in _parents(parents):
        try:
            return _create_in(candidate)
        except OSError as error:
            refused.append(f"{candidate}: {error.strerror or error}")
    raise ConfigError(
        "found no folder for the workers' sockets (" + "; ".join(refused) + ")",
        key=SOCKET_DIR_ENV,
        hint=f"Set {SOCKET_DIR_ENV} to a short, writable folder on a local file system.",
    )


def sweep_stale_socket_dirs(*parents: Path | str) -> list[Path]:
    """Remove the socket directories of this user whose server start has ended without removing them.

    Args:
        *parents: The folders to look in; the same as for `create_socket_dir` when none is given.

    Returns:
        The directories that were removed.
    """
    swept: list[Path] = []
    for folder in _parents(parents):
        with contextlib.suppress(OSError):
            for path in folder.glob(_PREFIX + "*"):
                if _is_stale(path):
                    remove_socket_dir(path)
                    swept.append(path)
    return swept


def remove_socket_dir(path: Path | str) -> None:
    """Remove a socket directory and all that is in it; it may be gone already."""
    shutil.rmtree(path, ignore_errors=True)


def _parents(given: tuple[Path | str, ...]) -> list[Path]:
    if chosen := os.environ.get(SOCKET_DIR_ENV):
        given = given or (chosen,)
    if given:
        return [Path(folder).expanduser().absolute() for folder in given]
    usual = ["/tmp", os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm", tempfile.gettempdir()]  # noqa: S108
    return [Path(folder) for folder in dict.fromkeys(usual) if folder]


def _create_in(parent: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        trial = worker_socket_path(path, _PLAIN_WORKER_ID)
        length = len(os.fsencode(trial))
        if length > _LONGEST_SOCKET_PATH:
            raise OSError(f"a socket's path would have {length} bytes, more than {_LONGEST_SOCKET_PATH}")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(trial))
        trial.unlink()
        _lock(path)
    except BaseException:
        remove_socket_dir(path)
        raise
    return path


def _lock(path: Path) -> None:
    # The descriptor stays open on purpose, until the process ends: it is the lock. The file gets its name after
    # it was locked, so that nobody ever sees it unlocked while this process lives.
    unnamed = path / f".{_OWNER_FILE}"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    unnamed.rename(path / _OWNER_FILE)


def _is_stale(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        with _opened(path / _OWNER_FILE) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return path.is_dir() and time.time() - status.st_mtime > _UNOWNED_GRACE
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _PrivateDoor:
    """The application as the private socket serves it: each request is first made what its handler must see."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            restore_origin(scope)
        except ValueError as error:
            await PlainTextResponse(str(error), status_code=400)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class _PrivateProtocol(asyncio.Protocol):
    """A new connection to the private socket, until its first byte tells whether it carries frames or HTTP.

    Args:
        app: The application that requests in frames are for; the one of HTTP requests is the configuration's.
        buffer: What frames are received into.
        config: The private server's configuration.
        server_state: The private server's state.
        app_state: The lifespan's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        buffer: memoryview,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = app
        self._buffer = buffer
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._connections: set[Any] = server_state.connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: those of uvloop are no asyncio.Transport by class.
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._connections.discard(self)
        protocol: FrameServer | HttpToolsProtocol
        if data[0] in BEGINS_A_REQUEST:
            protocol = FrameServer(self._app, self._app_state, self._server_state, self._buffer)
        else:
            protocol = HttpToolsProtocol(self._config, self._server_state, self._app_state)
        protocol.connection_made(self._transport)
        self._transport.set_protocol(protocol)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def shutdown(self) -> None:
        self._transport.close()


class PrivateServer:
    """Serves an application on a worker's private socket, on the running event loop.

    It takes no signals, runs no lifespan, and adds no `date` or `server` header. Of WebSockets, which need the package
    `websockets` here as they do in the server that accepted them, it limits and pings none: that server does.

    Args:
        app: The whole application, so that a request meets the same middleware wherever it was received.
        path: The socket's path.
        state: The application's lifespan state, which each request gets a copy of.
        grace: Seconds that requests in flight may take when the server stops; None for as long as they need.
    """

    def __init__(self, app: ASGIApp, path: Path, *, state: dict[str, Any], grace: int | None) -> None:
        self._path = path
        self._state = state
        self._config = uvicorn.Config(
            _PrivateDoor(app),
            uds=os.fspath(path),
            http=cast("type[asyncio.Protocol]", functools.partial(_PrivateProtocol, app, receive_buffer())),
            ws="auto",
            ws_max_size=sys.maxsize,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=grace,
        )
        self._server: uvicorn.Server | None = None

    async def start(self) -> None:
        """Start to serve.

        Raises:
            RuntimeError: Another process serves as this worker: the id was made before a fork.
            OSError: The socket can't be made.
        """
        if is_own_socket(self._path):
            raise RuntimeError(
                f"{self._path} exists: another process has this worker id; "
                "call install_session_routing in each worker, not before they are forked"
            )
        if not self._config.loaded:
            self._config.load()
        # Of uvicorn's server only the two halves that matter here; `serve` would take over the signals.
        server = uvicorn.Server(self._config)
        server.lifespan = self._config.lifespan_class(self._config)
        server.lifespan.state = self._state
        # A connection that a forked process kept would not end with this one.
        let_go_in_children(self)
        await server.startup()
        self._server = server
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """Take no new requests, let those in flight finish within the grace, close. Calling it again is harmless."""
        server, self._server = self._server, None
        if server is None:
            return
        await server.shutdown()
        self._path.unlink(missing_ok=True)

    def let_go(self) -> None:
        """Keep nothing of the worker that has forked this process: neither its socket nor a connection of the hop."""
        let_go_of_sockets(self._path.parent)
