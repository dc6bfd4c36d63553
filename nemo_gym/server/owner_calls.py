"""Calls straight to the worker that owns a session: its private socket instead of the shared port.

A session cookie names its worker; whoever has it can read that, though not verify it. Where the server runs on this
machine as this user, `socket_records` tells the directory of its workers' sockets, and the call is written to the
named one. A POST without a session is written to the worker that `new_sessions` chooses. This is a transport and
nothing else: the worker decides on the request as on one of the shared port (verifies the cookie, places a new
session, forwards what is another's, answers 410), so a wrong or forged name changes only the way.

Failure policy: as long as nothing was sent (no record, no such socket, refused, a full backlog) the call goes to the
shared port, which says what is to be said. A call that was sent is never sent again; when its connection breaks
before the reply, the caller gets what the router would have answered: 410 where the worker is gone, else 502.
"""

from __future__ import annotations

import functools
import http
import logging
import os
import socket
import time
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import orjson
from aiohttp.client_middlewares import ClientHandlerType
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.http import StreamWriter
from aiohttp.tracing import Trace
from starlette.responses import Response
from yarl import URL

from nemo_gym.server.new_sessions import SESSIONLESS_PATHS, NewSessions
from nemo_gym.server.socket_records import read_socket_dir
from nemo_gym.session_routing import SESSION_OWNER_KEY, LostReason, lost_session_reply
from nemo_gym.session_routing.hop import HOP_HEADER
from nemo_gym.session_routing.loads_file import SLOTS
from nemo_gym.session_routing.lost import no_reply
from nemo_gym.session_routing.ownership import is_worker_id
from nemo_gym.session_routing.private_socket import is_own_socket, still_listens

_CACHED_COOKIES: Final = 1024
_LONGEST_COOKIE: Final = 4096  # characters; together with the count it bounds the cache to a few MB
_FIRST_PAUSE_S: Final = 1.0  # between two looks for a record, doubled up to the last while they find nothing new
_LAST_PAUSE_S: Final = 60.0
_SMALL_BODY: Final = 32 * 1024  # bytes
_HOP_HEADER: Final = HOP_HEADER.decode("ascii")
_MADE_HERE: Final = "made here"

logger = logging.getLogger(__name__)


class OwnerNotReachedError(Exception):
    """Raised when a worker's socket takes no connection; nothing was sent."""


def named_owner(cookie: str) -> str | None:
    """Return the worker that a session cookie names, unverified; None where it names none.

    Args:
        cookie: The cookie's value: a session in base64, then a date and a signature.
    """
    try:
        session = orjson.loads(b64decode(cookie.partition(".")[0]))
    except ValueError:
        return None
    owner = session.get(SESSION_OWNER_KEY) if isinstance(session, dict) else None
    return owner if is_worker_id(owner) else None


