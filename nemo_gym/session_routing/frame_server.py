"""The hop in, in frames: the requests that other workers forward to this one, each run as it would be here.

Life of a connection: the forwarding worker opens and closes it; this side closes it only when it stops, when it gets
what is no frame, or when an application leaves its reply unfinished, which must never look complete.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from nemo_gym.session_routing.frames import HEAD, FrameProtocol, FramesError, read_head
from nemo_gym.session_routing.hop import offers_body, read_origin

REQUEST_FIELDS: Final = 4
"""What stands before the headers in a request's head: origin, method, raw path, query."""

_INTERNAL_ERROR: Final = b"Internal Server Error"
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")

logger = logging.getLogger(__name__)


class FrameServer(FrameProtocol):
    """One connection from another worker.

    Args:
        app: The application.
        state: The lifespan's state, which each request gets a copy of.
        server_state: The private server's, which keeps the connections and the tasks that its stop waits for.
        buffer: See `FrameProtocol`.
    """

    def __init__(self, app: ASGIApp, state: dict[str, Any], server_state: ServerState, buffer: memoryview) -> None:
        super().__init__(buffer)
        self._app = app
        self._state = state
        self._connections: set[Any] = server_state.connections
        self._tasks = server_state.tasks
        self._loop = asyncio.get_running_loop()
        self._exchange: _IncomingExchange | None = None
        self._is_stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        super().connection_made(transport)
        self._connections.add(self)

    def head_received(self, content: bytes, *, last: bool) -> None:
        """Run the request."""
        if self._exchange is not None:
            raise FramesError("a request began before the last one had ended")
        (origin, method, raw_path, query), headers = read_head(content, REQUEST_FIELDS)
        try:
            described = read_origin(origin)
        except ValueError as error:
            raise FramesError(str(error)) from error
        path = raw_path.decode("latin-1")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": method.decode("latin-1"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": self._state.copy(),
            **described,
        }
        self._exchange = _IncomingExchange(self, scope, body_ended=last)
        task = self._loop.create_task(self._exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def body_received(self, piece: bytes, *, last: bool) -> None:
        """Hold a piece of the body until the application takes it; what comes after the reply is dropped."""
        if self._exchange is not None:
            self.hold_back(self._exchange.take_in(piece, last=last))

    def exchange_ended(self) -> None:
        """Be ready for the next request."""
        self._exchange = None
        self.read_on()
        if self._is_stopping:
            self.close()

    def connection_ended(self) -> None:
        """Tell the application that the client has gone away."""
        self._connections.discard(self)
        if self._exchange is not None:
            self._exchange.disconnect()

    def shutdown(self) -> None:
        """Close the connection, at once or when the reply in progress has ended. The private server calls it."""
        self._is_stopping = True
        if self._exchange is None:
            self.close()


class _IncomingExchange:
    """One request and its reply: what the application's `receive` and `send` do."""

    __slots__ = (
        "_body_asked_for", "_body_ended", "_connection", "_disconnected", "_held", "_news", "_pieces", "_replied",
        "_reported", "_scope", "_started",
    )  # fmt: skip

    def __init__(self, connection: FrameServer, scope: Scope, *, body_ended: bool) -> None:
        self._connection = connection
        self._scope = scope
        self._pieces: list[bytes] = []
        self._held = 0
        self._body_ended = body_ended
        self._reported = False
        self._disconnected = self._started = self._replied = False
        self._news: asyncio.Event | None = None
        self._body_asked_for = body_ended

    async def run(self, app: ASGIApp) -> None:
        """Run the application to its end. A reply that it leaves unfinished is broken off."""
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            # The private server's stop has no time left. A closed connection says that, a reply would not.
            self._connection.close()
            return
        except Exception:
            logger.exception("the application failed at %s %s", self._scope["method"], self._scope["path"])
        else:
            if not self._replied and not self._disconnected:
                logger.error("the application left %s %s unanswered", self._scope["method"], self._scope["path"])
        if self._replied or self._disconnected:
            return
        if self._started:
            self._connection.close()
        else:
            headers = [_TEXT, (b"content-length", b"%d" % len(_INTERNAL_ERROR))]
            await self.send({"type": "http.response.start", "status": 500, "headers": headers})
            await self.send({"type": "http.response.body", "body": _INTERNAL_ERROR})

    def take_in(self, piece: bytes, *, last: bool) -> int:
        if self._body_ended:
            raise FramesError("a body went on after its end")
        if piece:
            self._pieces.append(piece)
            self._held += len(piece)
        self._body_ended = last
        self._notify()
        return self._held

    def disconnect(self) -> None:
        self._disconnected = True
        self._notify()

    async def receive(self) -> Message:
        while not (self._disconnected or self._replied):
            if self._pieces or (self._body_ended and not self._reported):
                body = self._pieces.pop(0) if self._pieces else b""
                self._held -= len(body)
                more = not self._body_ended or bool(self._pieces)
                self._reported = not more
                if not self._pieces:
                    self._connection.read_on()
                return {"type": "http.request", "body": body, "more_body": more}
            if not self._body_asked_for:
                self._ask_for_body()
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        connection = self._connection
        size = len(message.get("body", b""))
        if connection.must_wait(size):
            await connection.drained(size)
        if self._disconnected:
            return
        expected = "http.response.body" if self._started else "http.response.start"
        if self._replied or message["type"] != expected:
            raise RuntimeError(f"the application sent {message['type']!r} when {expected!r} was to come")
        if not self._started:
            connection.write_head(HEAD, (b"%d" % message["status"],), list(message.get("headers", ())))
            self._started = self._body_asked_for = True
            return
        last = not message.get("more_body", False)
        body = message.get("body", b"") if self._scope["method"] != "HEAD" else b""
        if body or last:
            connection.write_body(body, last=last)
        if last:
            self._replied = True
            self._notify()
            connection.exchange_ended()

    def _ask_for_body(self) -> None:
        self._body_asked_for = True
        if offers_body(self._scope["headers"]):
            self._connection.write_continue()

    def _notify(self) -> None:
        if self._news is not None:
            self._news.set()
