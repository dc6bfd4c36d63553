"""The worker's end of a request to a sandbox's server: frames over a socket of its own, on the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Final

from nemo_gym.errors import SandboxError
from nemo_gym.sandbox.supervision.frames import FRAME

MAX_HEADER: Final = 1 << 20


def frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return one frame."""
    text = json.dumps(header).encode()
    return FRAME.pack(len(text), len(payload)) + text + payload


class Channel:
    """One request's connection.

    Closing it before the reply's end is how a request is cancelled.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, control: socket.socket) -> Channel:
        """Return a new connection whose other end was sent to the server that listens on `control`.

        Raises:
            EOFError: When there is no server any more.
            SandboxError: When this process can't have another socket.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"this process has no room for another request to a sandbox: {error}") from error
        try:
            with theirs:
                while True:
                    try:
                        socket.send_fds(control, [b"\0"], [theirs.fileno()])
                        break
                    except BlockingIOError:  # more requests are on their way than the socket holds
                        await asyncio.sleep(0.01)
            ours.setblocking(False)
            return cls(*await asyncio.open_unix_connection(sock=ours))
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise EOFError(str(error)) from error  # noqa: TRY004
            raise

    async def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send one frame; EOFError when the other end is gone."""
        try:
            self._writer.write(frame(header, payload))
            await self._writer.drain()
        except OSError as error:
            raise EOFError(str(error)) from error

    async def receive(self, max_payload: int) -> tuple[dict[str, Any], bytes]:
        """Return the next frame.

        Raises:
            EOFError: When the other end closed instead, or sent what is no frame of at most that size.
        """
        try:
            header_size, payload_size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            if header_size > MAX_HEADER or payload_size > max_payload:
                raise EOFError("the other end sent more than was asked for")
            header = json.loads(await self._reader.readexactly(header_size))
            return header, await self._reader.readexactly(payload_size)
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Close the connection at once, whatever is still on its way."""
        self._writer.transport.abort()
