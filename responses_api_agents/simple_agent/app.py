"""The plain agent: seed the environment, let the model call tools until it is done, have the outcome verified.

`POST /run` is one whole rollout of a dataset row; `POST /v1/responses` is the middle part alone, for callers who
seed and verify themselves. `/run` goes through it by an ordinary method call: what happens within one rollout stays
on the worker that took it, with its session, however many workers there are, and costs no round trip.

What becomes of trouble on the way:

- The model's fault (arguments that are no JSON object, a tool that does not exist, a tool that refuses) is told to
  the model as the call's output, and the rollout goes on.
- A lost session (410) ends the rollout with the same 410, whoever answered it: its state is gone, so it has to be
  run again from its seed, and no reward would mean anything.
- A tool call that the server could not carry out (502, 503, 504) ends the rollout likewise; collection runs it again.
- Any other failure of a server (seed, model, verify) ends the rollout with that server's status and text; a
  connection that breaks, also in a tool call, with a 502. Whether a tool has run is then unknown, so it is not tried
  again within the rollout.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from fastapi import HTTPException, Request, Response
from pydantic import ConfigDict, Field

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse, is_tool_name
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.global_config import ROLLOUT_SECONDS_KEY_NAME
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    accumulate_response_usage,
)
from nemo_gym.server_utils import get_response_json, is_nemo_gym_fastapi_entrypoint, raise_for_status

MAX_STEPS_REASON: Final = "max_steps"

NOT_THE_TOOLS_FAULT: Final = frozenset(
    {HTTPStatus.GONE, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
"""What ends a rollout when a tool call is answered so: the session is lost, or nobody knows whether the tool has run,
and to go on would score something else than the model."""

_ERROR_TEXT_LIMIT: Final = 4_000


class SimpleAgentConfig(BaseResponsesAPIAgentConfig):
    """The settings of the agent.

    Attributes:
        resources_server: The environment.
        model_server: The model.
        max_steps: How many times the model is asked in one rollout at most; None for no limit.
    """

    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    max_steps: int | None = Field(default=100, ge=1)


class SimpleAgentRunRequest(BaseRunRequest):
    """A dataset row; all its fields go to the resources server."""

    model_config = ConfigDict(extra="allow")


class SimpleAgentVerifyResponse(BaseVerifyResponse):
    """The row, and what the resources server answered to `/verify`, with all their fields."""

    model_config = ConfigDict(extra="allow")


@dataclass(slots=True)
class RolloutSeconds:
    """Where the time of one rollout went, in seconds: waiting for the model, the tools, the seed and the verifier."""

    model: float = 0.0
    tools: float = 0.0
    seed: float = 0.0
    verify: float = 0.0

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Add what a block takes to a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - began)

    def to_json(self) -> dict[str, float]:
        """Return them as they stand in a reply of `/run`."""
        return {part: round(seconds, 4) for part, seconds in asdict(self).items()}


@dataclass
class RolloutCookies:
    """The cookies of one rollout, as each server set them: they hold its session there. And the time it has taken."""

    resources: dict[str, str] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    seconds: RolloutSeconds = field(default_factory=RolloutSeconds)


class SimpleAgent(SimpleResponsesAPIAgent):
    """Alternates between one model and the tools of one environment."""

    config: SimpleAgentConfig

    async def run(self, request: Request, body: SimpleAgentRunRequest) -> SimpleAgentVerifyResponse:  # type: ignore[override]
        """Run one rollout of a row: seed, respond, verify; the reply is the row with what the verifier answered."""
        cookies = self._cookies_of(request)
        row = body.model_dump(mode="json", exclude_unset=True)
        seeded = await self._seed(row, cookies)
        response = await self.respond_in_session(body.responses_create_params, cookies, seeded)
        return await self._verify(row, response, cookies)

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> Response:
        """Answer a request, with tools called in the session that the request's cookies name.

        The cookies of the model and the resources server are set on the reply, for the caller's next request.
        """
        cookies = self._cookies_of(request)
        result = await self.respond(body, cookies)
        reply = Response(result.model_dump_json(exclude_unset=True), media_type="application/json")
        for name, value in {**cookies.model, **cookies.resources}.items():
            reply.set_cookie(name, value)
        return reply

    async def respond_in_session(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies, seeded: Mapping[str, Any]
    ) -> NeMoGymResponse:
        """Make the middle part of `run`; override it where the loop needs the reply to `/seed_session`.

        Args:
            params: As for `respond`.
            cookies: As for `respond`.
            seeded: The reply to `/seed_session`.
        """
        return await self.respond(params, cookies)

    async def respond(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies
    ) -> NeMoGymResponse:
        """Alternate between model and tools until the model calls no tool; override it for another kind of loop.

        Args:
            params: The request that starts the conversation.
            cookies: The sessions to go on with; updated with what the servers set.

        Returns:
            The last reply of the model, with the whole trajectory as its `output`, usage summed over all replies.
            Where the model still called tools in its last step, these were run, and the response is marked
            incomplete with the reason "max_steps". A reply that the model left incomplete (cut off at its output
            limit) ends the loop as it is: its calls may be cut too, and are not run.
        """
        conversation = _as_items(params)
        trajectory: list[Any] = []
        usage = None
        steps = 0
        while True:
            reply = await self._ask_model(params.model_copy(update={"input": conversation + trajectory}), cookies)
            steps += 1
            usage = accumulate_response_usage(usage, reply.usage)
            trajectory.extend(reply.output)
            calls = [item for item in reply.output if isinstance(item, NeMoGymResponseFunctionToolCall)]
            if not calls or reply.incomplete_details is not None:
                return reply.model_copy(update={"output": trajectory, "usage": usage})
            trajectory.extend([await self._run_tool(call, params, cookies) for call in calls])
            if self.config.max_steps is not None and steps >= self.config.max_steps:
                cut = {"status": "incomplete", "incomplete_details": NeMoGymIncompleteDetails(reason=MAX_STEPS_REASON)}
                return reply.model_copy(update={"output": trajectory, "usage": usage, **cut})

    async def _seed(self, row: Mapping[str, Any], cookies: RolloutCookies) -> Any:
        with cookies.seconds.spent_on("seed"):
            return await self._ask_resources_server("/seed_session", row, cookies)

    async def _verify(
        self, row: Mapping[str, Any], response: NeMoGymResponse, cookies: RolloutCookies
    ) -> SimpleAgentVerifyResponse:
        trajectory = response.model_dump(mode="json", exclude_unset=True)
        with cookies.seconds.spent_on("verify"):
            verdict = await self._ask_resources_server("/verify", {**row, "response": trajectory}, cookies)
        seconds = {ROLLOUT_SECONDS_KEY_NAME: cookies.seconds.to_json()}
        return SimpleAgentVerifyResponse.model_validate({**row, **verdict, **seconds})

    async def _ask_model(
        self, params: NeMoGymResponseCreateParamsNonStreaming, cookies: RolloutCookies
    ) -> NeMoGymResponse:
        name = self.config.model_server.name
        asked = params.model_dump(mode="json", exclude_unset=True)
        with cookies.seconds.spent_on("model"):
            response = await self.server_client.post(
                server_name=name, url_path="/v1/responses", json=asked, cookies=cookies.model
            )
            await raise_for_status(response)
            _keep_cookies(response, cookies.model)
            answered = await get_response_json(response)
        reply = NeMoGymResponse.model_validate(answered)
        if reply.error is not None:
            raise HTTPException(HTTPStatus.BAD_GATEWAY, f"model server '{name}' failed: {reply.error.message}")
        return reply

    async def _ask_resources_server(self, path: str, body: Mapping[str, Any], cookies: RolloutCookies) -> Any:
        response = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path=path, json=body, cookies=cookies.resources
        )
        await raise_for_status(response)
        _keep_cookies(response, cookies.resources)
        return await get_response_json(response)

    async def _run_tool(
        self,
        call: NeMoGymResponseFunctionToolCall,
        params: NeMoGymResponseCreateParamsNonStreaming,
        cookies: RolloutCookies,
    ) -> NeMoGymFunctionCallOutput:
        arguments = _arguments_of(call)
        problem = _problem_with_name(call.name, params.tools)
        if problem is not None or isinstance(arguments, str):
            output = json.dumps({"error": problem or arguments})
        else:
            with cookies.seconds.spent_on("tools"):
                output = await self.call_tool(call.name, arguments, cookies)
        return NeMoGymFunctionCallOutput(call_id=call.call_id, output=output)

    async def call_tool(self, name: str, arguments: Mapping[str, Any], cookies: RolloutCookies) -> str:
        """Call a tool and return what the model is to read: the reply's body, or what was wrong (`tool_error`).

        Override it for another way to the tools. Trouble that is not the tool's fault has to be raised.

        Args:
            name: A tool that the model was offered; where it was offered none, whatever it named.
            arguments: The arguments of the call.
            cookies: The sessions of the rollout.
        """
        if not is_tool_name(name):
            return json.dumps({"error": f"'{name[:100]}' can't be called as a tool"})
        response = await self.server_client.post(
            server_name=self.config.resources_server.name,
            url_path=f"/{name}",
            json=arguments,
            cookies=cookies.resources,
        )
        if response.status in NOT_THE_TOOLS_FAULT:
            await raise_for_status(response)
        text = (await response.read()).decode("utf-8", "replace")
        _keep_cookies(response, cookies.resources)
        return text if response.ok else tool_error(name, response.status, text)

    def _cookies_of(self, request: Request) -> RolloutCookies:
        """Return what the caller sent, for both servers, as it does not say which cookie is whose; without our own."""
        own = self.get_session_middleware_key()
        sent = {name: value for name, value in request.cookies.items() if name != own}
        return RolloutCookies(resources=dict(sent), model=dict(sent))


def tool_error(name: str, status: int | None, text: str) -> str:
    """Return what the model is told of a tool that answered an error: a JSON object.

    Args:
        name: The tool, as the model called it.
        status: The HTTP status of the reply; None where it is not known.
        text: The body of the reply.
    """
    detail = _detail(text)
    if status == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
        return json.dumps({"error": f"there is no tool '{name}'"})
    told = {"error": detail} if status is None else {"error": detail, "status": status}
    return json.dumps(told, ensure_ascii=False)


def _as_items(params: NeMoGymResponseCreateParamsNonStreaming) -> list[Any]:
    if isinstance(params.input, str):
        return [NeMoGymEasyInputMessage(role="user", content=params.input)]
    return list(params.input)


def _arguments_of(call: NeMoGymResponseFunctionToolCall) -> dict[str, Any] | str:
    """Return the arguments of a call, or what is wrong with them."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return f"the arguments are no valid JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {json.dumps(arguments)[:100]}"
    return arguments


def _problem_with_name(name: str, tools: list[dict[str, Any]]) -> str | None:
    """Return why a tool may not be called, or None.

    A model may call what it was offered. Where a request offers no functions (its tools are told in words), any
    name goes.
    """
    offered = [str(tool.get("name")) for tool in tools if tool.get("type") == "function"]
    if offered and name not in offered:
        return f"there is no tool '{name[:100]}'; the tools are: {', '.join(offered)}"
    return None


def _detail(text: str) -> Any:
    """Return what an error reply says: its `detail` where it is JSON, else its text; shortened."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    detail = parsed.get("detail") if isinstance(parsed, dict) else None
    if detail is not None and len(text) <= _ERROR_TEXT_LIMIT:
        return detail
    return text[:_ERROR_TEXT_LIMIT] or "no further information"


def _keep_cookies(response: aiohttp.ClientResponse, kept: dict[str, str]) -> None:
    kept.update({name: morsel.value for name, morsel in response.cookies.items()})


if __name__ == "__main__":
    SimpleAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = SimpleAgent.run_webserver()
