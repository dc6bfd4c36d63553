"""The hop out in frames: what costs least. The owner's end is `frame_server`.

Life of a connection: it is made when a request finds none idle, serves one request at a time, and waits for the next
(the last one used is the first one taken) until it has been idle for long. The owner closes none before it stops.

Back-pressure: each side of a connection stops reading when it holds more than it has passed on, and the other side
then stops taking in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.session_routing.frames import (
    HEAD,
    FrameProtocol,
    FramesError,
    HeadTooLongError,
    read_head,
    receive_buffer,
)
from nemo_gym.session_routing.hop import describe_origin, end_to_end_headers, offers_body, raw_path_of
from nemo_gym.session_routing.owner_socket import (
    NoReplyError,
    OwnerGoneError,
    ReplyBrokenOffError,
    connect_to_owner,
)
from nemo_gym.session_routing.private_socket import still_listens

_REPLY_FIELDS: Final = 1  # the status
_WHOLE_BODY: Final = 65_536  # bytes; a body up to this size goes out in one write with its head
_IDLE_S: Final = 30.0  # between two looks at what is idle
_WATCH_AFTER_S: Final = 0.05  # a reply that has come by then has spared the watch for the client's leaving


class FrameHop:
    """The way to one owner in frames; see `forwarding.Hop`.

    Args:
        path: The owner's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.buffer = receive_buffer()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._is_retired = False
        self._sweep: asyncio.TimerHandle | None = None
        self._sweeps = 0

    def forward(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Forward one request and send its reply; return early when the client goes away."""
        return _OutgoingExchange(self, scope, receive, send).run()

    async def retire(self) -> None:
        """Close the connections, each when the request on it has ended."""
        self._is_retired = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._idle:
            self._idle.pop().close()

    async def close(self) -> None:
        """Close all connections at once."""
        await self.retire()
        for connection in list(self._open):
            connection.transport.abort()

    async def still_listens(self) -> bool:
        """Tell whether the owner takes connections."""
        return await still_listens(self._path)

    def take_idle(self) -> _Connection | None:
        """Return the connection that was used last, if one is idle."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def connect(self, exchange: _OutgoingExchange) -> _Connection:
        """Return a new connection that gives its reply to `exchange`."""
        sock = await connect_to_owner(self._path, lambda: not exchange.client_left)
        connection = _Connection(self, exchange)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
        except BaseException:
            connection.exchange = None
            sock.close()
            raise
        # Not when it is made: of one whose making is then given up, uvloop never says that it has ended.
        if connection.is_open:
            self._open.add(connection)
        return connection

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection, on which the request and its reply have ended, for the next request."""
        if self._is_retired:
            connection.close()
            return
        connection.idle_since = self._sweeps
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_the_long_idle)

    def ended(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_the_long_idle(self) -> None:
        """Close what has been idle since before the last sweep, so for longer than the time between two."""
        for connection in [idle for idle in self._idle if idle.idle_since < self._sweeps]:
            self._idle.remove(connection)
            connection.close()
        self._sweeps += 1
        self._sweep = None
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_the_long_idle)


class _Connection(FrameProtocol):
    """One connection to the owner: to whom it gives the reply that comes in."""

    def __init__(self, hop: FrameHop, exchange: _OutgoingExchange) -> None:
        super().__init__(hop.buffer)
        self._hop = hop
        self.exchange: _OutgoingExchange | None = exchange
        self.idle_since = 0

    def head_received(self, content: bytes, *, last: bool) -> None:
        exchange = self.exchange
        if exchange is None or exchange.start is not None or last:
            raise FramesError("a head came where none may")
        (status,), headers = read_head(content, _REPLY_FIELDS)
        if not status.isdigit():
            raise FramesError(f"{status!r} is no status")
        headers = end_to_end_headers(headers)
        exchange.start = {"type": "http.response.start", "status": int(status), "headers": headers}
        exchange.notify()

    def body_received(self, piece: bytes, *, last: bool) -> None:
        exchange = self.exchange
        if exchange is None or exchange.start is None or exchange.reply_ended:
            raise FramesError("a body came where none may")
        if piece:
            exchange.pieces.append(piece)
            exchange.held += len(piece)
        exchange.notify()
        if not last:
            self.hold_back(exchange.held)
            return
        exchange.reply_ended = True
        if exchange.is_sent:
            self.exchange = None
            self.read_on()
            self._hop.give_back(self)

    def continue_received(self) -> None:
        if self.exchange is not None:
            self.exchange.body_is_wanted()

    def connection_ended(self) -> None:
        self._hop.ended(self)
        if self.exchange is not None:
            self.exchange.notify()


class _ClientLeftError(Exception):
    """Raised when the client has gone away: nobody waits for the reply."""


class _OutgoingExchange:
    """One request on its way to the owner, and its reply on the way back."""

    __slots__ = (
        "_connection", "_failure", "_hop", "_loop", "_news", "_receive", "_scope", "_send", "_wanted", "_watch",
        "client_left", "held", "is_sent", "pieces", "reply_ended", "start",
    )  # fmt: skip

    def __init__(self, hop: FrameHop, scope: Scope, receive: Receive, send: Send) -> None:
        self._hop = hop
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._watch: asyncio.Task[None] | asyncio.TimerHandle | None = None
        self._wanted: asyncio.Event | None = None
        self._news: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self.start: Message | None = None
        self.pieces: list[bytes] = []
        self.held = 0
        self.reply_ended = self.client_left = self.is_sent = False

    async def run(self) -> None:
        """Forward the request and send the reply.

        Raises:
            OwnerGoneError: Before anything was sent to the client.
            NoReplyError: Before anything was sent to the client.
            OutOfDescriptorsError: Before anything was sent to the client.
            ReplyBrokenOffError: After the reply had begun.
        """
        try:
            body = await self._small_body()
            if body is not None:
                self._watch = self._loop.call_later(_WATCH_AFTER_S, self._watch_client)
            connection = self._hop.take_idle() or await self._hop.connect(self)
            connection.exchange = self
            self._connection = connection
            self._write_request(connection, body)
            while self.start is None:
                await self._more(connection)
            await self._send(self.start)
            # From here on the server that took the request asks the client for no body; one may come all the same.
            self.body_is_wanted()
            await self._relay(connection)
        except _ClientLeftError:
            return
        except NoReplyError:
            if not self.client_left:
                raise
        except HeadTooLongError as error:
            refusal = JSONResponse({"detail": str(error)}, status_code=431)
            await refusal(self._scope, self._receive, self._send)
        finally:
            if self._watch is not None:
                self._watch.cancel()
                # It keeps this alive, and this would keep it: until the collector runs, with what was uploaded last.
                self._watch = None
            if self._connection is not None and self._connection.exchange is self:
                self._connection.exchange = None
                self._connection.transport.abort()

    def body_is_wanted(self) -> None:
        """Ask the client for the body that it has only offered."""
        if self._wanted is not None:
            self._wanted.set()

    def notify(self) -> None:
        """Let the reply's sender look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _small_body(self) -> bytes | None:
        """Return the body if it is small and on its way, empty where there is none; None where it must be streamed."""
        headers = dict(self._scope["headers"])
        length = headers.get(b"content-length", b"0")
        size = int(length) if length.isdigit() else 0
        if not size and b"transfer-encoding" not in headers and self._scope.get("http_version", "1.1") < "2":
            return b""
        if b"expect" in headers and offers_body(self._scope["headers"]):
            self._wanted = asyncio.Event()
            return None
        if not 0 < size <= _WHOLE_BODY:
            return None
        body, more = self._piece_of(await self._receive())
        while more:
            piece, more = self._piece_of(await self._receive())
            body += piece
        return body

    def _piece_of(self, message: Message) -> tuple[bytes, bool]:
        if message["type"] == "http.disconnect":
            self.client_left = True
            raise _ClientLeftError
        return message.get("body", b""), message.get("more_body", False)

    def _write_request(self, connection: _Connection, body: bytes | None) -> None:
        scope = self._scope
        fields = (describe_origin(scope), scope["method"].encode("latin-1"), raw_path_of(scope), scope["query_string"])
        headers = end_to_end_headers(scope["headers"], keep=b"transfer-encoding")
        if body is None:
            connection.write_head(HEAD, fields, headers)
            self._watch = self._loop.create_task(self._upload(connection))
        else:
            connection.write_whole(fields, headers, body)
            self.is_sent = True

    async def _upload(self, connection: _Connection) -> None:
        """Pass the body on piece by piece, and then watch for the client's leaving."""
        try:
            if self._wanted is not None:
                await self._wanted.wait()
            more = True
            while more:
                piece, more = self._piece_of(await self._receive())
                await connection.drained(len(piece))
                if not connection.is_open:
                    return
                connection.write_body(piece, last=not more)
                del piece
            self.is_sent = True
        except Exception as error:  # noqa: BLE001, whatever the client's side raises is the request's failure
            self._give_up(error)
        else:
            await self._client_leaves()

    def _watch_client(self) -> None:
        self._watch = self._loop.create_task(self._client_leaves())

    async def _client_leaves(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception as error:  # noqa: BLE001, whatever the client's side raises is the request's failure
            self._give_up(error)
        else:
            self.client_left = True
            self._give_up(_ClientLeftError())

    def _give_up(self, failure: Exception) -> None:
        """Break the request off, which tells the owner, too."""
        self._failure = failure
        if self._connection is not None and not self.reply_ended:
            self._connection.transport.abort()
        self.notify()

    async def _relay(self, connection: _Connection) -> None:
        """Send the reply's body as it comes in."""
        more = True
        while more:
            while not self.pieces and not self.reply_ended:
                await self._more(connection)
            body = self.pieces.pop(0) if self.pieces else b""
            self.held -= len(body)
            more = not self.reply_ended or bool(self.pieces)
            # When the reply has ended the connection may be another request's.
            if not self.pieces and connection.exchange is self:
                connection.read_on()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _more(self, connection: _Connection) -> None:
        """Return when more of the reply is there."""
        if self._failure is not None:
            raise self._failure
        if connection.is_open:
            self._news = self._loop.create_future()
            await self._news
        elif self.start is not None:
            raise ReplyBrokenOffError("the session's worker was lost in the middle of its reply")
        elif await self._hop.still_listens():
            raise NoReplyError("the connection ended")
        else:
            raise OwnerGoneError(may_have_run=True)