class OwnerSockets:
    """The sockets of one server's workers, as far as they are known here.

    Args:
        server_name: The server; its session cookie's name ends with it.
        host: Its host as the configuration has it.
        port: Its port.
        url: Its base address.
    """

    def __init__(self, server_name: str, host: str, port: int, url: str) -> None:
        self.url = url
        self._cookie_name_ends = f"___{server_name}="
        self._recorded_as = (host, port)
        self._origin = (URL(url).raw_host, URL(url).port)
        self._sessionless = frozenset(url + path for path in SESSIONLESS_PATHS)
        self._begins = BeginningWay(self)
        self._socket_dir: str | None = None
        self._new_sessions: NewSessions | None = None
        self._next_look = 0.0
        self._pause = _FIRST_PAUSE_S
        self._way_to = functools.lru_cache(SLOTS)(self._new_way_to)
        self._way_of_cookie = functools.lru_cache(_CACHED_COOKIES)(self._read)

    def way_of(self, method: str, url: str, headers: Mapping[str, str]) -> OwnerWay | BeginningWay | None:
        """Return the way straight to the owner of a request's session; None where the shared port is to take it.

        Args:
            method: The request's method.
            url: Its address.
            headers: Its headers.
        """
        cookies = ""
        for name, value in headers.items():
            lowered = name.lower()
            if lowered == "cookie":
                cookies = value
            elif lowered == _HOP_HEADER:
                return None
        begin = cookies.rfind(self._cookie_name_ends)
        if begin < 0:
            return self._begins if method == "POST" and self._begins_straight(url) else None
        begin += len(self._cookie_name_ends)
        end = cookies.find(";", begin)
        value = cookies[begin:] if end < 0 else cookies[begin:end]
        way = self._way_of_cookie(value) if len(value) <= _LONGEST_COOKIE else None
        if way is not None and self._socket_dir is None:
            self.look_again()
        return way if self._socket_dir is not None else None

    def path_of(self, owner: str) -> str | None:
        """Return where a worker's socket would be; None where no directory is known."""
        return f"{self._socket_dir}/{owner}" if self._socket_dir else None

    def choose(self) -> tuple[NewSessions, OwnerWay] | None:
        """Return the way of a new session, with what counts it; None where the shared port is to take it."""
        new_sessions = self._new_sessions
        worker = new_sessions.choose() if new_sessions is not None else None
        if new_sessions is None or worker is None:
            self.look_again()
            return None
        return new_sessions, self._way_to(worker)

    def look_again(self) -> None:
        """Read the server's record, unless that was just done: a server that was started anew has a new directory."""
        now = time.monotonic()
        if now < self._next_look:
            return
        before = self._socket_dir, self._new_sessions
        found = read_socket_dir(*self._recorded_as)
        self._socket_dir = os.fspath(found) if found is not None else None
        if self._socket_dir != before[0]:
            self._new_sessions = None
        if found is not None and self._new_sessions is None:
            self._new_sessions = NewSessions.at(found)
        has_changed = before != (self._socket_dir, self._new_sessions)
        self._pause = _FIRST_PAUSE_S if has_changed else min(2 * self._pause, _LAST_PAUSE_S)
        self._next_look = now + self._pause

    def not_reached(self, worker: str) -> None:
        """Note that a worker's socket took no connection."""
        if self._new_sessions is not None:
            self._new_sessions.leave_out(worker)
        self.look_again()

    def _begins_straight(self, url: str) -> bool:
        if url.partition("?")[0] in self._sessionless:
            return False
        if self._new_sessions is None:
            self.look_again()
        return self._new_sessions is not None

    def _read(self, cookie: str) -> OwnerWay | None:
        owner = named_owner(cookie)
        return self._new_way_to(owner) if owner is not None else None

    def _new_way_to(self, worker: str) -> OwnerWay:
        return OwnerWay(self, worker, self._origin)


