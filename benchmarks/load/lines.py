"""Blocking connections for what is measured one request at a time: directly to a session's owner, or by the hop."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from benchmarks.load.holders import holders
from benchmarks.load.wire import json_bytes, post, take_cookies

Way: TypeAlias = Literal["direct", "hop", "any"]

_PATIENCE_S: Final = 20.0
_RECEIVE: Final = 2**20
_ROW: Final = {"responses_create_params": {"input": "none"}, "initial_count": 0}


class Line:
    """One kept-alive connection; what is received lands in one buffer."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self.sock = socket.create_connection((host, port), timeout=60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_RECEIVE)

    @property
    def local_port(self) -> int:
        """The port at this end."""
        return int(self.sock.getsockname()[1])

    def receive(self) -> bytes:
        """Return what has come, at least a byte."""
        count = self._receive_into()
        return bytes(memoryview(self._buffer)[:count])

    def ask(self, *request: bytes) -> tuple[int, bytes, list[bytes]]:
        """Send a request, in parts, and return status, body and cookies of a reply that has a length."""
        for part in request:
            self.sock.sendall(part)
        status, length, cookies, body = self.head()
        while len(body) < length:
            body += self.receive()
        return status, body, cookies

    def head(self) -> tuple[int, int, list[bytes], bytes]:
        """Receive the head of a reply: its status, its body's length (0: not told), its cookies, what came after."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.receive()
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length, cookies = 0, []
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"set-cookie":
                cookies.append(value.strip())
        return int(lines[0].split()[1]), length, cookies, rest

    def drain(self, length: int) -> None:
        """Receive so many bytes and forget them."""
        while length > 0:
            length -= self._receive_into()

    def close(self) -> None:
        """Close it."""
        self.sock.close()

    def _receive_into(self) -> int:
        count = self.sock.recv_into(self._buffer)
        if not count:
            raise ConnectionError("the server closed a connection")
        return count


class Session:
    """A session, and a connection that leads to its owner or to another worker, as is wanted.

    Args:
        host: The server's address.
        port: Its port.
        workers: The processes that accept; with `way` "any" it doesn't matter.
        way: Where the connection is to lead: "direct" to the owner, "hop" to another worker.
    """

    def __init__(self, host: str, port: int, workers: Sequence[int], way: Way) -> None:
        self.cookies: dict[bytes, bytes] = {}
        self.host = f"{host}:{port}"
        self.line = Line(host, port)
        take_cookies(self.cookies, self.line.ask(post(self.host, "/seed_session", json_bytes(_ROW)))[2])
        owner = json.loads(self.line.ask(self.get("/pid"))[1])["pid"]
        give_up = time.monotonic() + _PATIENCE_S
        refused: list[Line] = []
        while not self._leads_right(workers, way, owner):
            refused.append(self.line)
            if time.monotonic() > give_up:
                raise ConnectionError(f"found no connection for the way '{way}'")
            self.line = Line(host, port)
            self.line.ask(self.get("/pid"))
        # Closed only now, so that they kept their workers busy while others accepted.
        for line in refused:
            line.close()

    def get(self, path: str) -> bytes:
        """Return the bytes of a GET request of this session."""
        cookie = b"; ".join(b"%s=%s" % it for it in self.cookies.items())
        return b"GET %s HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\n\r\n" % (path.encode(), self.host.encode(), cookie)

    def post_head(self, path: str, length: int) -> bytes:
        """Return the head of a POST request of this session, for a body of so many bytes."""
        cookie = b"; ".join(b"%s=%s" % it for it in self.cookies.items())
        return (
            b"POST %s HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\nContent-Type: application/octet-stream\r\n"
            b"Content-Length: %d\r\n\r\n" % (path.encode(), self.host.encode(), cookie, length)
        )

    def _leads_right(self, workers: Sequence[int], way: Way, owner: int) -> bool:
        if way == "any":
            return True
        holder = holders(self.line.port, workers).get(self.line.local_port)
        return holder is not None and (holder == owner) == (way == "direct")
