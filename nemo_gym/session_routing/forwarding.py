"""The hop out: this worker as a client of another worker's private socket.

Back-pressure comes from the two streams: a chunk is read from one side when the other has taken the one before.
How an owner is connected to, and when it counts as gone, is told in `owner_pool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from starlette.types import Receive, Scope, Send

from nemo_gym.session_routing.hop import end_to_end_headers, outgoing_headers, owner_url
from nemo_gym.session_routing.owner_pool import NoReplyError, OwnerGoneError, OwnerPool
from nemo_gym.session_routing.private_socket import is_listening, is_own_socket, worker_socket_path
from nemo_gym.session_routing.websocket_hop import forward_websocket

_WHOLE_BODY: Final = 65_536  # bytes; a body up to this size goes out in one write with its headers


class ReplyBrokenOffError(Exception):
    """Raised when the owner was lost in the middle of its reply.

    It must reach the server, which then breaks off the client's connection: a short reply must never look like a
    complete one.
    """


class Forwarder:
    """Forwards requests to the workers whose sockets are in one directory.

    Args:
        socket_dir: The directory.
    """

    def __init__(self, socket_dir: Path | str) -> None:
        self._socket_dir = Path(socket_dir)
        self._pools: dict[str, OwnerPool] = {}

    @property
    def open_pools(self) -> int:
        """How many owners there are connections kept for."""
        return len(self._pools)

    async def forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and send its reply, or one WebSocket until it ends.

        It returns early, having told the owner by closing the connection, when the client goes away.

        Args:
            owner: A worker id that has passed `is_worker_id`.
            scope: The request's HTTP or WebSocket scope.
            receive: Its ASGI receive.
            send: Its ASGI send.

        Raises:
            OwnerGoneError: Before anything was sent to the client.
            NoReplyError: Before anything was sent to the client.
            OutOfDescriptorsError: Before anything was sent to the client.
            ReplyBrokenOffError: After the reply had begun.
        """
        pool = await self._pool(owner)
        try:
            async with pool.in_use():
                if scope["type"] == "websocket":
                    await forward_websocket(pool, scope, receive, send)
                else:
                    body = _RequestBody(scope, receive)
                    await _while_client_waits(body, _exchange(pool, scope, body, send))
        except OwnerGoneError:
            await self._discard(owner, pool)
            raise

    async def close(self) -> None:
        """Close all connections."""
        while self._pools:
            _, pool = self._pools.popitem()
            await pool.session.close()

    async def _pool(self, owner: str) -> OwnerPool:
        path = worker_socket_path(self._socket_dir, owner)
        if owner not in self._pools:
            if not is_own_socket(path):
                raise OwnerGoneError(may_have_run=False)
            # A new owner is a rare event, and the one at which an old owner was perhaps replaced.
            for other, old in list(self._pools.items()):
                if not is_listening(old.path):
                    await self._discard(other, old)
        # No await from here to the pool's use, or another request could retire it in between.
        if owner not in self._pools:
            self._pools[owner] = OwnerPool(path)
        return self._pools[owner]

    async def _discard(self, owner: str, pool: OwnerPool) -> None:
        if self._pools.get(owner) is pool:
            del self._pools[owner]
        await pool.retire()


@dataclass
class _RequestBody:
    """The request's body, and then the watch for the client going away; both come out of one ASGI `receive`."""

    scope: Scope
    receive: Receive
    client_gone: bool = False
    started: bool = False
    read: asyncio.Event = field(default_factory=asyncio.Event)

    async def payload(self) -> bytes | AsyncGenerator[bytes] | None:
        """Return the body as the client library wants it: nothing, all of it when it is small, or a stream.

        A body that the client offers with `Expect: 100-continue` is not asked for before the owner does.
        """
        headers = dict(self.scope["headers"])
        length = headers.get(b"content-length")
        known = length is not None and length.isdigit()
        size = int(length) if length is not None and known else 0
        framed_otherwise = b"transfer-encoding" in headers or self.scope.get("http_version", "1.1") >= "2"
        if not size and not framed_otherwise:
            self.read.set()
            return None
        if known and size <= _WHOLE_BODY and b"expect" not in headers:
            return b"".join([chunk async for chunk in self.chunks()])
        return self.chunks()

    async def chunks(self) -> AsyncGenerator[bytes]:
        self.started = True
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    self.client_gone = True
                    raise ConnectionAbortedError("the client went away")
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body", False):
                    return
        finally:
            self.read.set()

    async def client_leaves(self) -> None:
        """Return when the client has gone away."""
        await self.read.wait()
        while not self.client_gone:
            self.client_gone = (await self.receive())["type"] == "http.disconnect"


async def _while_client_waits(body: _RequestBody, exchange: Coroutine[Any, Any, None]) -> None:
    """Await `exchange`, and cancel it when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    ended = cancelled_here = False

    def cancel_exchange(watch: asyncio.Task[None]) -> None:
        nonlocal cancelled_here
        if not ended and not watch.cancelled():
            body.client_gone = cancelled_here = True
            task.cancel()

    cancelled_before = task.cancelling()
    watch = asyncio.create_task(body.client_leaves())
    watch.add_done_callback(cancel_exchange)
    try:
        await exchange
    except asyncio.CancelledError:
        if not cancelled_here or task.uncancel() > cancelled_before:
            raise
    except Exception:
        if not body.client_gone:
            raise
    finally:
        ended = True
        watch.cancel()


async def _exchange(pool: OwnerPool, scope: Scope, body: _RequestBody, send: Send) -> None:
    data = await body.payload()
    try:
        response = await pool.session.request(
            scope["method"], owner_url(scope), headers=outgoing_headers(scope), data=data, allow_redirects=False
        )
    except NoReplyError as error:
        if not body.client_gone and not await pool.still_listens():
            raise OwnerGoneError(may_have_run=True) from error
        raise
    if not body.started:
        body.read.set()
    try:
        await _relay(response, send)
    finally:
        response.close()


async def _relay(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = end_to_end_headers(response.raw_headers)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    more = True
    while more:
        try:
            chunk = await response.content.readany()
        except aiohttp.ClientError as error:
            raise ReplyBrokenOffError("the session's worker was lost in the middle of its reply") from error
        more = not response.content.at_eof()
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
