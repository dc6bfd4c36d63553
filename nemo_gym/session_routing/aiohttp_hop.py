"""The hop out by aiohttp's client, as HTTP: the alternative that `frame_hop` is compared with.

Back-pressure comes from the two streams: a chunk is read from one side when the other has taken the one before.
How aiohttp is kept from changing what passes is told in `owner_pool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from starlette.types import Receive, Scope, Send

from nemo_gym.session_routing.hop import end_to_end_headers, offers_body, outgoing_headers, owner_url
from nemo_gym.session_routing.owner_pool import OwnerPool
from nemo_gym.session_routing.owner_socket import NoReplyError, OwnerGoneError, ReplyBrokenOffError

_WHOLE_BODY: Final = 65_536  # bytes; a body up to this size goes out in one write with its headers


class AiohttpHop:
    """The way to one owner by aiohttp's client; see `forwarding.Hop`.

    Args:
        path: The owner's socket.
    """

    def __init__(self, path: Path) -> None:
        self._pool = OwnerPool(path)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and send its reply."""
        async with self._pool.in_use():
            body = _RequestBody(scope, receive)
            await _while_client_waits(body, _exchange(self._pool, scope, body, send))

    async def retire(self) -> None:
        """Close the connections when the last request on them has ended."""
        await self._pool.retire()

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.session.close()


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
        if known and size <= _WHOLE_BODY and not offers_body(self.scope["headers"]):
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
