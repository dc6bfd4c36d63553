"""How two workers speak of one forwarded request: in frames, over a private socket.

Both ends are of one program, so nothing is gained by writing the request as HTTP text and parsing it again. What
passes is what ASGI knows of a request and its reply: two heads, and two bodies in pieces.

A frame is a byte of flags, the length of what follows, and that. A connection carries one request after another,
never two at once: the next begins when the reply before it has ended. Either side gives a request up by closing.

- to the owner: `HEAD`, then, unless that was `LAST`, one or more `BODY`, the last of them `LAST`;
- from the owner: perhaps `CONTINUE` (it wants the body that the client has only offered), then `HEAD` and one or
  more `BODY`, the last of them `LAST`.

A head is a few fields and then the headers, all on lines of their own: names and values hold no line break.

A large body's pieces pass through memory that both sides have open (`body_memory`); the connection says only that one
was left there. In either direction, and independently of each other:

- the sender, once a body has turned out to be large, `OFFER`s memory; the receiver, if it can open it, answers `TAKEN`;
- each `SHARED`, which may be `LAST`, is a `BODY` whose bytes were left there. The receiver takes them and says `TAKEN`.
  Until then pieces that can't wait pass on the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from itertools import chain
from typing import Final, cast

from nemo_gym.session_routing.body_memory import LARGEST_PIECE, OFFER_SIZE, IncomingMemory, OutgoingMemory
from nemo_gym.session_routing.hop import Headers

HEAD: Final = 1
BODY: Final = 2
LAST: Final = 4
CONTINUE: Final = 16
OFFER: Final = 32
SHARED: Final = 64
TAKEN: Final = 128

BEGINS_A_REQUEST: Final = frozenset({HEAD, HEAD | LAST})
"""The first byte of a connection that carries frames. No HTTP request begins with one of them."""

_PREFIX: Final = struct.Struct("!BQ")
_LONGEST_HEAD: Final = 2**22  # bytes; what claims to be longer is no head
_RECEIVED: Final = 262_144  # bytes that are received at once; more than a Unix socket holds by default
_HIGH_WATER: Final = 262_144  # bytes of a body that are held before the other side is made to wait
_LARGE: Final = 2**20  # bytes of a body that pass on the connection before memory is offered
_JOINED: Final = 65_536  # bytes; copying a longer piece behind its prefix costs more than a second buffer


_Part = bytes | bytearray | memoryview


class FramesError(Exception):
    """Raised when the other side sends what is no frame, or one that it may not send there."""


class HeadTooLongError(ValueError):
    """Raised when a head has more bytes than pass between two workers."""


def head_frame(flags: int, fields: tuple[bytes, ...], headers: Headers) -> bytes:
    """Return a frame with a head.

    Args:
        flags: `HEAD`, with `LAST` where no body follows.
        fields: What stands before the headers; the two ends agree on their number.
        headers: Names and values.

    Raises:
        HeadTooLongError: It has more than 4 MiB.
        ValueError: There is a line break in a field, a name or a value.
    """
    content = b"\n".join((*fields, *chain.from_iterable(headers)))
    if content.count(b"\n") != len(fields) + 2 * len(headers) - 1:
        raise ValueError("a header, or the target, has a line break in it")
    if len(content) > _LONGEST_HEAD:
        raise HeadTooLongError(f"the target and the headers have {len(content)} bytes; at most {_LONGEST_HEAD} pass")
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


def receive_buffer() -> memoryview:
    """Return what a `FrameProtocol` receives into."""
    return memoryview(bytearray(_RECEIVED))


class FrameProtocol(asyncio.BufferedProtocol):
    """What both ends of a connection have in common: frames in and out, and how each side makes the other wait.

    A subclass gets the frames through `head_received`, `body_received` and `continue_received`, and learns by
    `connection_ended` that there will be no more. What is wrong with the frames closes the connection.

    Args:
        buffer: A `receive_buffer`. Connections of one event loop may have the same: nothing stays in it.
    """

    transport: asyncio.Transport

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.is_open = False
        self.write_paused = False
        self._partial = bytearray()
        self._in_body = self._is_last = False
        self._left = 0
        self._read_paused = False
        self._drained: asyncio.Event | None = None
        self._incoming: IncomingMemory | None = None
        self._outgoing: OutgoingMemory | None = None
        self._has_offered = self._is_shared = self._is_free = False
        self._sent = 0

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
        size = len(piece)
        if self._is_free and _JOINED < size <= LARGEST_PIECE:
            assert self._outgoing is not None
            self._is_free = False
            self._outgoing.put(piece)
            self.transport.write(_PREFIX.pack(SHARED | LAST if last else SHARED, size))
            return
        prefix = _PREFIX.pack(BODY | LAST if last else BODY, size)
        if size <= _JOINED:
            self.transport.write(prefix + piece)
        else:
            self.transport.writelines((prefix, piece))
        self._sent = 0 if last else self._sent + size
        if self._sent > _LARGE and not self._has_offered:
            self._offer_memory()

    def write_continue(self) -> None:
        """Ask for the body."""
        self.transport.write(_PREFIX.pack(CONTINUE, 0))

    def must_wait(self, size: int) -> bool:
        """Tell whether a piece of so many bytes is to wait until the other side has taken more."""
        if self.write_paused:
            return True
        # While nothing is read here, nothing tells that the last piece was taken.
        is_taking = self._is_shared and not self._is_free and not self._read_paused
        return is_taking and _JOINED < size <= LARGEST_PIECE

    async def drained(self, size: int) -> None:
        """Return when a piece of so many bytes must wait no longer, or the connection has ended."""
        while self.is_open and self.must_wait(size):
            if self._drained is None:
                self._drained = asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def hold_back(self, held: int) -> None:
        """Let no more of the body come in if that many bytes of it are too many to hold."""
        if held > _HIGH_WATER and not self._read_paused:
            self._read_paused = True
            self._look_again()
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
        if self._outgoing is not None:
            self._outgoing.was_opened()
        self._incoming = self._outgoing = None
        self._is_free = False
        self.resume_writing()
        self.connection_ended()

    def pause_writing(self) -> None:
        """Called by the loop."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Called by the loop."""
        self.write_paused = False
        self._look_again()

    def _look_again(self) -> None:
        if self._drained is not None:
            self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop."""
        data = self._buffer[:nbytes]
        # What is not copied here is copied where the parts of a body are put together: once.
        self.data_received(data if nbytes > _JOINED else data.tobytes())

    def data_received(self, data: bytes | bytearray | memoryview) -> None:
        """Take what has come in."""
        partial = self._partial
        if partial:
            partial += data
            data = partial
        position, end = 0, len(data)
        parts: list[_Part] = []
        try:
            while position < end:
                if not self._in_body:
                    begin, position = position, self._frame_begins(data, position, parts)
                    if position == begin:
                        break
                if self._in_body:
                    position = self._body_goes_on(data, position, parts)
            if parts:
                self.body_received(b"".join(parts), last=False)
        except FramesError:
            self.transport.abort()
        else:
            if partial:
                del partial[:position]
            elif position < end:
                partial += data[position:]

    def _body_goes_on(self, data: _Part, position: int, parts: list[_Part]) -> int:
        """Take what is there of a body's frame, and return where to go on."""
        end = min(len(data), position + self._left)
        if end > position:
            parts.append(data[position:end])
        self._left -= end - position
        self._in_body = self._left > 0
        if self._is_last and not self._in_body:
            self.body_received(b"".join(parts), last=True)
            parts.clear()
        return end

    def _frame_begins(self, data: _Part, position: int, parts: list[_Part]) -> int:
        """Take a frame's prefix, or a whole head, and return where to go on: at `position` if too little is there."""
        start = position + _PREFIX.size
        if len(data) < start:
            return position
        flags, length = _PREFIX.unpack_from(data, position)
        if flags in (BODY, BODY | LAST):
            self._in_body, self._is_last, self._left = True, flags != BODY, length
            return start
        if flags in (HEAD, HEAD | LAST) and length <= _LONGEST_HEAD:
            if len(data) < start + length:
                return position
            self.head_received(bytes(data[start : start + length]), last=flags != HEAD)
            return start + int(length)
        if flags in (SHARED, SHARED | LAST) and self._incoming is not None and length <= LARGEST_PIECE:
            self._in_body, self._is_last, self._left = True, flags != SHARED, 0
            parts.append(self._incoming.take(length))
            self.transport.write(_PREFIX.pack(TAKEN, 0))
            return start
        if flags == TAKEN and not length and self._outgoing is not None and not self._is_free:
            self._is_shared = self._is_free = True
            self._outgoing.was_opened()
            self._look_again()
            return start
        if flags == OFFER and length == OFFER_SIZE:
            if len(data) < start + length:
                return position
            self._open_memory(bytes(data[start : start + length]))
            return start + int(length)
        if flags == CONTINUE and not length:
            self.continue_received()
            return start
        raise FramesError(f"flags {flags}, length {length}")

    def _offer_memory(self) -> None:
        self._has_offered = True
        with contextlib.suppress(OSError):
            self._outgoing = OutgoingMemory()
            self.transport.write(_PREFIX.pack(OFFER, OFFER_SIZE) + self._outgoing.offer)

    def _open_memory(self, offer: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._incoming = IncomingMemory(offer)
            self.transport.write(_PREFIX.pack(TAKEN, 0))
