"""What exposure changes in the plain routes: `/seed_session` hands out the token, `/verify` sees bare tool names."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping
from typing import Any, Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.mcp_auto_exposure.bodies import read_body, replayed
from nemo_gym.mcp_auto_exposure.tokens import TOKEN_HEADER, token_for_session
from nemo_gym.server.middleware import SESSION_ID_KEY
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import route_path
from nemo_gym.tool_names import normalize_tool_name

MCP_PATH: Final = "/mcp"
TRANSPORT: Final = "streamable_http"
REPLY_KEY: Final = "mcp"
"""The field of the `/seed_session` reply that tells how to reach the session's tools over MCP."""

logger = logging.getLogger(__name__)


class NarrowsTools(Protocol):
    """What narrows the tools of one session."""

    def mcp_allowed_tools_for_session(
        self, seed_body: dict[str, Any]
    ) -> Iterable[str] | Awaitable[Iterable[str] | None] | None:
        """Return the names of the tools that a new session may use; None for all."""
        ...


class SessionRepliesMiddleware:
    """Completes the replies of `/seed_session`, and reads the requests of `/verify`. Stands innermost.

    Args:
        app: The application within.
        server: Narrows the tools of a session.
        server_name: The resources server's instance name.
        tools: Names of all tools.
        serializer: Signs the tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        server: NarrowsTools,
        server_name: str,
        tools: Collection[str],
        serializer: SessionSerializer,
    ) -> None:
        self.app = app
        self._server = server
        self._name = server_name
        self._tools = frozenset(tools)
        self._serializer = serializer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path = route_path(scope)
            if path == "/seed_session":
                await self._seed(scope, receive, send)
                return
            if path == "/verify":
                await self._verify(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _seed(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        start: Message = {}
        parts: list[bytes] = []

        async def completed_send(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    reply = b"".join(parts)
                    if 200 <= start["status"] < 300:
                        reply = await self._with_access(scope, body, reply)
                    await send({**start, "headers": _with_length(start.get("headers", ()), len(reply))})
                    await send({"type": "http.response.body", "body": reply})
            else:
                await send(message)

        await self.app(scope, replayed(body, receive), completed_send)

    async def _with_access(self, scope: Scope, body: bytes, reply: bytes) -> bytes:
        """Return the seed reply with what an MCP client needs, and otherwise to the byte as it was."""
        fields = _parse(reply)
        problem = ""
        if not isinstance(fields, dict):
            problem = "is no JSON object"
        elif REPLY_KEY in fields:
            problem = f"has a field '{REPLY_KEY}' of its own"
        elif SESSION_ID_KEY not in scope["session"]:
            problem = "has taken the id out of the session"
        if problem:
            logger.warning("%s: the reply of /seed_session %s, so there is no MCP session token", self._name, problem)
            return reply
        tools = await self._allowed_tools(body)
        routing = getattr(scope["app"].state, "session_routing", None)
        token = token_for_session(scope["session"], tools, routing and routing.worker_id)
        access = {
            "server_name": self._name,
            "url_path": scope.get("root_path", "") + MCP_PATH,
            "transport": TRANSPORT,
            "headers": {TOKEN_HEADER: self._serializer.dumps(token.payload())},
        }
        written = reply.rstrip().removesuffix(b"}").rstrip()
        separator = b"," if fields else b""
        return written + separator + json.dumps({REPLY_KEY: access}, separators=(",", ":")).encode()[1:]

    async def _allowed_tools(self, body: bytes) -> frozenset[str] | None:
        fields = _parse(body)
        found = self._server.mcp_allowed_tools_for_session(fields if isinstance(fields, dict) else {})
        allowed = await found if inspect.isawaitable(found) else found
        if allowed is None:
            return None
        names = frozenset(allowed)
        if unknown := names - self._tools:
            raise ValueError(f"mcp_allowed_tools_for_session names no tools of {self._name}: {sorted(unknown)}")
        return names

    async def _verify(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        if b"mcp__" in body:
            body = self._with_bare_names(body)
            scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
        await self.app(scope, replayed(body, receive), send)

    def _with_bare_names(self, body: bytes) -> bytes:
        """Return a verify request with this server's tools called by their own names."""
        request = _parse(body)
        try:
            output = request["response"]["output"]
        except (TypeError, KeyError):
            return body
        for item in output if isinstance(output, list) else ():
            if isinstance(item, Mapping) and isinstance(item.get("name"), str):
                item["name"] = normalize_tool_name(item["name"], self._name)  # type: ignore[index]
        return json.dumps(request).encode()


def _parse(body: bytes) -> Any:
    """Return what a body says, with numbers of any size and NaN as FastAPI reads them; None where it is no JSON."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError):
        return None


def _with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    return [*(it for it in headers if it[0].lower() != b"content-length"), (b"content-length", str(length).encode())]
