"""The middleware of every server, as pure ASGI: what log lines say, session ids, error replies, clients that leave."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.lazy_module import LazyModule
from nemo_gym.logs import ROLLOUT_HEADER, beginning_of, end_process_log, rollout_id, session_id
from nemo_gym.server.client import public_url
from nemo_gym.session_routing import SESSION_LOST_HEADER, FrontedApp

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = LazyModule("aiohttp")

SESSION_ID_KEY: Final = "session_id"
NEW_SESSION_KEY: Final = "nemo_gym.new_session"
"""The scope key that marks a request which came with no session."""

_SESSIONLESS_PATHS: Final = frozenset({"/health"})
_UPSTREAM_TEXT_LIMIT: Final = 2_000
_LOGGED_TEXT_LIMIT: Final = 200
# Whoever may call a server may send this header: what is no id is none.
_ROLLOUT_ID: Final = re.compile(rb"[A-Za-z0-9_.:\-]{1,64}")
_ROLLOUT_HEADER: Final = ROLLOUT_HEADER.encode()

logger = logging.getLogger(__name__)


class LogContextMiddleware:
    """Let what is logged while a request is handled say which rollout it belongs to. Stands outside all others."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one connection (ASGI). Each has a task, so a context, of its own: nothing is put back at the end."""
        if scope["type"] == "lifespan":
            return self._run_lifespan(scope, receive, send)
        for name, value in scope["headers"]:
            if name == _ROLLOUT_HEADER:
                rollout_id.set(value.decode("ascii") if _ROLLOUT_ID.fullmatch(value) else None)
                break
        else:
            # A request that was waiting on its connection runs in what the one before it has set.
            rollout_id.set(None)
        return self.app(scope, receive, send)

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def ending_send(message: Message) -> None:
            # The process waits for nothing that comes after this message.
            if message["type"].startswith("lifespan.shutdown."):
                end_process_log()
            await send(message)

        await self.app(scope, receive, ending_send)


def put_outermost(app: Starlette, middleware: Callable[[ASGIApp], ASGIApp]) -> None:
    """Put a middleware outside all that an application has so far, a router in front of it included."""
    if isinstance(app, FrontedApp):
        app.put_outermost(middleware)
    else:
        app.add_middleware(middleware)


