"""The endpoint `/mcp`: the official SDK behind it, and around the SDK what Gym's sessions need.

Every request stands by itself: the SDK keeps no session, so any worker answers any request of any protocol version.
The `Mcp-Session-Id` that `initialize` hands out is remembered nowhere; it only tells the request ids of one client
from those of another, so that a cancellation hits the right call.

This module needs the extra `mcp`; nothing else of nemo_gym imports the SDK.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol
from uuid import uuid4

import anyio
from mcp.server import Server, ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, Tool
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym import __version__
from nemo_gym.mcp_auto_exposure.bodies import read_body, replayed
from nemo_gym.mcp_auto_exposure.calls import RouteCalls, ToolReply
from nemo_gym.mcp_auto_exposure.direct import answer, tool_call_in
from nemo_gym.mcp_auto_exposure.harvest import MCPTool
from nemo_gym.mcp_auto_exposure.hosts import AllowedHosts
from nemo_gym.mcp_auto_exposure.keep_alive import KEEP_ALIVE_S, KeptAlive
from nemo_gym.mcp_auto_exposure.results import error_result, result_of
from nemo_gym.mcp_auto_exposure.tokens import (
    TOKEN_HEADER,
    ExpiredTokenError,
    InvalidTokenError,
    SessionToken,
    read_token,
)
from nemo_gym.server.middleware import stopping_reply
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import (
    SESSION_OWNER_KEY,
    LostReason,
    jsonrpc_error_reply,
    lost_session_reply,
    read_token_header,
)

_METHODS: Final = "POST, DELETE, OPTIONS"
_SESSION_ID_HEADER: Final = b"mcp-session-id"
_CANCELLED: Final = "notifications/cancelled"
_INITIALIZE: Final = "initialize"
_EXCHANGE_KEY: Final = "nemo_gym.mcp_exchange"
# A tool's plain route has no limit either.
_NO_LIMIT: Final = 2**62

_CLIENT_CLOSED_REQUEST: Final = 499
_WROTE_SESSION: Final = (
    "The tool '{}' keeps state in request.session. That is the session cookie, which MCP clients do not carry, so what "
    "it wrote is lost. Its server has to keep such state itself, by session id."
)

_CallKey = tuple[str, str, str | int | None]

logger = logging.getLogger(__name__)


class SignsSessions(Protocol):
    """What the endpoint needs of a server."""

    def get_session_middleware_key(self) -> str:
        """Return the session cookie's name."""
        ...

    def sign_session(self, session: Mapping[str, Any]) -> str:
        """Return the session cookie's value for a session."""
        ...


@dataclass(slots=True)
class _Exchange:
    """One HTTP request at the endpoint, for the handlers that the SDK calls with it.

    Attributes:
        token: What the request's token says, or why it gives no access.
        mcp_session_id: The client's `Mcp-Session-Id`; empty where it sent none.
        calls: The calls of tools that it makes.
        has_called: Whether it has come as far as to call one.
    """

    token: SessionToken | InvalidTokenError
    mcp_session_id: str
    calls: RouteCalls
    has_called: bool = False


