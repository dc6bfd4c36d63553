"""A kept-alive HTTP connection, as cheap as Python lets it be: one request at a time, a callback per reply."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, cast

import httptools

from benchmarks.load.holders import holders

_HEALTH = b"GET /health HTTP/1.1\r\nHost: %s\r\n\r\n"
_BATCH = 8


class Connection(asyncio.Protocol):
    """One connection. What was answered last stands in `status`, `body` and `cookies` until the next request.

    Args:
        on_reply: Called with the connection when a reply has come whole.
        on_lost: Called with the connection when it was closed by the other side.
    """

    def __init__(self, on_reply: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self.on_reply = on_reply
        self.on_lost = on_lost
        self.session: Any = None
        self.worker: int | None = None
        self.sent_at = 0.0
        self.status = 0
        self.body = b""
        self.cookies: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._closing = False

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        """Connect. The callbacks are to be set before the first request."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(_ignore, _ignore), host, port)
        return connection

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at the other end."""
        assert self._transport is not None
        host, port = self._transport.get_extra_info("peername")[:2]
        return host, port

    @property
    def local_port(self) -> int:
        """The port at this end."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("sockname")[1])

    def send(self, request: bytes) -> None:
        """Send a request; the one before must have been answered."""
        assert self._transport is not None
        self.body = b""
        self.cookies = []
        self.sent_at = time.perf_counter()
        self._transport.write(request)

    async def ask(self, request: bytes) -> None:
        """Send a request and return when it is answered."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_reply(_: Connection) -> None:
            if not answered.done():
                answered.set_result(None)

        def on_lost(_: Connection) -> None:
            if not answered.done():
                answered.set_exception(ConnectionResetError("the server closed a connection"))

        before = self.on_reply, self.on_lost
        self.on_reply, self.on_lost = on_reply, on_lost
        try:
            self.send(request)
            await answered
        finally:
            self.on_reply, self.on_lost = before

    def close(self) -> None:
        """Close it."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A transport of uvloop is one, and is derived from nothing that says so.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            self.on_lost(self)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"set-cookie":
            self.cookies.append(value)

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.on_reply(self)


def post(host: str, path: str, body: bytes, cookies: Mapping[bytes, bytes] = {}, headers: bytes = b"") -> bytes:
    """Return the bytes of a POST request with a JSON body; `headers` are whole lines."""
    if cookies:
        headers += b"Cookie: " + b"; ".join(b"%s=%s" % cookie for cookie in cookies.items()) + b"\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    ).encode() + b"%s\r\n%s" % (headers, body)


def take_cookies(jar: dict[bytes, bytes], set_cookies: Iterable[bytes]) -> None:
    """Keep the cookies of a reply."""
    for line in set_cookies:
        name, _, value = line.partition(b";")[0].partition(b"=")
        jar[name] = value


def json_bytes(value: Any) -> bytes:
    """Return `value` as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


async def open_connections(
    host: str, port: int, count: int, workers: Sequence[int], patience_s: float = 30.0
) -> list[Connection]:
    """Open connections such that every worker holds as many as any other.

    The kernel gives a connection to any worker that is free, often to the same one. How many requests have to be
    passed on depends on that, so it must be the same in every round and for every alternative.

    Args:
        host: The server's address.
        port: Its port.
        count: How many to open.
        workers: The workers' process ids. With fewer than two the connections are taken as they come.
        patience_s: For how long to go on trying.

    Raises:
        ConnectionError: A worker takes fewer than its share; measured so, it would be compared with something else.
    """
    if len(workers) < 2:
        return await asyncio.gather(*(Connection.open(host, port) for _ in range(count)))
    share = -(-count // len(workers))
    by_worker: dict[int, list[Connection]] = defaultdict(list)
    spare: list[Connection] = []
    give_up = time.monotonic() + patience_s
    while sum(map(len, by_worker.values())) < share * len(workers) and time.monotonic() < give_up:
        opened = await asyncio.gather(*(Connection.open(host, port) for _ in range(_BATCH)))
        # Answered, a connection has been accepted for certain.
        await asyncio.gather(*(one.ask(_HEALTH % host.encode()) for one in opened))
        held = await asyncio.to_thread(holders, port, workers)
        for one in opened:
            one.worker = held.get(one.local_port)
            wanted = one.worker is not None and len(by_worker[one.worker]) < share
            (by_worker[one.worker] if wanted and one.worker is not None else spare).append(one)
        while len(spare) > 2 * count:
            spare.pop(0).close()
    chosen = [one for connections in by_worker.values() for one in connections]
    for one in spare:
        one.close()
    if len(chosen) < share * len(workers):
        for one in chosen:
            one.close()
        taken = sorted(len(by_worker.get(worker, ())) for worker in workers)
        raise ConnectionError(f"connections can't be spread evenly: of {share} each, workers have taken {taken}")
    random.Random(0).shuffle(chosen)
    for one in chosen[count:]:
        one.close()
    return chosen[:count]


def _ignore(_: Connection) -> None:
    pass
