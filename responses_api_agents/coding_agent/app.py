"""An agent that works in a sandbox through the environment's tools, as a programmer at a terminal does.

It is `simple_agent` with what long work needs. The model is told where it works and how to finish, reads long outputs
shortened in their middle, and is told when it goes round in circles and when a budget runs low. A rollout whose budget
is used up ends as an incomplete response, with the reason, and is verified like any other: the work done counts.

What becomes of trouble is as with `simple_agent`, and one thing more: a rollout that fails closes its session at the
resources server, so that its sandbox does not wait for its idle time.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from fastapi import HTTPException
from pydantic import Field

from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from responses_api_agents.coding_agent.progress import Progress
from responses_api_agents.coding_agent.tool_output import shorten, with_notice
from responses_api_agents.simple_agent.app import RolloutCookies, SimpleAgent, SimpleAgentConfig

CONTEXT_WINDOW_REASON: Final = "context_window"

INSTRUCTIONS: Final = """\
You work in a sandbox, through the tools you are given. Nobody reads along or answers questions.
The working directory is {workdir}; relative paths start there.
Look at what is there before you change it. Change what the task asks for and nothing else. Then check that it works.
What counts is the state of the sandbox when you finish, not what you say about it.
You have {max_steps} steps; each reply is one, whatever it calls.
To finish, reply with a short message and no tool call."""

_CLOSING_S: Final = 5.0
_TOO_LONG: Final = re.compile(
    rb"context_length_exceeded|(maximum|model'?s) context length|context window", re.IGNORECASE
)

logger = logging.getLogger(__name__)


class CodingAgentConfig(SimpleAgentConfig):
    """The settings of the agent.

    Attributes:
        instructions: What the model is told before the row's own instructions. `{workdir}` and `{max_steps}` are
            filled in; a line with one that is not known is left out.
        max_tool_output: How many characters of one tool output the model is given.
        tool_output_budget: How many characters of tool output it is given in one rollout; None for no limit.
    """

    instructions: str = INSTRUCTIONS
    max_tool_output: int = Field(default=16_000, ge=500)
    tool_output_budget: int | None = Field(default=400_000, ge=500)


class CodingAgent(SimpleAgent):
    """Lets a model work with the tools of one environment until it is done or a budget is used up."""

    config: CodingAgentConfig

    async def respond_in_session(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies, seeded: Mapping[str, Any]
    ) -> NeMoGymResponse:
        """Work in the session just begun; close it where that fails."""
        try:
            return await self._work(self._prepared(params, seeded), cookies)
        except BaseException:
            await self._close_session(cookies)
            raise

    async def respond(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies
    ) -> NeMoGymResponse:
        """Work in a session that the caller has begun, and will end."""
        return await self._work(self._prepared(params, {}), cookies)

    async def call_tool(self, name: str, arguments: Mapping[str, Any], cookies: RolloutCookies) -> str:
        """Call a tool and return what the model is to read of its answer."""
        return shorten(await super().call_tool(name, arguments, cookies), self.config.max_tool_output)

    async def _work(self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies) -> NeMoGymResponse:
        """Alternate between model and tools as `SimpleAgent.respond` does, within the budgets."""
        conversation = _as_items(params)
        progress = Progress(self.config.max_steps, self.config.tool_output_budget)
        trajectory: list[Any] = []
        reply: NeMoGymResponse | None = None
        usage: NeMoGymResponseUsage | None = None
        while True:
            try:
                asked = params.model_copy(update={"input": conversation + trajectory})
                reply = await self._ask_model(asked, cookies)
            except aiohttp.ClientResponseError as error:
                if reply is None or not _is_too_long(error):
                    raise
                return _ended(reply, trajectory, usage, CONTEXT_WINDOW_REASON)
            progress.steps += 1
            usage = accumulate_response_usage(usage, reply.usage)
            trajectory.extend(reply.output)
            calls = [item for item in reply.output if isinstance(item, NeMoGymResponseFunctionToolCall)]
            if not calls or reply.incomplete_details is not None:
                return _ended(reply, trajectory, usage)
            results = [await self._run_tool(call, params, cookies) for call in calls]
            trajectory.extend(results)
            progress.add(calls, [str(result.output) for result in results])
            reason = progress.used_up()
            if reason is not None:
                return _ended(reply, trajectory, usage, reason)
            notice = progress.notice()
            if notice:
                told = with_notice(str(results[-1].output), notice)
                trajectory[-1] = results[-1].model_copy(update={"output": told})

    # Before and after

    def _prepared(
        self, params: NeMoGymResponseCreateParamsNonStreaming, seeded: Mapping[str, Any]
    ) -> NeMoGymResponseCreateParamsNonStreaming:
        """Return the request with the tools and the instructions that the model needs."""
        seeded = seeded if isinstance(seeded, Mapping) else {}
        update: dict[str, Any] = {}
        told = [text for text in (self._instructions(seeded), params.instructions) if text]
        if told:
            update["instructions"] = "\n\n".join(told)
        if not any(tool.get("type") == "function" for tool in params.tools):
            update["tools"] = [*params.tools, *self._tools_of(seeded)]
        return params.model_copy(update=update)

    def _instructions(self, seeded: Mapping[str, Any]) -> str:
        values = {"{workdir}": seeded.get("workdir"), "{max_steps}": self.config.max_steps}
        lines = self.config.instructions.splitlines()
        for name, value in values.items():
            lines = [line.replace(name, str(value)) for line in lines if value is not None or name not in line]
        return "\n".join(lines).strip()

    def _tools_of(self, seeded: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the tools that the reply to `/seed_session` lists."""
        server = self.config.resources_server.name
        tools = seeded.get("tools") or []
        if not tools:
            raise HTTPException(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "there are no tools to work with: responses_create_params.tools of the row has no function, and the "
                f"reply of '{server}' to /seed_session lists none under 'tools'",
            )
        for tool in tools:
            if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
                detail = f"'{server}' lists in its reply to /seed_session what is no function tool: {tool!r:.200}"
                raise HTTPException(HTTPStatus.BAD_GATEWAY, detail)
        return [{"type": "function", **tool} for tool in tools]

    async def _close_session(self, cookies: RolloutCookies) -> None:
        """Close the session at the resources server as far as that goes; what ended the rollout matters more."""
        server = self.config.resources_server.name
        try:
            async with asyncio.timeout(_CLOSING_S):
                response = await self.server_client.post(
                    server_name=server, url_path="/close_session", json={}, cookies=cookies.resources
                )
                response.release()
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("a failed rollout's session at '%s' could not be closed: %r", server, error)


def _as_items(params: NeMoGymResponseCreateParamsNonStreaming) -> list[Any]:
    if isinstance(params.input, str):
        return [NeMoGymEasyInputMessage(role="user", content=params.input)]
    return list(params.input)


def _ended(
    reply: NeMoGymResponse, trajectory: list[Any], usage: NeMoGymResponseUsage | None, reason: str | None = None
) -> NeMoGymResponse:
    """Return the model's last reply with the whole trajectory; incomplete where there is a reason."""
    update: dict[str, Any] = {"output": trajectory, "usage": usage}
    if reason is not None:
        update |= {"status": "incomplete", "incomplete_details": NeMoGymIncompleteDetails(reason=reason)}
    return reply.model_copy(update=update)


def _is_too_long(error: aiohttp.ClientResponseError) -> bool:
    """Whether the model refused the conversation as too long for it. There is no one code for it."""
    refused = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
    return error.status in refused and _TOO_LONG.search(getattr(error, "response_content", b"")) is not None


if __name__ == "__main__":
    CodingAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = CodingAgent.run_webserver()
