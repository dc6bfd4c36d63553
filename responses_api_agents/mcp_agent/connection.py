"""One rollout's connection to an environment's tools over MCP, by the official SDK.

Lifecycle: `open_tools` connects, lists the tools and disconnects when its block ends, in whatever way it ends: nothing
of a connection outlives its rollout. Trouble that is not a tool's fault is raised as the `HTTPException` that ends the
rollout, with the status that the same trouble would have had over plain HTTP.
"""

import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx2
import orjson
from fastapi import HTTPException
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, CallToolResult, TextContent, Tool

from nemo_gym.mcp_auto_exposure.results import LOST_META_KEY, REFUSED_META_KEY, STATUS_META_KEY
from nemo_gym.server.middleware import upstream_text
from nemo_gym.session_routing import SESSION_LOST_HEADER
from nemo_gym.session_routing.jsonrpc import SESSION_LOST_CODE

_CONNECT_TIMEOUT_S: Final = 30.0
# Less than the 5 s after which uvicorn closes an idle connection: this side then closes first, and no call is written
# to a connection that the other side is just closing.
_LIMITS: Final = httpx2.Limits(keepalive_expiry=4.0)
# A tool may take as long as it does over plain HTTP. TCP keep-alive notices a peer that is gone without a word.
_TIMEOUT: Final = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
_SOCKET_OPTIONS: Final = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):
    _SOCKET_OPTIONS.append((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60))

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered.

    Attributes:
        text: The result's texts, joined; the body of the reply that plain HTTP would have brought.
        is_error: Whether the tool refused or failed.
        status: The HTTP status of that reply; None where the server does not tell it.
        token_refused: Whether the server did not take the session token, so that no tool has run.
        lost: Why the session is lost, where the tool's route says that it is.
    """

    text: str
    is_error: bool
    status: int | None
    token_refused: bool = False
    lost: str | None = None


class McpTools:
    """The tools of one session, for as long as its connection is open.

    Args:
        client: The connected client.
        url: The endpoint, for errors.
        listed: What the server lists.
    """

    def __init__(self, client: Client, url: str, listed: list[Tool]) -> None:
        self.listed = listed
        self._client = client
        self._url = url

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool, once.

        Args:
            name: Its name, as the server lists it.
            arguments: The arguments of the call.

        Raises:
            fastapi.HTTPException: If there is no answer of the tool: the session is lost (410), or the server or the
                connection to it failed.
        """
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            raise _end_of_rollout(self._url, error) from error
        meta = result.meta or {}
        status = meta.get(STATUS_META_KEY)
        return ToolResult(
            _text_of(result),
            bool(result.is_error),
            status if isinstance(status, int) else None,
            token_refused=meta.get(REFUSED_META_KEY) == "token",
            lost=meta.get(LOST_META_KEY),
        )


@asynccontextmanager
async def open_tools(url: str, headers: Mapping[str, str]) -> AsyncIterator[McpTools]:
    """Connect to an MCP server and list its tools; the connection is closed when the block ends.

    Args:
        url: The endpoint's address.
        headers: Headers of every request: the session token.

    Raises:
        fastapi.HTTPException: If the server can't be reached or refuses, at the beginning or later.
    """
    raised: Exception | None = None
    # Nothing remembers an MCP session at a resources server, so there is none to terminate.
    http_client = httpx2.AsyncClient(transport=_SpeakingTransport(), headers=dict(headers), timeout=_TIMEOUT)
    transport = streamable_http_client(url, http_client=http_client, terminate_on_close=False)
    try:
        async with http_client, Client(transport, cache=None) as client:
            tools = McpTools(client, url, await _list_all(client))
            try:
                yield tools
            except Exception as error:  # noqa: BLE001 -- raised below: the SDK's task groups would wrap it
                raised = error
    except (MCPError, ExceptionGroup) as error:
        raise _end_of_rollout(url, error) from error
    if raised is not None:
        raise raised


async def _list_all(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        cursor = page.next_cursor
        if not cursor:
            return tools


def _text_of(result: CallToolResult) -> str:
    """Return the texts of a result; what is no text is only named, as a model can't read it."""
    return "\n".join(part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content)


class _SpeakingTransport(httpx2.AsyncBaseTransport):
    """HTTP whose errors are JSON-RPC errors, the only ones that the SDK passes on to its caller.

    As it is, the SDK's caller learns of an HTTP error only that there was one, and a connection that breaks within a
    reply tears the client down: the caller sees a cancellation, and then a group of exceptions.
    """

    def __init__(self) -> None:
        # Addresses of the configuration are http. The default would read the certificates anew for every rollout.
        self._http = httpx2.AsyncHTTPTransport(
            verify=False, trust_env=False, limits=_LIMITS, socket_options=_SOCKET_OPTIONS
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "POST":
            return await self._http.handle_async_request(request)
        try:
            reply = await self._http.handle_async_request(request)
            body = await reply.aread()
        except httpx2.TransportError as error:
            said = f"could not be reached, or broke off the connection ({error!r}); the request may have run"
            return _speaking_reply(HTTPStatus.BAD_GATEWAY, said)
        if reply.status_code < HTTPStatus.BAD_REQUEST or _is_jsonrpc(body):
            return reply
        said = f"answered {reply.status_code}: {upstream_text(body, reply.reason_phrase)}"
        return _speaking_reply(reply.status_code, said, reply.headers.get(SESSION_LOST_HEADER))

    async def aclose(self) -> None:
        await self._http.aclose()


def _is_jsonrpc(body: bytes) -> bool:
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(message, dict) and "jsonrpc" in message


def _speaking_reply(status: int, said: str, reason: str | None = None) -> httpx2.Response:
    data = {"status": status, "reason": reason, "said": said}
    error = {"code": INTERNAL_ERROR, "message": said, "data": data}
    return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error})


def _end_of_rollout(url: str, error: Exception) -> HTTPException:
    """Return how the agent answers `/run` where its MCP client gave up."""
    cause = _first_of(error)
    if not isinstance(cause, MCPError):
        return rollout_ended(url, HTTPStatus.BAD_GATEWAY, f"ended the MCP client ({cause!r}); its request may have run")
    data = cause.data if isinstance(cause.data, dict) else {}
    told = data.get("status")
    status = told if isinstance(told, int) and 400 <= told <= 599 else HTTPStatus.BAD_GATEWAY
    if cause.code == SESSION_LOST_CODE:
        status = HTTPStatus.GONE
    said = data.get("said") or f"answered the JSON-RPC error {cause.code}: {cause.message}"
    return rollout_ended(url, status, said, data.get("reason"))


def rollout_ended(url: str, status: int, said: str, reason: str | None = None) -> HTTPException:
    """Return the reply to `/run` of a rollout that a server's trouble ended.

    Args:
        url: The MCP endpoint.
        status: The status.
        said: What the server did, as the end of a sentence.
        reason: Why the session is lost, where it is and the server says so.
    """
    detail = f"the MCP server at {url} {said}"
    logger.warning("A rollout ended: %s", detail)
    return HTTPException(int(status), detail, {SESSION_LOST_HEADER: reason} if reason else None)


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
