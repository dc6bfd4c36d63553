"""Connections to one owner: the client library with all that it does on its own account switched off.

Whatever the library would add or change (limits, timeouts, cookies, redirects, decompression, default headers,
repeating a request) is off: a request and its reply pass as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
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

from nemo_gym.session_routing.owner_socket import NoReplyError, connect_to_owner
from nemo_gym.session_routing.private_socket import KEEP_ALIVE, still_listens

_IDLE_SECONDS: Final = KEEP_ALIVE / 4  # the forwarding side must always be the first to close
_NO_LIMIT: Final = 2**30
_AUTOMATIC_HEADERS: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)


class UpgradeRefusedError(Exception):
    """Raised when the owner's application answers the upgrade to a WebSocket with a reply of its own.

    Args:
        reply: That reply, its body not yet read.
    """

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        super().__init__(f"refused with status {reply.status}")
        self.reply = reply


class OwnerWebSocket(aiohttp.ClientWebSocketResponse):
    """A WebSocket to the owner that keeps the reply which opened it.

    Attributes:
        opening: That reply: its headers, and the means to break the connection off without a close frame.
    """

    def __init__(self, reader: Any, writer: Any, protocol: Any, response: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(reader, writer, protocol, response, *args, **kwargs)
        self.opening: aiohttp.ClientResponse = response


class OwnerPool:
    """The connections to one owner.

    A retired pool closes when the last request on it has ended: an owner that takes no new requests may still be
    answering the ones it has.

    Args:
        path: The owner's socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = aiohttp.ClientSession(
            connector=_OwnerConnector(os.fspath(path), limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_VerbatimRequest,
            ws_response_class=OwnerWebSocket,
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
        """Keep the connections open for as long as one request needs them."""
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            if self._retired:
                await self.retire()

    async def retire(self) -> None:
        """Close the connections, now or when the last request on them has ended."""
        self._retired = True
        if not self._in_use:
            await self.session.close()

    async def still_listens(self) -> bool:
        """Tell whether the owner takes connections."""
        return await still_listens(self.path)


class _OwnerConnector(aiohttp.UnixConnector):
    """Connects to an owner's socket, and tells an owner that is gone from one that is busy."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109, the library's own signature
    ) -> ResponseHandler:
        sock = await connect_to_owner(Path(self.path))
        try:
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=sock)
        except BaseException:
            sock.close()
            raise
        return protocol


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
    # The library sends a GET again, on its own account, when a connection breaks. Handlers here have state. And it
    # would close a reply that refuses an upgrade before anyone has read it.
    try:
        reply = await handler(request)
    except aiohttp.ClientError as error:
        raise NoReplyError(str(error) or type(error).__name__) from error
    if hdrs.UPGRADE in request.headers and reply.status != 101:
        raise UpgradeRefusedError(reply)
    return reply