@dataclass(frozen=True, slots=True)
class OwnerWay:
    """The way straight to one worker, as a middleware of the HTTP client.

    Attributes:
        sockets: The sockets of its server.
        owner: The worker.
        origin: The server's host and port as they stand in its URLs: a redirect may lead elsewhere.
    """

    sockets: OwnerSockets
    owner: str
    origin: tuple[str | None, int | None]

    async def __call__(self, request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        """Send `request` straight to the worker, or by the shared port where nothing could be sent."""
        assert isinstance(request, OwnerRequest)
        path = self.sockets.path_of(self.owner)
        if path is None or request.proxy is not None or (request.url.raw_host, request.url.port) != self.origin:
            return await handler(request)
        request.socket_path = path
        try:
            return await handler(request)
        except OwnerNotReachedError as error:
            logger.debug("%s: %s; going by the shared port", path, error)
        except aiohttp.ServerTimeoutError:
            raise
        except aiohttp.ClientConnectionError as error:
            if not request.was_sent or request.session.closed:
                raise
            logger.warning("%s %s: worker %s gave no reply: %r", request.method, request.url, self.owner, error)
            request.reply = await _last_words(Path(path))
            return await handler(request)
        request.socket_path = None
        self.sockets.not_reached(self.owner)
        return await handler(request)


@dataclass(frozen=True, slots=True)
class BeginningWay:
    """The way straight to the worker that a new session is to begin at, as a middleware of the HTTP client.

    Attributes:
        sockets: The sockets of its server.
    """

    sockets: OwnerSockets

    async def __call__(self, request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        """Send `request` straight to a worker, or by the shared port where there is none to choose."""
        chosen = self.sockets.choose() if request.method == "POST" else None
        if chosen is None:
            return await handler(request)
        new_sessions, way = chosen
        new_sessions.sent(way.owner)
        try:
            return await way(request, handler)
        finally:
            new_sessions.answered(way.owner)


async def _last_words(path: Path) -> Response:
    """Return what the router would have said of a worker that took a request and gave no reply."""
    if await still_listens(path):
        return no_reply()
    return lost_session_reply(LostReason.WORKER_GONE, may_have_run=True)


class OwnerRequest(aiohttp.ClientRequest):
    """A request that may go to a worker's socket, or have its reply made here.

    Attributes:
        socket_path: The socket; None for the address in the URL.
        was_sent: Whether any of it may have been sent.
        reply: What is to come back instead of another server's reply.
    """

    socket_path: str | None = None
    was_sent = False
    reply: Response | None = None

    @property
    def connection_key(self) -> ConnectionKey:
        """What the connections that this request can use have in common: the socket, too."""
        end = self.socket_path if self.reply is None else _MADE_HERE
        if end is None:
            return super().connection_key
        return ConnectionKey(self.host, self.port, False, True, None, None, None, server_hostname=end)

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        """Send the request on a connection, or let the reply that was made here come back on it."""
        protocol = conn.protocol
        assert protocol is not None
        writer = StreamWriter(protocol, self.loop)
        if self.reply is not None:
            protocol.force_close()
            protocol.data_received(_on_the_wire(self.reply, with_body=self.method != "HEAD"))
            return self._response(writer)
        self.was_sent = True
        if not self._fits_in_one_write or protocol.writing_paused:
            return await super().send(conn)
        # The library would start a task that writes the body; before Python 3.12 that costs another turn of the loop.
        await writer.write_headers(f"{self.method} {self.url.raw_path_qs} HTTP/1.1", self.headers)
        await self.write_bytes(writer, conn, self._get_content_length())
        return self._response(writer)

    @property
    def _fits_in_one_write(self) -> bool:
        if self.compress or self.chunked or self._continue or self.proxy or self._traces:
            return False
        body = self._body
        return isinstance(body, aiohttp.BytesPayload) and body.size is not None and body.size <= _SMALL_BODY

    def _response(self, writer: StreamWriter) -> aiohttp.ClientResponse:
        return self.response_class(
            self.method,
            self.original_url,
            writer=None,
            continue100=None,
            timer=self._timer,
            request_info=self.request_info,
            traces=self._traces,
            loop=self.loop,
            session=self.session,
            stream_writer=writer,
        )


class OwnerConnector(aiohttp.TCPConnector):
    """Connects to addresses, and to workers' sockets; one pool for both."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109, the library's own signature
    ) -> ResponseHandler:
        assert isinstance(req, OwnerRequest)
        if req.reply is not None:
            return self._factory()
        if req.socket_path is None:
            return await super()._create_connection(req, traces, timeout)
        sock = _connect(Path(req.socket_path))
        try:
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise OwnerNotReachedError(str(error)) from error
            raise
        return protocol


def _connect(path: Path) -> socket.socket:
    """Connect at once or not at all: a full backlog says EAGAIN, which asyncio takes for a connection in progress."""
    if not is_own_socket(path):
        raise OwnerNotReachedError("there is no socket of this user")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise OwnerNotReachedError(str(error)) from error
    try:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise OwnerNotReachedError(str(error)) from error
        raise
    return sock


def _on_the_wire(reply: Response, *, with_body: bool) -> bytes:
    head = f"HTTP/1.1 {reply.status_code} {http.HTTPStatus(reply.status_code).phrase}\r\n".encode("ascii")
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
    return head + fields + b"\r\n" + (bytes(reply.body) if with_body else b"")