class MCPEndpoint:
    """Answers everything at `/mcp`.

    Args:
        server: The resources server.
        server_name: Its instance name, which clients see.
        tools: The tools to serve.
        serializer: Reads the session tokens.
        hosts: Who may address the endpoint.
        errors_as_jsonrpc: Whether a lost session is told as a JSON-RPC error instead of a plain 410.
        keep_alive_s: Seconds without a sign of life, at most, while a client waits for a slow tool.
    """

    def __init__(
        self,
        server: SignsSessions,
        server_name: str,
        tools: Sequence[MCPTool],
        serializer: SessionSerializer,
        hosts: AllowedHosts,
        *,
        errors_as_jsonrpc: bool = False,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._server = server
        self._name = server_name
        self._tools = {tool.name: tool for tool in tools}
        self._listed = [
            Tool(name=tool.name, description=tool.description or None, input_schema=dict(tool.input_schema))
            for tool in tools
        ]
        self._serializer = serializer
        self._hosts = hosts
        self._errors_as_jsonrpc = errors_as_jsonrpc
        self._keep_alive_s = keep_alive_s
        self._manager: StreamableHTTPSessionManager | None = None
        self._calls: dict[_CallKey, anyio.CancelScope] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for as long as the context lasts: the application's lifespan."""
        sdk_server: Server[Any] = Server(
            self._name,
            version=__version__,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            get_tool_input_schema=self._input_schema,
        )
        # A manager runs once; an application's lifespan may be run again, in tests.
        manager = StreamableHTTPSessionManager(
            sdk_server, stateless=True, json_response=True, max_request_body_size=_NO_LIMIT
        )
        async with manager.run():
            self._manager = manager
            try:
                yield
            finally:
                self._manager = None

    async def handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request at the endpoint's path.

        Args:
            app: The application, from its session middleware inwards; tool calls go to it.
            scope: The request.
            receive: ASGI.
            send: ASGI.
        """
        headers = Headers(scope=scope)
        refusal = self._refusal(headers)
        if refusal is None and scope["method"] not in ("POST", "DELETE"):
            refusal = _answer_to_other_method(scope["method"])
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        exchange = _Exchange(
            self._token_of(scope), headers.get(_SESSION_ID_HEADER.decode(), ""), RouteCalls(app, scope)
        )
        if scope["method"] == "DELETE":
            self._cancel_calls(exchange)
            await Response(status_code=HTTPStatus.NO_CONTENT)(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        lost = _lost_reason(exchange.token, scope)
        if lost is not None:
            await self._told(lost_session_reply(lost), body)(scope, receive, send)
            return
        method, params = _message_in(body)
        if method == _CANCELLED:
            self._cancel_call(exchange, params)
        elif method == _INITIALIZE:
            send = _with_session_id(send)
        if self._manager is None:
            raise RuntimeError("the application's lifespan has not started; use TestClient as a context manager")
        scope[_EXCHANGE_KEY] = exchange
        reply_to = KeptAlive(send, self._keep_alive_s)
        try:
            async with reply_to:
                if not await self._answer_directly(exchange, body, scope, receive, reply_to.send):
                    await self._manager.handle_request(scope, replayed(body, receive), reply_to.send)
            exchange.calls.answered()
            await exchange.calls.ended()
        except asyncio.CancelledError:
            # The server is stopping and the grace is over, or the client is gone and sees no reply.
            stopping = stopping_reply(self._name)
            await reply_to.end(self._told(stopping, body), jsonrpc_error_reply(body, stopping), scope, receive)
            raise
        finally:
            await exchange.calls.cancel()

    async def _answer_directly(
        self, exchange: _Exchange, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answer a plain tool call; False, and nothing done, for all that the SDK's transport has to answer."""
        call = tool_call_in(Headers(scope=scope), body)
        if call is None:
            return False
        assert self._manager is not None
        try:
            reply = await answer(self._manager.app, call, scope)
        except ValidationError:
            if exchange.has_called:
                raise
            return False
        await reply(scope, receive, send)
        return True

    def _refusal(self, headers: Headers) -> Response | None:
        host, origin = headers.get("host"), headers.get("origin")
        if not self._hosts.allows_host(host):
            logger.warning("%s: refused a request at /mcp for the host %.100r", self._name, host)
            text = "This name may not be used to reach the MCP endpoint; allow it with 'mcp_allowed_hosts'."
            return PlainTextResponse(text, HTTPStatus.MISDIRECTED_REQUEST)
        if not self._hosts.allows_origin(origin, host):
            logger.warning("%s: refused a request at /mcp of the origin %.100r", self._name, origin)
            text = "Pages of this origin may not use the MCP endpoint; allow it with 'mcp_allowed_origins'."
            return PlainTextResponse(text, HTTPStatus.FORBIDDEN)
        return None

    def _token_of(self, scope: Scope) -> SessionToken | InvalidTokenError:
        header = read_token_header(scope["headers"], TOKEN_HEADER)
        try:
            return read_token(self._serializer, header.value, doubled=header.doubled)
        except InvalidTokenError as error:
            return error

    def _told(self, refusal: Response, body: bytes) -> Response:
        """Return a plain refusal as the settings want it told."""
        return jsonrpc_error_reply(body, refusal) if self._errors_as_jsonrpc else refusal

    def _cancel_call(self, exchange: _Exchange, params: Any) -> None:
        request_id = params.get("requestId") if isinstance(params, dict) else None
        if not isinstance(exchange.token, SessionToken) or type(request_id) not in (str, int):
            return
        call = self._calls.get((exchange.token.session_id, exchange.mcp_session_id, request_id))
        if call is not None:
            call.cancel()

    def _cancel_calls(self, exchange: _Exchange) -> None:
        if not isinstance(exchange.token, SessionToken) or not exchange.mcp_session_id:
            return
        ended = (exchange.token.session_id, exchange.mcp_session_id)
        for key in [key for key in self._calls if key[:2] == ended]:
            self._calls[key].cancel()

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        tool = self._tools.get(name)
        return None if tool is None else tool.input_schema

    async def _list_tools(
        self, context: ServerRequestContext[Any, Any], _: PaginatedRequestParams | None
    ) -> ListToolsResult:
        token = _exchange_of(context).token
        if isinstance(token, SessionToken):
            return ListToolsResult(tools=[tool for tool in self._listed if token.allows(tool.name)])
        return ListToolsResult(tools=self._listed)

    async def _call_tool(
        self, context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        exchange = _exchange_of(context)
        exchange.has_called = True
        token = exchange.token
        if isinstance(token, InvalidTokenError):
            return error_result(str(token), HTTPStatus.UNAUTHORIZED, refused="token")
        tool = self._tools.get(params.name)
        if tool is None:
            return error_result(f"There is no tool '{params.name[:100]}'.", HTTPStatus.NOT_FOUND, refused="tool")
        if not token.allows(tool.name):
            text = f"The tool '{tool.name}' is not available in this session."
            return error_result(text, HTTPStatus.FORBIDDEN, refused="tool")
        with self._cancellable((token.session_id, exchange.mcp_session_id, context.request_id)) as cancellation:
            return await self._run(exchange.calls, tool, params.arguments or {}, token.session())
        assert cancellation.cancelled_caught
        return error_result("The call was cancelled by the client.", _CLIENT_CLOSED_REQUEST)

    async def _run(
        self, calls: RouteCalls, tool: MCPTool, arguments: Mapping[str, Any], session: Mapping[str, Any]
    ) -> CallToolResult:
        cookie = self._server.get_session_middleware_key()
        signed = f"{cookie}={self._server.sign_session(session)}"
        try:
            reply = await calls.post(tool.path, arguments, signed)
        except (ValueError, RecursionError):
            # What a plain request with such a body is answered.
            return error_result('{"detail":"There was an error parsing the body"}', HTTPStatus.BAD_REQUEST)
        if _writes_session(reply, cookie, session):
            logger.error("%s: the tool '%s' wrote request.session, which is lost over MCP", self._name, tool.name)
            return error_result(_WROTE_SESSION.format(tool.name), HTTPStatus.NOT_IMPLEMENTED)
        return result_of(reply, tool.path)

    @contextmanager
    def _cancellable(self, key: _CallKey) -> Iterator[anyio.CancelScope]:
        """Let `notifications/cancelled` and DELETE reach what runs within."""
        with anyio.CancelScope() as cancellation:
            # Without an MCP session the ids of several clients can't be told apart.
            if key[1]:
                self._calls[key] = cancellation
            try:
                yield cancellation
            finally:
                if self._calls.get(key) is cancellation:
                    del self._calls[key]


def _lost_reason(token: SessionToken | InvalidTokenError, scope: Scope) -> LostReason | None:
    """Return why a request's session is lost, as far as its token tells."""
    if isinstance(token, ExpiredTokenError):
        return LostReason.SESSION_EXPIRED
    routing = getattr(scope["app"].state, "session_routing", None)
    # A server with one worker gives tokens without an owner: this one is of an earlier start, with several.
    if isinstance(token, SessionToken) and token.owner is not None and routing is None:
        return LostReason.WORKER_GONE
    return None


def _exchange_of(context: ServerRequestContext[Any, Any]) -> _Exchange:
    """Return the exchange of the HTTP request that an MCP message came with."""
    assert context.request is not None
    exchange: _Exchange = context.request.scope[_EXCHANGE_KEY]
    return exchange


def _message_in(body: bytes) -> tuple[str, Any]:
    """Return the method and the parameters of a message that the endpoint itself looks at; else empty ones."""
    # JSON may write the slash in a method with a backslash.
    if b"/cancelled" not in body and _INITIALIZE.encode() not in body:
        return "", None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return "", None
    return message["method"], message.get("params")


def _answer_to_other_method(method: str) -> Response:
    """Answer GET, HEAD and OPTIONS, which hold nothing open: there is no stream of the server's own to wait for."""
    status = HTTPStatus.NO_CONTENT if method == "OPTIONS" else HTTPStatus.METHOD_NOT_ALLOWED
    return Response(status_code=status, headers={"allow": _METHODS})


def _with_session_id(send: Send) -> Send:
    """Return a `send` that adds a fresh `Mcp-Session-Id` to a good reply."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
            headers = [*message.get("headers", ()), (_SESSION_ID_HEADER, uuid4().hex.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_id


def _writes_session(reply: ToolReply, cookie: str, session: Mapping[str, Any]) -> bool:
    """Return whether a reply sets the session cookie to something else than the session that the call began with.

    Starlette's session middleware sets the cookie on every reply, changed or not.
    """
    for name, value in reply.headers:
        if name != b"set-cookie" or not value.startswith(cookie.encode("latin-1") + b"="):
            continue
        signed = value.partition(b"=")[2].partition(b";")[0]
        try:
            written = json.loads(b64decode(signed.split(b".")[0]))
        except ValueError:
            return True
        if not isinstance(written, dict) or _without_owner(written) != _without_owner(session):
            return True
    return False


def _without_owner(session: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in session.items() if key != SESSION_OWNER_KEY}
