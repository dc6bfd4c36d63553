"""The record of where the workers of a server listen: how a client of the same machine and user finds their sockets.

Life of a record: the main process of a server with several workers writes it, in the state directory, once it has
its address, and removes it at its end; the next server of that address writes its own over it. What a killed main
process leaves is harmless: a worker's id stands in no other server's directory, so with an old record a client
finds no socket and calls the shared address. The next start sweeps it.

A state directory may be on a home that several machines share. So a record's name holds the address as one network
of one start of one machine knows it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import orjson

from nemo_gym.paths import state_dir

_FOLDER: Final = "worker_sockets"
_SUFFIX: Final = ".json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")
_LONGEST_RECORD: Final = 4096  # bytes
_KEPT_S: Final = 30 * 24 * 60 * 60.0  # for so long another machine's record is left alone

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def recorded_socket_dir(host: str, port: int, socket_dir: Path | None) -> Iterator[None]:
    """Record where the workers of the server at `host`:`port` listen, while the block runs.

    Where it can't be written, clients call the shared address, which costs them nothing but time.

    Args:
        host: The address as the configuration has it.
        port: The port.
        socket_dir: The directory of the workers' sockets; None where there is none.
    """
    if socket_dir is None:
        yield
        return
    content = orjson.dumps({"socket_dir": os.fspath(socket_dir)})
    try:
        path = _path_of(host, port)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _sweep(path.parent)
        write_in_one_step(path, content)
    except OSError as error:
        logger.info("Clients will not go straight to the workers of %s:%s: no record of them: %s", host, port, error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_bytes() == content:
                path.unlink()


def read_socket_dir(host: str, port: int) -> Path | None:
    """Return the directory of the workers' sockets of the server at `host`:`port`; None where none is recorded.

    Only a record of this machine's present start and network counts, and only a file that this user alone can write.
    """
    try:
        socket_dir = _named_in(_path_of(host, port))
        return socket_dir if socket_dir.is_dir() else None
    except (OSError, ValueError):
        return None


def _path_of(host: str, port: int) -> Path:
    return state_dir() / _FOLDER / f"{quote(host, safe='')}_{port}.{_machine()}{_SUFFIX}"


@functools.cache
def _machine() -> str:
    """Return what tells this machine, since it was started, and this process's network from all others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # as on macOS
        parts += [_BOOT_ID.read_text().strip(), str(_NETWORK.stat().st_ino)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def write_in_one_step(path: Path, content: bytes) -> None:
    """Put a private file in place in one step, so that nobody reads half of it."""
    descriptor, unnamed = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(unnamed).replace(path)
    except BaseException:
        Path(unnamed).unlink(missing_ok=True)
        raise


def _named_in(path: Path) -> Path:
    """Return the directory that the record in `path` names, be it there or not."""
    # Not to wait where a FIFO stands in its place.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} is no file that only this user can write")
        content = orjson.loads(file.read(_LONGEST_RECORD))
    named = content.get("socket_dir") if isinstance(content, dict) else None
    if not isinstance(named, str) or not Path(named).is_absolute():
        raise ValueError(f"{path} names no directory")
    return Path(named)


def _sweep(folder: Path) -> None:
    """Remove the records of directories that are gone; another machine's when it is old."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            here = path.name.endswith(f".{_machine()}{_SUFFIX}")
            is_old = time.time() - path.lstat().st_mtime > _KEPT_S
            if (here and not _named_in(path).is_dir()) or (not here and is_old):
                path.unlink()
