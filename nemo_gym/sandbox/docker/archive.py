"""Files as the Engine API moves them: a tar archive of one or more entries, and a description in a header."""

from __future__ import annotations

import asyncio
import base64
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import StreamReader

from nemo_gym.errors import SandboxFileError

BLOCK: Final = 512
CHUNK: Final = 1 << 16
STAT_HEADER: Final = "X-Docker-Container-Path-Stat"
MAX_FILE_BYTES: Final = 8 << 30
"""The size from which a tar archive needs an extension to tell it."""
# Bits of Go's FileMode, which the API speaks.
_DIRECTORY: Final = 1 << 31
_LINK: Final = 1 << 27
_SPECIAL: Final = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
_SET_BITS: Final = {1 << 23: 0o4000, 1 << 22: 0o2000, 1 << 20: 0o1000}


@dataclass(frozen=True)
class PathStat:
    """What the daemon says of a path.

    Attributes:
        size: Bytes of a regular file.
        mode: Go's FileMode.
        link_target: Where a link leads.
    """

    size: int
    mode: int
    link_target: str

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> PathStat:
        """Return it from the header of an answer; ValueError when there is none."""
        try:
            found = json.loads(base64.b64decode(headers[STAT_HEADER]))
            return cls(int(found["size"]), int(found["mode"]), str(found.get("linkTarget") or ""))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no proper header {STAT_HEADER}") from error

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return bool(self.mode & _LINK)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return bool(self.mode & _DIRECTORY)

    @property
    def is_regular(self) -> bool:
        """Whether it is an ordinary file."""
        return not self.mode & (_DIRECTORY | _LINK | _SPECIAL)

    @property
    def permissions(self) -> int:
        """Its permissions, as chmod takes them."""
        return self.mode & 0o777 | sum(bit for go, bit in _SET_BITS.items() if self.mode & go)


@dataclass(frozen=True)
class Entry:
    """One file (or, without a size, folder) of an archive.

    Attributes:
        name: Its path below the place where the archive is unpacked.
        size: Its bytes; None for a folder.
        mode: Its permissions.
        owner: The numbers of its user and group.
    """

    name: str
    size: int | None
    mode: int
    owner: tuple[int, int]

    def header(self) -> bytes:
        """Return its header blocks."""
        info = tarfile.TarInfo(self.name)
        info.size, info.mode = self.size or 0, self.mode
        info.uid, info.gid = self.owner
        info.type = tarfile.DIRTYPE if self.size is None else tarfile.REGTYPE
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


async def pack(entry: Entry, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield one entry of an archive.

    Raises:
        SandboxFileError: When there are more or fewer bytes than it says.
    """
    yield entry.header()
    left = entry.size or 0
    async for data in chunks:
        left -= len(data)
        if left < 0:
            break
        yield data
    if left:
        raise SandboxFileError(f"{entry.name}: its size changed while it was copied")
    yield bytes(-(entry.size or 0) % BLOCK)


def end() -> bytes:
    """Return what ends an archive."""
    return bytes(2 * BLOCK)


async def unpack(content: StreamReader) -> AsyncIterator[bytes]:
    """Yield the content of an archive's first file.

    Raises:
        EOFError: When it ends too early.
        ValueError: When it is no archive, or the file no ordinary one.
    """
    try:
        while True:
            info = tarfile.TarInfo.frombuf(await content.readexactly(BLOCK), "utf-8", "surrogateescape")
            if info.type not in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                break
            await content.readexactly(info.size + -info.size % BLOCK)
    except tarfile.HeaderError as error:
        raise ValueError(f"no archive: {error}") from error
    except asyncio.IncompleteReadError as error:
        raise EOFError("the archive ends in its header") from error
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise ValueError(f"an archive with something of type {info.type!r} instead of a file")
    left = info.size
    while left:
        data = await content.read(min(left, CHUNK))
        if not data:
            raise EOFError("the archive ends in the middle of a file")
        left -= len(data)
        yield data
