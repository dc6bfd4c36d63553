"""An owner's end of a private connection, byte by byte: it answers in the way in which it was asked."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass

HEAD, BODY, LAST = 1, 2, 4
FRAMES_BEGIN = {bytes([HEAD]), bytes([HEAD | LAST])}


def frame(flags: int, content: bytes = b"") -> bytes:
    return struct.pack("!BQ", flags, len(content)) + content


def frames_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the frames that `data` consists of."""
    while data:
        flags, length = struct.unpack_from("!BQ", data)
        yield flags, data[9 : 9 + length]
        data = data[9 + length :]


@dataclass
class OwnerEnd:
    """What a stand-in for an owner says on one connection."""

    writer: asyncio.StreamWriter
    speaks_frames: bool

    def begin(self, *headers: bytes, status: int = 200) -> None:
        """Begin a reply whose body has no length."""
        if self.speaks_frames:
            lines = [b"%d" % status, *(part for header in headers for part in header.split(b": "))]
            self.writer.write(frame(HEAD, b"\n".join(lines)))
        else:
            lines = [b"HTTP/1.1 %d ?" % status, *headers, b"transfer-encoding: chunked", b"", b""]
            self.writer.write(b"\r\n".join(lines))

    def go_on(self, piece: bytes) -> None:
        self.writer.write(frame(BODY, piece) if self.speaks_frames else b"%x\r\n%s\r\n" % (len(piece), piece))

    def end(self) -> None:
        self.writer.write(frame(BODY | LAST) if self.speaks_frames else b"0\r\n\r\n")

    def answer(self, body: bytes = b"ok") -> None:
        """Reply in full."""
        self.begin(b"x-by: stand-in")
        self.go_on(body)
        self.end()


async def take_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> OwnerEnd:
    """Take a request's head, in frames or as HTTP."""
    first = await reader.readexactly(1)
    speaks_frames = first in FRAMES_BEGIN
    if speaks_frames:
        await reader.readexactly(int.from_bytes(await reader.readexactly(8)))
    else:
        await reader.readuntil(b"\r\n\r\n")
    return OwnerEnd(writer, speaks_frames)
