"""Files of this machine, read and written beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import BinaryIO, Final

from nemo_gym.errors import SandboxFileError

COPY_BYTES: Final = 1 << 20
"""Bytes that are in memory at one time while a file is copied."""


def open_regular(path: Path) -> BinaryIO:
    """Return the open file; SandboxFileError when it is none that ends. Blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise SandboxFileError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SandboxFileError(f"{path}: is no regular file")
    return os.fdopen(descriptor, "rb")


async def aiter_of(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield what an ordinary iterable yields."""
    for chunk in chunks:
        yield chunk


async def read_in_thread(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield a file's content."""
    while data := await asyncio.to_thread(file.read, COPY_BYTES):
        yield data


async def write_in_thread(path: Path, chunks: AsyncIterator[bytes]) -> None:
    """Write a file whole or not at all, making missing folders.

    Raises:
        SandboxFileError: When it can't be written.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    try:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        file = await asyncio.to_thread(temporary.open, "xb")
        try:
            buffer = bytearray()
            async for chunk in chunks:
                buffer += chunk
                if len(buffer) >= COPY_BYTES:
                    await asyncio.to_thread(file.write, bytes(buffer))
                    buffer.clear()
            await asyncio.to_thread(file.write, bytes(buffer))
        finally:
            file.close()
        await asyncio.to_thread(temporary.replace, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, SandboxFileError):
            raise
        raise SandboxFileError(f"{path}: {error.strerror}") from error
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
