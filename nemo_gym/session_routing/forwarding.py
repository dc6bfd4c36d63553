"""The hop out: this worker as a client of another worker's private socket.

One pool of connections per owner. Whatever the client library would do on its own account (limits, timeouts,
cookies, redirects, decompression, default headers, repeating a request) is switched off: the request and the
reply pass as they are. Back-pressure comes from the two streams: a chunk is read from one side when the other has
taken the one before.

Failure policy: an owner is gone only if nothing of this user listens at its path. One that does not answer is
waited for as long as the client waits. A request is never sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_middlewares import ClientHandlerType
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from nemo_gym.session_routing.hop import HOP_HEADER, describe_origin, end_to_end_headers, request_target
from nemo_gym.session_routing.private_socket import (
    KEEP_ALIVE,
    NOBODY_LISTENS,
    is_listening,
    is_own_socket,
    worker_socket_path,
)

_IDLE_SECONDS: Final = KEEP_ALIVE / 4  # the forwarding side must always be the first to close
_NO_LIMIT: Final = 2**30
_WHOLE_BODY: Final = 65_536  # bytes; a body up to this size goes out in one write with its headers
_FIRST_RETRY: Final = 0.005  # seconds between attempts at a full backlog, doubled up to the last
_LAST_RETRY: Final = 0.1
_AUTOMATIC_HEADERS: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


class OwnerGoneError(Exception):
    """Raised when a session's owner no longer runs.

    Args:
        may_have_run: The request had been sent, so that its handler may have run.
    """

    def __init__(self, *, may_have_run: bool) -> None:
        super().__init__("the owner is gone")
        self.may_have_run = may_have_run


class NoReplyError(Exception):
    """Raised when an owner that still runs closed the connection before it replied."""


class OutOfDescriptorsError(Exception):
    """Raised when this process can't open another socket."""


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
        self._pools: dict[str, _Pool] = {}

    @property
    def open_pools(self) -> int:
        """How many owners there are connections kept for."""
        return len(self._pools)

    async def forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and send its reply.

        It returns early, having told the owner by closing the connection, when the client goes away.

        Args:
            owner: A worker id that has passed `is_worker_id`.
            scope: The request's HTTP scope.
            receive: Its ASGI receive.
            send: Its ASGI send.

        Raises:
            OwnerGoneError: Before anything was sent to the client.
            NoReplyError: Before anything was sent to the client.
            OutOfDescriptorsError: Before anything was sent to the client.
            ReplyBrokenOffError: After the reply had begun.
        """
        pool = await self._pool(owner)
        body = _RequestBody(scope, receive)
        try:
            async with pool.in_use():
                await _while_client_waits(body, _exchange(pool, scope, body, send))
        except OwnerGoneError:
            await self._discard(owner, pool)
            raise

    async def close(self) -> None:
        """Close all connections."""
        while self._pools:
            _, pool = self._pools.popitem()
            await pool.session.close()

    async def _pool(self, owner: str) -> _Pool:
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
            self._pools[owner] = _Pool(path)
        return self._pools[owner]

    async def _discard(self, owner: str, pool: _Pool) -> None:
        if self._pools.get(owner) is pool:
            del self._pools[owner]
        await pool.retire()


class _Pool:
    """The connections to one owner.

    A retired pool closes when the last request on it has ended: an owner that takes no new requests may still be
    answering the ones it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = aiohttp.ClientSession(
            connector=_OwnerConnector(os.fspath(path), limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_VerbatimRequest,
            middlewares=(_send_once,),
            skip_auto_headers=_AUTOMATIC_HEADERS,
            auto_decompress=False,
            max_line_size=_NO_LIMIT,
            max_field_size=_NO_LIMIT,
            max_headers=_NO_LIMIT,
        )
        self._in_use = 0
        self._retired = False

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncGenerator[None]:
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            if self._retired:
                await self.retire()

    async def retire(self) -> None:
        self._retired = True
        if not self._in_use:
            await self.session.close()


class _OwnerConnector(aiohttp.UnixConnector):
    """Connects to an owner's socket, and tells an owner that is gone from one that is busy.

    asyncio's own connect takes EAGAIN, which for a Unix socket means that the backlog is full, for a connection in
    progress, and goes on with a socket that is not connected.
    """

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109, the library's own signature
    ) -> ResponseHandler:
        sock = await _connect(Path(self.path))
        try:
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol


async def _connect(path: Path) -> socket.socket:
    delay = _FIRST_RETRY
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise _connect_failure(error) from error
    try:
        sock.setblocking(False)
        while True:
            if not is_own_socket(path):
                raise OwnerGoneError(may_have_run=False)
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY)
            except OSError as error:
                raise _connect_failure(error) from error
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _connect_failure(error: OSError) -> Exception:
    if error.errno in _OUT_OF_DESCRIPTORS:
        return OutOfDescriptorsError(str(error))
    if error.errno in NOBODY_LISTENS:
        return OwnerGoneError(may_have_run=False)
    return NoReplyError(str(error))


class _VerbatimRequest(aiohttp.ClientRequest):
    """A request with the headers it is given and no others, in their order; only the framing may be added."""

    def update_headers(self, headers: Any) -> None:
        self.headers = CIMultiDict(headers)

    def update_body_from_data(self, body: Any, _stacklevel: int = 3) -> None:
        if body is None:
            self._body = None
        else:
            super().update_body_from_data(body, _stacklevel)

    def update_transfer_encoding(self) -> None:
        if self.chunked and hdrs.TRANSFER_ENCODING not in self.headers:
            self.headers[hdrs.TRANSFER_ENCODING] = "chunked"

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
    ) -> None:
        # The library holds the headers back until the body begins; the owner may reply before that.
        if not isinstance(self._body, aiohttp.BytesPayload):
            writer.send_headers()
        await super().write_bytes(writer, conn, content_length)


async def _send_once(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    # The library sends a GET again, on its own account, when a connection breaks. Handlers here have state.
    try:
        return await handler(request)
    except aiohttp.ClientError as error:
        raise NoReplyError(str(error) or type(error).__name__) from error


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


async def _exchange(pool: _Pool, scope: Scope, body: _RequestBody, send: Send) -> None:
    path, query = request_target(scope)
    # The framing of the body stays as the client announced it, for the owner's handler may look at it.
    headers = end_to_end_headers(scope["headers"], keep=b"transfer-encoding")
    sent = [(name, value) for name, value in headers if name != HOP_HEADER]
    sent.append((HOP_HEADER, describe_origin(scope)))
    data = await body.payload()
    try:
        response = await pool.session.request(
            scope["method"],
            URL.build(scheme="http", host="localhost", path=path, query_string=query, encoded=True),
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent],
            data=data,
            allow_redirects=False,
        )
    except NoReplyError as error:
        if not body.client_gone and not await _still_listens(pool.path):
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


async def _still_listens(path: Path) -> bool:
    """Tell whether the owner takes connections. A dying process may do so for an instant: it is asked twice."""
    if not is_listening(path):
        return False
    await asyncio.sleep(_LAST_RETRY)
    return is_listening(path)
