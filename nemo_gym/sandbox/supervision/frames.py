"""How the worker and a supervisor talk: two big-endian 32-bit lengths, a JSON header, and bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

FRAME: Final = struct.Struct(">II")
CHUNK: Final = 1 << 16
"""The most bytes that a frame of a file carries."""


def send_frame(sock: socket.socket, header: dict[str, Any], payload: bytes | bytearray = b"") -> None:
    """Send one frame."""
    text = json.dumps(header).encode()
    sock.sendall(FRAME.pack(len(text), len(payload)) + text)
    if payload:
        sock.sendall(payload)


def receive(sock: socket.socket, size: int) -> bytearray:
    """Return exactly `size` bytes; EOFError when the peer closes first."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data


def receive_frame(sock: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Return one frame's header and payload."""
    header, payload = FRAME.unpack(receive(sock, FRAME.size))
    return json.loads(receive(sock, header)), receive(sock, payload)
