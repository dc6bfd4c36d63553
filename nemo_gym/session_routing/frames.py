"""How two workers speak of one forwarded request: in frames, over a private socket.

Both ends are of one program, so nothing is gained by writing the request as HTTP text and parsing it again. What
passes is what ASGI knows of a request and its reply: two heads, and two bodies in pieces.

A frame is a byte of flags, the length of what follows, and that. A connection carries one request after another,
never two at once: the next begins when the reply before it has ended. Either side gives a request up by closing.

- to the owner: `HEAD`, then, unless that was `LAST`, one or more `BODY`, the last of them `LAST`;
- from the owner: perhaps `CONTINUE` (it wants the body that the client has only offered), then `HEAD` and one or
  more `BODY`, the last of them `LAST`.

A head is a few fields and then the headers, all on lines of their own: names and values hold no line break.
"""

from __future__ import annotations

import asyncio
import struct
from itertools import chain
from typing import Final, cast

from nemo_gym.session_routing.hop import Headers

HEAD: Final = 1
BODY: Final = 2
LAST: Final = 4
CONTINUE: Final = 16

BEGINS_A_REQUEST: Final = frozenset({HEAD, HEAD | LAST})
"""The first byte of a connection that carries frames. No HTTP request begins with one of them."""

_FLAGS: Final = frozenset({HEAD, HEAD | LAST, BODY, BODY | LAST, CONTINUE})
_PREFIX: Final = struct.Struct("!BQ")
_LONGEST_HEAD: Final = 2**30  # bytes; what claims to be longer is no head
_HIGH_WATER: Final = 262_144  # bytes of a body that are held before the other side is made to wait
_JOINED: Final = 65_536  # bytes; copying a longer piece behind its prefix costs more than a second buffer


class FramesError(Exception):
    """Raised when the other side sends what is no frame, or one that it may not send there."""


def head_frame(flags: int, fields: tuple[bytes, ...], headers: Headers) -> bytes:
    """Return a frame with a head.

    Args:
        flags: `HEAD`, with `LAST` where no body follows.
        fields: What stands before the headers; the two ends agree on their number.
        headers: Names and values.

    Raises:
        ValueError: There is a line break in a field, a name or a value.
    """
    content = b"\n".join((*fields, *chain.from_iterable(headers)))
    if content.count(b"\n") != len(fields) + 2 * len(headers) - 1:
        raise ValueError("a header, or the target, has a line break in it")
    return _PREFIX.pack(flags, len(content)) + content


def read_head(content: bytes, fields: int) -> tuple[list[bytes], Headers]:
    """Return the fields and the headers of a head.

    Raises:
        FramesError: It is no head with that many fields.
    """
    lines = content.split(b"\n")
    if len(lines) < fields or (len(lines) - fields) % 2:
        raise FramesError(f"a head has {len(lines)} lines")
    names_and_values = iter(lines[fields:])
    return lines[:fields], list(zip(names_and_values, names_and_values, strict=True))


class FrameProtocol(asyncio.Protocol):
    """What both ends of a connection have in common: frames in and out, and how each side makes the other wait.

    A subclass gets the frames through `head_received`, `body_received` and `continue_received`, and learns by
    `connection_ended` that there will be no more. What is wrong with the frames closes the connection.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_open = False
        self.write_paused = False
        self._partial = b""
        self._is_last = False
        self._left = 0
        self._read_paused = False
        self._drained: asyncio.Event | None = None

    def head_received(self, content: bytes, *, last: bool) -> None:
        """Take a head."""
        raise NotImplementedError

    def body_received(self, piece: bytes, *, last: bool) -> None:
        """Take a piece of the body; call `hold_back` when too many are held."""
        raise NotImplementedError

    def continue_received(self) -> None:
        """Learn that the other side wants the body."""
        raise FramesError("a body was asked for")

    def connection_ended(self) -> None:
        """Learn that the connection is closed."""
        raise NotImplementedError

    def write_head(self, flags: int, fields: tuple[bytes, ...], headers: Headers) -> None:
        """Send a head; see `head_frame`."""
        self.transport.write(head_frame(flags, fields, headers))

    def write_whole(self, fields: tuple[bytes, ...], headers: Headers, body: bytes) -> None:
        """Send a head and all of a small body, or none, at once."""
        if body:
            self.transport.write(head_frame(HEAD, fields, headers) + _PREFIX.pack(BODY | LAST, len(body)) + body)
        else:
            self.transport.write(head_frame(HEAD | LAST, fields, headers))

    def write_body(self, piece: bytes, *, last: bool) -> None:
        """Send a piece of the body."""
        prefix = _PREFIX.pack(BODY | LAST if last else BODY, len(piece))
        if len(piece) <= _JOINED:
            self.transport.write(prefix + piece)
        else:
            self.transport.writelines((prefix, piece))

    def write_continue(self) -> None:
        """Ask for the body."""
        self.transport.write(_PREFIX.pack(CONTINUE, 0))

    async def drained(self) -> None:
        """Return when the other side has taken enough of what was written, or the connection has ended."""
        if self.write_paused and self.is_open:
            if self._drained is None:
                self._drained = asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def hold_back(self, held: int) -> None:
        """Let no more of the body come in if that many bytes of it are too many to hold."""
        if held > _HIGH_WATER and not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        """Let more of the body come in: what was held has been taken."""
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    def close(self) -> None:
        """Close the connection after what was written has gone out."""
        self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        # Not asserted: those of uvloop are no asyncio.Transport by class.
        self.transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.is_open = False
        self.resume_writing()
        self.connection_ended()

    def pause_writing(self) -> None:
        """Called by the loop."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Called by the loop."""
        self.write_paused = False
        if self._drained is not None:
            self._drained.set()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._partial:
            data, self._partial = self._partial + data, b""
        position, end = 0, len(data)
        try:
            while position < end:
                if self._left:
                    piece = data[position : position + self._left]
                    position += len(piece)
                    self._left -= len(piece)
                    self.body_received(piece, last=self._is_last and not self._left)
                    continue
                start = position + _PREFIX.size
                if end < start:
                    break
                flags, length = _PREFIX.unpack_from(data, position)
                if flags & BODY and flags in _FLAGS:
                    position = start
                    self._is_last, self._left = flags != BODY, length
                    if not length:
                        self.body_received(b"", last=self._is_last)
                elif flags & HEAD and flags in _FLAGS and length <= _LONGEST_HEAD:
                    if end < start + length:
                        break
                    position = start + length
                    self.head_received(data[start:position], last=flags != HEAD)
                elif flags == CONTINUE and not length:
                    position = start
                    self.continue_received()
                else:
                    raise FramesError(f"flags {flags}, length {length}")
        except FramesError:
            self.transport.abort()
        else:
            self._partial = data[position:]
