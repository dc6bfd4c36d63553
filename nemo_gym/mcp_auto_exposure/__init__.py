"""A resources server's tools over the Model Context Protocol: its plain `POST /<tool>` routes, served at `/mcp` too.

Clients that keep no cookies, such as command-line agents in sandboxes, name their session by a signed token that the
reply to `/seed_session` gives them. docs/tools-over-mcp.md shows how to use it.
"""

from __future__ import annotations

from nemo_gym.mcp_auto_exposure.exposure import ExposedServer as ExposedServer, maybe_auto_expose as maybe_auto_expose
from nemo_gym.mcp_auto_exposure.harvest import CatchAll as CatchAll, MCPTool as MCPTool
from nemo_gym.mcp_auto_exposure.tokens import (
    TOKEN_HEADER as TOKEN_HEADER,
    session_token_serializer as session_token_serializer,
)
from nemo_gym.tool_names import normalize_tool_name as normalize_tool_name

NEMO_GYM_MCP_SESSION_TOKEN_HEADER = TOKEN_HEADER