class SessionIdMiddleware:
    """Give every session an id: 32 hex digits under `SESSION_ID_KEY`, before any handler reads it.

    Stands inside Starlette's `SessionMiddleware`. Health checks start no session.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in _SESSIONLESS_PATHS:
            session = scope["session"]
            if SESSION_ID_KEY not in session:
                session[SESSION_ID_KEY] = uuid4().hex
                scope[NEW_SESSION_KEY] = True
            session_id.set(session[SESSION_ID_KEY])
        await self.app(scope, receive, send)


class ErrorReplyMiddleware:
    """Answer what a handler raised: once in the log with its traceback, and a JSON reply.

    An error answered by another server that the handler called (`raise_for_status`) keeps that server's status
    and text, so that whoever reads the reply sees the cause; a lost session stays a lost session (410).
    A server that can't be reached, or goes away before it has answered, is a 502, and a request still under way
    when this server's grace ends is a 503.
    Anything else is a 500 that names the exception's type but nothing of the server's insides.
    """

    def __init__(self, app: ASGIApp, *, server_name: str) -> None:
        self.app = app
        self.server_name = server_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watching_send)
        except asyncio.CancelledError:
            # The server is stopping and the grace is over, or the client is gone and sees no reply.
            if not started:
                await stopping_reply(self.server_name)(scope, receive, send)
            raise
        except ClientDisconnect:
            logger.info("%s: %s %s: the client went away", self.server_name, scope["method"], scope["path"])
            return
        except aiohttp.ClientResponseError as error:
            logger.warning("%s: %s %s: %s", self.server_name, scope["method"], scope["path"], _one_line(error))
            reply = upstream_error_reply(self.server_name, error)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            logger.warning("%s: %s %s: %r", self.server_name, scope["method"], scope["path"], error)
            detail = f"{self.server_name} lost its connection to another server ({error!r}); its request may have run"
            reply = _json_reply(502, {"detail": detail})
        except Exception as error:
            logger.exception("%s: %s %s failed", self.server_name, scope["method"], scope["path"])
            reply = _json_reply(500, {"detail": f"{type(error).__name__} in {self.server_name}; see its log"})
        else:
            return
        # Once a reply has begun, returning without its end makes the server break off the connection:
        # the client can't take what it got for a whole reply.
        if not started:
            await reply(scope, receive, send)


class DisconnectMiddleware:
    """Cancel a handler whose client has gone away.

    ASGI tells of a client's going only to whoever calls `receive`, so something has to listen while the handler
    works. Listening begins after a short delay: most requests are over by then and pay only for a timer.

    Args:
        app: The application inside.
        delay: Seconds before listening begins.
    """

    def __init__(self, app: ASGIApp, *, delay: float = 0.05) -> None:
        self.app = app
        self.delay = delay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watch = self.watch(scope, receive, send)
        try:
            await self.app(scope, watch.receive, watch.send)
        except asyncio.CancelledError:
            if not watch.stop_cancelling():
                raise
            logger.info("%s %s cancelled: the client went away", scope["method"], scope["path"])
        finally:
            watch.end()

    def watch(self, scope: Scope, receive: Receive, send: Send) -> DisconnectWatch:
        """Return what watches one request; subclasses may return one that sees more of it."""
        return DisconnectWatch(receive, send, self.delay)


class DisconnectWatch:
    """One request's `receive`, shared by the application and a listener that waits for the client's going."""

    def __init__(self, receive: Receive, send: Send, delay: float) -> None:
        self._receive = receive
        self._send = send
        task = asyncio.current_task()
        assert task is not None
        self._handler = task
        self._application_reads = 0
        self._lock = asyncio.Lock()
        self._held: Message | None = None
        self._gone: Message | None = None
        self._answered = False
        self._cancelled_handler = False
        self._listener: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(delay, self._listen)

    async def receive(self) -> Message:
        """Receive the next event, for the application."""
        message = self._take_held()
        if message is not None:
            return message
        self._application_reads += 1
        try:
            async with self._lock:
                message = self._take_held() or self._gone or await self._receive()
        finally:
            self._application_reads -= 1
        if message["type"] == "http.disconnect":
            self._gone = message
        return message

    async def send(self, message: Message) -> None:
        """Send an event, for the application."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            # From here on the server reports the end of the reply as a disconnect.
            self._answered = True
            self.close()
        await self._send(message)

    def stop_cancelling(self) -> bool:
        """Return whether the cancellation now arriving at the handler is ours alone; it then ends here."""
        return self._cancelled_handler and self._handler.uncancel() == 0

    def end(self) -> None:
        """Listen no more, now that the handler is over."""
        if not self._answered:
            self.close()

    def close(self) -> None:
        """Listen no more."""
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
            # The traceback of its end leads back here: a cycle that only the garbage collector would undo.
            self._listener = None

    def _take_held(self) -> Message | None:
        message, self._held = self._held, None
        if message is not None and self._listener is not None and self._listener.done() and not self._answered:
            self._listen()
        return message

    def _listen(self) -> None:
        self._listener = asyncio.get_running_loop().create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        """Read ahead by at most one part of the body, so that an upload keeps its back-pressure."""
        while self._gone is None:
            async with self._lock:
                message = self._gone or await self._receive()
                if message["type"] == "http.disconnect":
                    self._gone = message
                else:
                    self._held = message
            if message.get("more_body", False):
                return
        if self._application_reads == 0 and not self._answered:
            self._cancelled_handler = self._handler.cancel()


def stopping_reply(server_name: str) -> Response:
    """Return the reply to a request that is still under way when its server's grace ends."""
    return _json_reply(503, {"detail": f"{server_name} is stopping; this request may have run"})


def upstream_error_reply(server_name: str, error: aiohttp.ClientResponseError) -> Response:
    """Return the reply for a handler that stopped because another server answered it with an error."""
    body: bytes = getattr(error, "response_content", b"")
    url = public_url(error.request_info.real_url)
    content = {
        "detail": f"{server_name} called {url}, which answered {error.status}: {upstream_text(body, error.message)}",
        "upstream": {"url": url, "status": error.status},
    }
    reason = error.headers.get(SESSION_LOST_HEADER) if error.headers else None
    status = error.status if 400 <= error.status <= 599 else 502
    return _json_reply(status, content, {SESSION_LOST_HEADER: reason} if reason else None)


def upstream_text(body: bytes, otherwise: str) -> str:
    """Return what an error's body says, shortened: its `detail` where it is JSON, else its text."""
    text = body.decode("utf-8", "replace").strip()
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict) and isinstance(parsed.get("detail"), str):
        text = parsed["detail"]
    if len(text) > _UPSTREAM_TEXT_LIMIT:
        text = beginning_of(text, _UPSTREAM_TEXT_LIMIT) + " ..."
    return text or otherwise


def _one_line(error: aiohttp.ClientResponseError) -> str:
    body: bytes = getattr(error, "response_content", b"")
    url = public_url(error.request_info.real_url)
    return f"{url} answered {error.status}: {beginning_of(upstream_text(body, error.message), _LOGGED_TEXT_LIMIT)!r}"


def _json_reply(status: int, content: object, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")
