"""What a tool may be called, and the names under which MCP clients record a tool's calls."""

from __future__ import annotations

import re
from typing import Final

FRAMEWORK_ROUTES: Final = frozenset({"seed_session", "verify", "aggregate_metrics", "close_session", "health", "mcp"})
"""First segments of the framework's own paths: none of them is a tool."""

# A tool's name becomes the path of a URL, so it must be one plain segment.
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MCP_NAME: Final = re.compile(r"mcp__.+?__(?P<tool>.+)", re.DOTALL)
_NOT_KEPT_BY_CLIENTS: Final = re.compile(r"[^A-Za-z0-9_-]")


def is_tool_name(name: str) -> bool:
    """Return whether `POST /<name>` can be a tool's route."""
    return bool(_TOOL_NAME.fullmatch(name)) and name not in FRAMEWORK_ROUTES


def mcp_tool_name(server_name: str, name: str) -> str:
    """Return the name under which command-line agents offer an MCP server's tool: `mcp__<server>__<tool>`.

    Args:
        server_name: The MCP server's name; characters that clients don't keep become underscores.
        name: The tool's own name.
    """
    return f"mcp__{_NOT_KEPT_BY_CLIENTS.sub('_', server_name)}__{name}"


def normalize_tool_name(name: str, server_name: str | None = None) -> str:
    """Return a tool's own name: `mcp__<server>__<tool>` becomes `<tool>`; any other name stays as it is.

    Args:
        name: The name that a client recorded.
        server_name: Take off only this MCP server's prefix, so that another server's tool of the same name stays
            another one. Without it the server's name is taken to end at the first double underscore.
    """
    if server_name is None:
        match = _MCP_NAME.fullmatch(name)
        return match["tool"] if match else name
    for prefix in (mcp_tool_name(server_name, ""), f"mcp__{server_name}__"):
        if name.startswith(prefix) and name != prefix:
            return name.removeprefix(prefix)
    return name
