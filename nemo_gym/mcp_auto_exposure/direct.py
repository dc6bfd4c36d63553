"""An ordinary tool call over MCP, handed to the SDK's server without the SDK's transport.

The SDK answers each request of the protocol versions that begin with a handshake through a session of its own: three
tasks and six streams, at twice the cost of all else. A plain `tools/call` needs none of that. It is validated, run and
serialised by the SDK's server all the same; whatever is not plain, or wrong, is left to the transport, which then
finds nothing done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import pydantic_core
from mcp.server import Server
from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    DEFAULT_NEGOTIATED_VERSION,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

_JSON: Final = "application/json"
_CALL: Final = "tools/call"
_VERSION_HEADER: Final = "mcp-protocol-version"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A plain tool call.

    Attributes:
        request: The JSON-RPC request.
        protocol_version: The version of MCP that the client speaks.
    """

    request: JSONRPCRequest
    protocol_version: str


def tool_call_in(headers: Headers, body: bytes) -> ToolCall | None:
    """Return the tool call that an HTTP request makes; None where it is anything else, or not quite as it should be."""
    accepted = {part.partition(";")[0].strip() for part in headers.get("accept", "").split(",")}
    version = headers.get(_VERSION_HEADER, DEFAULT_NEGOTIATED_VERSION)
    if headers.get("content-type") != _JSON or _JSON not in accepted or version not in HANDSHAKE_PROTOCOL_VERSIONS:
        return None
    try:
        message = jsonrpc_message_adapter.validate_python(pydantic_core.from_json(body), by_name=False)
    except ValueError:
        return None
    if not isinstance(message, JSONRPCRequest) or message.method != _CALL:
        return None
    return ToolCall(message, version)


async def answer(server: Server[Any], call: ToolCall, scope: Scope) -> Response:
    """Return the reply to a tool call.

    Args:
        server: The SDK's server.
        call: The call.
        scope: Its HTTP request, which the server's handlers find in their context.

    Raises:
        pydantic.ValidationError: The parameters are no tool call's.
    """
    request = call.request
    exchange = _OneReply(request.id, ServerMessageMetadata(request_context=Request(scope)))
    connection = Connection.from_envelope(call.protocol_version, None, None)
    message: JSONRPCResponse | JSONRPCError
    try:
        result = await serve_one(
            server, exchange, request.method, request.params, connection=connection, lifespan_state={}
        )
        message = JSONRPCResponse(jsonrpc="2.0", id=request.id, result=result)
    except MCPError as error:
        message = JSONRPCError(jsonrpc="2.0", id=request.id, error=error.error)
    return Response(message.model_dump_json(by_alias=True, exclude_unset=True), headers={"content-type": _JSON})


@dataclass(slots=True)
class _OneReply:
    """The SDK's view of one request that is answered by one reply: nothing else can be sent to the client."""

    request_id: str | int
    message_metadata: ServerMessageMetadata
    transport: TransportContext = field(
        default_factory=lambda: TransportContext(kind="streamable-http", can_send_request=False)
    )
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    can_send_request: bool = False

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:
        """Drop a notification, as the SDK's own transport does where replies are JSON."""

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Drop a report of progress, likewise."""
