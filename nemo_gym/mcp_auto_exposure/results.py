"""From a route's reply to the result of an MCP tool call: the same text that a plain request reads."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
)

from nemo_gym.mcp_auto_exposure.calls import ToolReply
from nemo_gym.session_routing import SESSION_LOST_HEADER

STATUS_META_KEY: Final = "nemo-gym/http-status"
"""The key, in a result's `_meta`, of the status that the tool's route answered; agents decide by it."""

REFUSED_META_KEY: Final = "nemo-gym/refused"
"""The key, in a result's `_meta`, of what the endpoint itself refused, so that no route has run: "token" or "tool"."""


LOST_META_KEY: Final = "nemo-gym/session-lost"
"""The key, in a result's `_meta`, of the reason that a route gave for a lost session (`x-nemo-gym-session-lost`)."""


def result_of(reply: ToolReply, path: str) -> CallToolResult:
    """Return a route's reply as a tool's result; what is no success is a tool error with the same text.

    Args:
        reply: The reply.
        path: The route, which names what is neither text nor picture nor sound.
    """
    meta: dict[str, Any] = {STATUS_META_KEY: reply.status}
    if lost := reply.header(SESSION_LOST_HEADER.encode()):
        meta[LOST_META_KEY] = lost
    is_error = not 200 <= reply.status < 300
    return CallToolResult(content=[_content_of(reply, path)], is_error=is_error, _meta=meta)


def error_result(text: str, status: int, *, refused: str | None = None) -> CallToolResult:
    """Return a tool error of the endpoint's own.

    Args:
        text: What was wrong, for the model and its user.
        status: The HTTP status that a plain request would have been answered with.
        refused: What was refused, for `REFUSED_META_KEY`, if no route has run.
    """
    meta: dict[str, Any] = {STATUS_META_KEY: int(status)}
    if refused is not None:
        meta[REFUSED_META_KEY] = refused
    return CallToolResult(content=[TextContent(text=text)], is_error=True, _meta=meta)


def _content_of(reply: ToolReply, path: str) -> ContentBlock:
    media_type = reply.header(b"content-type").partition(";")[0].strip().lower()
    kind = media_type.partition("/")[0]
    if kind in ("image", "audio"):
        data = b64encode(reply.body).decode()
        if kind == "image":
            return ImageContent(data=data, mime_type=media_type)
        return AudioContent(data=data, mime_type=media_type)
    try:
        return TextContent(text=reply.body.decode("utf-8"))
    except UnicodeDecodeError:
        blob = BlobResourceContents(
            uri=f"nemo-gym:{path}",
            mime_type=media_type or "application/octet-stream",
            blob=b64encode(reply.body).decode(),
        )
        return EmbeddedResource(resource=blob)
