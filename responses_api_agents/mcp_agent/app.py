"""The plain agent over MCP: it seeds and verifies over HTTP, and uses the environment's tools over MCP only.

So does a command-line agent in a sandbox: it is given the address and the headers that `/seed_session` answers, sees
the tools under the names `mcp__<server>__<tool>`, and knows nothing of cookies. A rollout has the same outcome as with
`simple_agent`, whose loop it is; so is what becomes of trouble on the way.

Each rollout has an MCP connection of its own, from the seed to the last call, in the handler that runs it.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from mcp_types import Tool
from pydantic import BaseModel, ValidationError

from nemo_gym.base_resources_server import NEMO_GYM_MCP_METADATA_KEY
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server.middleware import upstream_text
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from nemo_gym.tool_names import mcp_tool_name
from responses_api_agents.mcp_agent.connection import McpTools, open_tools, rollout_ended
from responses_api_agents.simple_agent.app import (
    NOT_THE_TOOLS_FAULT,
    RolloutCookies,
    SimpleAgent,
    SimpleAgentConfig,
    tool_error,
)


class McpAgentConfig(SimpleAgentConfig):
    """The settings of the agent.

    Attributes:
        tool_names: How the model knows the tools: "mcp" as `mcp__<server>__<tool>`, as command-line agents name them,
            or "bare" as the server does.
    """

    tool_names: Literal["mcp", "bare"] = "mcp"


class McpAccess(BaseModel):
    """What `/seed_session` tells of the session's tools over MCP.

    Attributes:
        server_name: The server's name in the names of its tools.
        url_path: The endpoint's path at the resources server.
        transport: How it speaks.
        headers: Headers to send with every request; they hold the session token.
    """

    server_name: str
    url_path: str
    transport: Literal["streamable_http"]
    headers: dict[str, str]


@dataclass(kw_only=True)
class McpRollout(RolloutCookies):
    """The cookies of one rollout, and its tools.

    Attributes:
        tools: The connection.
        own_names: The server's name of each tool, by the name that the model knows.
        url: The endpoint, for errors.
    """

    tools: McpTools
    own_names: Mapping[str, str]
    url: str


class McpAgent(SimpleAgent):
    """Alternates between one model and the tools that one environment serves over MCP."""

    config: McpAgentConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application."""
        # It tells every request at the level of news; a rollout makes a dozen.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        return super().setup_webserver()

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> Response:
        """Refuse: the token that names the session comes with the seed, and only `/run` sees it."""
        raise HTTPException(
            HTTPStatus.CONFLICT,
            f"{self.config.name} can't answer /v1/responses: its tools are called with the token that /seed_session "
            "answers, not with a cookie. POST the row to /run instead.",
        )

    async def respond_in_session(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies, seeded: Mapping[str, Any]
    ) -> NeMoGymResponse:
        """Connect to the session's tools, and go through the loop with them."""
        access = self._access(seeded)
        url = self.server_client.url_of(self.config.resources_server.name) + access.url_path
        async with open_tools(url, {**access.headers, **self.server_client.context_headers()}) as tools:
            names = {tool.name: self._offered_name(access.server_name, tool.name) for tool in tools.listed}
            rollout = McpRollout(
                resources=cookies.resources,
                model=cookies.model,
                seconds=cookies.seconds,
                tools=tools,
                own_names={offered: own for own, offered in names.items()},
                url=url,
            )
            return await self.respond(_offer(params, tools.listed, names), rollout)

    async def call_tool(self, name: str, arguments: Mapping[str, Any], cookies: RolloutCookies) -> str:
        """Call a tool over MCP and return what the model is to read."""
        assert isinstance(cookies, McpRollout)
        own_name = cookies.own_names.get(name)
        if own_name is None:
            return json.dumps({"error": f"there is no tool '{name[:100]}'"})
        result = await cookies.tools.call(own_name, arguments)
        if not result.is_error:
            return result.text
        if result.token_refused:
            raise rollout_ended(cookies.url, HTTPStatus.UNAUTHORIZED, f"refused the session token: {result.text}")
        if result.status in NOT_THE_TOOLS_FAULT:
            text = upstream_text(result.text.encode(), "no further information")
            said = f"answered {result.status} to '{own_name}': {text}"
            raise rollout_ended(cookies.url, result.status, said, result.lost)
        return tool_error(name, result.status, result.text)

    def _access(self, seeded: Mapping[str, Any]) -> McpAccess:
        server = self.config.resources_server.name
        told = seeded.get(NEMO_GYM_MCP_METADATA_KEY) if isinstance(seeded, dict) else None
        if told is None:
            raise HTTPException(
                HTTPStatus.CONFLICT,
                f"the resources server '{server}' does not serve its tools over MCP: its reply to /seed_session has no "
                f"'{NEMO_GYM_MCP_METADATA_KEY}'. Set 'expose_tools_over_mcp: true' in its configuration, or use "
                "simple_agent.",
            )
        try:
            return McpAccess.model_validate(told)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in error.errors())
            detail = (
                f"'{NEMO_GYM_MCP_METADATA_KEY}' in the reply of '{server}' to /seed_session can't be used: {problems}"
            )
            raise HTTPException(HTTPStatus.BAD_GATEWAY, detail) from None

    def _offered_name(self, server_name: str, name: str) -> str:
        return mcp_tool_name(server_name, name) if self.config.tool_names == "mcp" else name


def _offer(
    params: NeMoGymResponseCreateParamsNonStreaming, listed: list[Tool], names: Mapping[str, str]
) -> NeMoGymResponseCreateParamsNonStreaming:
    """Return `params` with the listed tools: in place of the row's functions of the same names, else at the end."""
    if not listed:
        return params
    functions = {tool.name: _function(tool, names[tool.name]) for tool in listed}
    own = [str(tool.get("name")) if tool.get("type") == "function" else "" for tool in params.tools]
    offered = [functions.get(name, tool) for name, tool in zip(own, params.tools, strict=True)]
    offered += [function for name, function in functions.items() if name not in own]
    choice = _with_offered_names(params.tool_choice, names)
    return params.model_copy(
        update={"tools": offered, **({} if choice == params.tool_choice else {"tool_choice": choice})}
    )


def _function(tool: Tool, name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": tool.description or "",
        "parameters": dict(tool.input_schema),
        # Strict schemas know no optional arguments and no defaults; these do.
        "strict": False,
    }


def _with_offered_names(choice: Any, names: Mapping[str, str]) -> Any:
    """Return a `tool_choice` with the functions in it called as they are offered."""
    if not isinstance(choice, dict):
        return choice
    renamed = {**choice}
    if choice.get("type") == "function":
        renamed["name"] = names.get(str(choice.get("name")), choice.get("name"))
    if isinstance(choice.get("tools"), list):
        renamed["tools"] = [_with_offered_names(tool, names) for tool in choice["tools"]]
    return renamed


if __name__ == "__main__":
    McpAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = McpAgent.run_webserver()
