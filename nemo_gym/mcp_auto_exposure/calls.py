"""A tool call over MCP is the plain request it stands for, made in this process.

The request goes through the application's own middleware and routing, as one that arrived over a socket would: same
validation, same dependencies, same errors. Only its session cookie is made here, from the MCP session token.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import anyio
from starlette.types import ASGIApp, Message, Scope

from nemo_gym.mcp_auto_exposure.tokens import TOKEN_HEADER
from nemo_gym.session_routing import route_path

_JSON: Final = b"application/json"
# What belongs to the MCP request itself and means nothing, or something else, to the tool's route.
_NOT_PASSED_ON: Final = frozenset(
    {b"accept", b"accept-encoding", b"connection", b"content-encoding", b"content-length", b"content-type", b"cookie",
     b"expect", b"last-event-id", b"te", b"trailer", b"transfer-encoding", b"upgrade", TOKEN_HEADER.lower().encode()}
)  # fmt: skip
_MCP_HEADERS: Final = b"mcp-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool's route answered.

    Attributes:
        status: The HTTP status.
        headers: The headers, names in lower case.
        body: The whole body.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def header(self, name: bytes) -> str:
        """Return the first value of a header; empty where there is none."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")


_BROKEN_OFF: Final = ToolReply(
    502, ((b"content-type", _JSON),), b'{"detail": "The tool broke off its reply; it may have run."}'
)


class RouteCalls:
    """The calls that one MCP request makes; each lasts until what it does after its reply is done too.

    Args:
        app: The application, from its session middleware inwards.
        scope: The MCP request, whose address, headers and state the calls take over.
    """

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._app = app
        self._scope = dict(scope)
        self._running: set[_Call] = set()
        self._answered = asyncio.Event()

    async def post(self, path: str, arguments: Mapping[str, Any], cookie: str) -> ToolReply:
        """Post `arguments` to a route and return its reply, once, as soon as it is complete.

        Args:
            path: The route.
            arguments: The JSON body.
            cookie: The session cookie, as `name=value`.

        Raises:
            ValueError: If the arguments can't be written as JSON.
        """
        body = json.dumps(arguments).encode()
        call = _Call(self._app, _scope_of_call(self._scope, path, len(body), cookie), body, self._answered)
        self._running.add(call)
        call.task.add_done_callback(lambda _: self._running.discard(call))
        try:
            return await call.reply
        except asyncio.CancelledError:
            call.cancel()
            # The handler decides when it has ended, as it does when a plain request's client goes away.
            with anyio.CancelScope(shield=True):
                await asyncio.wait({call.task})
            raise

    def answered(self) -> None:
        """Let the calls go on after their replies: the MCP request has its answer."""
        self._answered.set()

    async def ended(self) -> None:
        """Return when no call is running."""
        while self._running:
            await asyncio.wait({call.task for call in self._running})

    async def cancel(self) -> None:
        """Cancel what is still running, and return when it has ended."""
        self.answered()
        for call in self._running:
            call.cancel()
        with anyio.CancelScope(shield=True):
            await self.ended()


def _scope_of_call(scope: Scope, path: str, length: int, cookie: str) -> Scope:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in _NOT_PASSED_ON and not name.lower().startswith(_MCP_HEADERS)
    ]
    headers += [
        (b"content-type", _JSON),
        (b"content-length", str(length).encode()),
        (b"cookie", cookie.encode("latin-1")),
    ]
    full_path = scope["path"].removesuffix(route_path(scope)) + path
    return {
        **scope,
        "method": "POST",
        "path": full_path,
        "raw_path": quote(full_path).encode(),
        "query_string": b"",
        "headers": headers,
        # The server's extensions are about its own connection.
        "extensions": {},
        "state": dict(scope.get("state", {})),
    }


class _Call:
    """One request within the process: its task, and the reply that gathers.

    Args:
        app: The application.
        scope: The request.
        body: Its body.
        answered: Set when the reply has reached the client.
    """

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, answered: asyncio.Event) -> None:
        self.reply: asyncio.Future[ToolReply] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        self._answered = answered
        self._over = asyncio.Event()
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._is_cancelled = False
        self.task = asyncio.create_task(self._run(app, scope), name=f"mcp call of {scope['path']}")

    def cancel(self) -> None:
        """Cancel the handler, once: a second time would break off how it ends."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            # What passes even the error replies; a server would log it and answer so.
            logger.exception("%s failed", scope["path"])
            self._finish(ToolReply(500, ((b"content-type", b"text/plain"),), b"Internal Server Error"))
        finally:
            self._finish(_BROKEN_OFF)
            self._over.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None and not self.reply.done():
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                headers = tuple((name.lower(), value) for name, value in self._start.get("headers", ()))
                self._finish(ToolReply(self._start["status"], headers, b"".join(self._parts)))
                # Background tasks begin when the client has its reply, not before.
                await self._answered.wait()
                self._over.set()

    def _finish(self, reply: ToolReply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)
