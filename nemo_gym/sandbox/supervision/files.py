"""Reading and writing one file of a sandbox for the worker, without being led elsewhere by links or odd files."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

from nemo_gym.sandbox.supervision.frames import CHUNK, receive_frame, send_frame


class Refused(Exception):  # noqa: N818 - an answer, not a failure of the supervisor
    """Raised to answer a request with a reason."""


def open_folder(parts: list[str], root: str, make: bool) -> int:
    """Open a folder below `root` that `os.path.realpath` named; a link swapped in since then is not followed."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def locate(path: str, config: dict[str, Any], make: bool = False) -> tuple[int, str]:
    """Return an open folder and the name in it that `path` means, links resolved; Refused outside of the roots."""
    real = os.path.realpath(os.path.join(config["workdir"], path))  # noqa: PTH118
    for root in config["roots"]:
        if real.startswith(root.rstrip("/") + "/"):
            *parts, name = real[len(root.rstrip("/")) + 1 :].split("/")
            return open_folder(parts, root, make), name
    raise Refused("outside", "lies outside of the sandbox")


def regular(fd: int) -> os.stat_result:
    """Return what an open file is; Refused when it is no regular file."""
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise Refused("directory", "is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("special", "is no regular file")
    return status


def read_file(channel: socket.socket, request: dict[str, Any], _: bytearray, config: dict[str, Any]) -> None:
    """Reply a file's content in frames."""
    folder, name = locate(request["path"], config)
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    size, limit = regular(fd).st_size, request["max_bytes"]
    left = limit
    while size <= limit and (data := os.read(fd, CHUNK)):
        left -= len(data)
        if left < 0:  # it grew meanwhile
            break
        send_frame(channel, {}, data)
    if size > limit or left < 0:
        raise Refused("large", f"has {size if size > limit else 'more than ' + str(limit)} bytes, over {limit}")
    send_frame(channel, {"end": True})


def write_file(channel: socket.socket, request: dict[str, Any], _: bytearray, config: dict[str, Any]) -> None:
    """Replace a file's content by what the next frames carry."""
    content = _receive_content(channel)
    try:
        _replace(request, config, content)
    except (OSError, Refused):
        for _ in content:  # the worker reads the answer after it has sent everything
            pass
        raise
    send_frame(channel, {"end": True})


def _receive_content(channel: socket.socket) -> Iterator[bytearray]:
    header: dict[str, Any] = {}
    while "end" not in header:
        header, data = receive_frame(channel)
        yield data


def _replace(request: dict[str, Any], config: dict[str, Any], content: Iterator[bytearray]) -> None:
    """Put a new file in the old one's place, so that nobody sees half of it and no hard link is written through."""
    folder, name = locate(request["path"], config, make=True)
    mode = request["mode"]
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(old.st_mode):
            raise Refused("directory", "is a directory")
        mode = stat.S_IMODE(old.st_mode) if mode is None else mode
    temporary = f".{os.getpid()}.sandbox-write"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        for data in content:
            while data:
                del data[: os.write(fd, data)]
        os.fchmod(fd, 0o644 if mode is None else mode)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
