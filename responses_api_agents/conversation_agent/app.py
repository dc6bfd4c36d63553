"""An agent that keeps the conversation: a caller sends only what is new, and a cookie.

`POST /v1/responses` adds the request's input to the session's conversation, asks the model with all of it, runs tools,
and answers the new items. `POST /notes` keeps what the model is told at every turn, and `POST /conversation` shows it
all. `POST /run` plays a dataset row with several turns of the user as one rollout.

- A conversation begins with the first request that brings no cookie. With several workers it lives on the one that
  began it, and session routing brings every later request there.
- A request whose cookie names a conversation that is not here (dropped for room, or the server was started again) is
  answered 410: it never goes on with an empty one.
- Requests of one conversation are taken one after another, in the order they came.
- A turn that fails leaves the conversation as it was, its budget too: the same request may be sent again. What tools
  have done at the resources server is done.
- A budget that is used up is no error: the response is `incomplete`, with the reason, and nothing is added.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from nemo_gym.base_responses_api_agent import SessionEndReason
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymIncompleteDetails,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseInput,
    NeMoGymResponseUsage,
    accumulate_response_usage,
)
from nemo_gym.server.base import add_model_route
from nemo_gym.server.middleware import NEW_SESSION_KEY
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from responses_api_agents.conversation_agent.conversations import (
    Conversation,
    Conversations,
    NoRoomError,
    ReleasedError,
    State,
)
from responses_api_agents.simple_agent.app import (
    MAX_STEPS_REASON,
    RolloutCookies,
    SimpleAgent,
    SimpleAgentConfig,
    SimpleAgentRunRequest,
    SimpleAgentVerifyResponse,
)

TOKEN_BUDGET_REASON: Final = "token_budget"
STEP_BUDGET_REASON: Final = "step_budget"

REMEMBER: Final = "remember"
REMEMBER_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "name": REMEMBER,
    "description": "Keep a note, which you are shown at every later turn of this conversation.",
    "parameters": {
        "type": "object",
        "properties": {"note": {"type": "string", "description": "What to keep, in a sentence."}},
        "required": ["note"],
        "additionalProperties": False,
    },
    "strict": True,
}

_HAS_CONVERSATION: Final = "conversation"
_MAX_NOTES: Final = 100
_MAX_NOTE_LENGTH: Final = 2_000


class ConversationAgentConfig(SimpleAgentConfig):
    """The settings of the agent.

    Attributes:
        resources_server: The environment whose tools are run; without one the calls that the model makes are answered
            to the caller, who brings the results with the next request.
        seed: The body of the `/seed_session` request with which a conversation's session at the resources server
            begins. Without it the caller seeds, and brings the resources server's cookie.
        max_steps: How many times the model is asked for one request at most; None for no limit.
        step_budget: How many times it is asked in one conversation; None for no limit.
        token_budget: How many tokens it may read and write in one conversation; None for no limit. It is looked at
            before the model is asked, so the last answer may go beyond it.
        remember_tool: Whether the model is offered the tool `remember`.
        max_sessions: How many conversations one worker keeps.
    """

    resources_server: ResourcesServerRef | None = None  # type: ignore[assignment]
    seed: dict[str, Any] | None = None
    step_budget: int | None = Field(default=200, ge=1)
    token_budget: int | None = Field(default=None, ge=1)
    remember_tool: bool = False
    max_sessions: int = Field(default=10_000, ge=1)


class ConversationAgentRunRequest(SimpleAgentRunRequest):
    """A dataset row; all its fields go to the resources server.

    Attributes:
        turns: What the user says after the answer to `responses_create_params`, turn by turn: a text or items.
    """

    turns: list[str | NeMoGymResponseInput] = Field(default_factory=list)


class NotesRequest(BaseModel):
    """Notes to add; none to see those there are."""

    model_config = ConfigDict(extra="forbid")

    add: list[str] = Field(default_factory=list)


class NotesResponse(BaseModel):
    """All notes of the conversation."""

    notes: list[str]


class ConversationResponse(NotesResponse):
    """The whole conversation, and what it has used."""

    items: list[dict[str, Any]]
    steps_used: int
    tokens_used: int


class ConversationAgent(SimpleAgent):
    """Keeps a conversation per session."""

    config: ConversationAgentConfig

    _conversations: Conversations = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make room for the conversations."""
        self._conversations = Conversations(self.config.max_sessions)

    def setup_webserver(self) -> FastAPI:
        """Return the application with the routes of a conversation."""
        app = super().setup_webserver()
        add_model_route(app, "/notes", self.notes, NotesResponse)
        add_model_route(app, "/conversation", self.conversation, ConversationResponse)
        return app

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> Response:
        """Take one turn: the request's input is added, and the reply's `output` holds what came of it."""
        new_items = _as_items(body.input)
        if not new_items:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "input is empty: send what is new")
        if body.previous_response_id is not None:
            detail = "previous_response_id is not for this agent: the session's cookie names the conversation"
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
        async with self._turn_of(request) as conversation:
            await self._begin_at_resources_server(conversation, request)
            state = conversation.state.fork()
            given = {name: getattr(body, name) for name in body.model_fields_set - {"input"}}
            state.params = state.params.model_copy(update=given)
            state.items.extend(new_items)
            reply = await self._answer(state)
            if state.steps > conversation.state.steps:
                conversation.state = state
        return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")

    async def notes(self, request: Request, body: NotesRequest) -> NotesResponse:
        """Add notes, and answer all there are."""
        async with self._turn_of(request) as conversation:
            notes = list(conversation.state.notes)
            for note in body.add:
                problem = _add_note(notes, note)
                if problem:
                    raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"{problem}; no note was added")
            conversation.state.notes = notes
            return NotesResponse(notes=notes)

    async def conversation(self, request: Request) -> ConversationResponse:
        """Show the conversation as it was after its last turn; it begins none."""
        conversation = self._find(request)
        if conversation is None:
            detail = "there is no conversation yet: the first POST /v1/responses begins one"
            raise HTTPException(HTTPStatus.NOT_FOUND, detail)
        state = conversation.state
        return ConversationResponse(
            items=[item.model_dump(mode="json", exclude_unset=True) for item in state.items],
            notes=state.notes,
            steps_used=state.steps,
            tokens_used=state.tokens,
        )

    async def run(  # type: ignore[override]
        self, request: Request, body: ConversationAgentRunRequest
    ) -> SimpleAgentVerifyResponse:
        """Run one rollout: seed, all turns, verify. It is a conversation of its own, over with the reply."""
        if self.config.resources_server is None:
            detail = f"{self.config.name} has no resources_server, so nothing could verify a rollout"
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, detail)
        sent = self._cookies_of(request)
        state = State(resources=sent.resources, model=sent.model, params=body.responses_create_params)
        row = body.model_dump(mode="json", exclude_unset=True)
        await self._seed(row, state)
        response = await self._play([body.responses_create_params.input, *body.turns], state)
        return await self._verify(row, response, state)

    async def call_tool(self, name: str, arguments: Mapping[str, Any], cookies: RolloutCookies) -> str:
        """Run `remember` here, and any other tool at the resources server."""
        assert isinstance(cookies, State)
        if name == REMEMBER and self._remembers(cookies):
            problem = _add_note(cookies.notes, arguments.get("note"))
            return json.dumps({"error": problem} if problem else {"notes": len(cookies.notes)})
        if self.config.resources_server is None:
            return json.dumps({"error": f"there is no tool '{name[:100]}'"}, ensure_ascii=False)
        return await super().call_tool(name, arguments, cookies)

    def release(self, session_id: str) -> None:
        """Forget a session's conversation; twice is fine."""
        self._conversations.release(session_id)

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        """Forget the conversation of a session that has ended, where `session_end` is configured."""
        self.release(session_id)

    # Turns

    async def _play(self, inputs: list[Any], state: State) -> NeMoGymResponse:
        """Take all turns of a row; the reply holds the whole trajectory, the user's later turns included."""
        output: list[Any] = []
        usage = None
        for at, given in enumerate(inputs):
            new_items = _as_items(given)
            state.items.extend(new_items)
            reply = await self._answer(state)
            output.extend([*new_items, *reply.output] if at else reply.output)
            usage = accumulate_response_usage(usage, reply.usage)
            if reply.incomplete_details is not None:
                break
        return reply.model_copy(update={"output": output, "usage": usage})

    async def _answer(self, state: State) -> NeMoGymResponse:
        """Alternate between model and tools as `SimpleAgent.respond` does, within the budget; `state` grows by it."""
        begun = len(state.items)
        usage: NeMoGymResponseUsage | None = None
        reply: NeMoGymResponse | None = None
        for steps in count():
            cut = self._used_up(state) or (MAX_STEPS_REASON if steps == self.config.max_steps else None)
            if cut is not None:
                break
            params = self._params(state)
            reply = await self._ask_model(params, state)
            usage = accumulate_response_usage(usage, reply.usage)
            state.steps += 1
            state.tokens += reply.usage.total_tokens if reply.usage else 0
            state.items.extend(reply.output)
            calls = [item for item in reply.output if isinstance(item, NeMoGymResponseFunctionToolCall)]
            if reply.incomplete_details is not None:
                # Its calls may be cut off too. They need a result all the same, or no model takes the conversation.
                state.items.extend(_not_run(call) for call in calls)
                break
            runnable = [call for call in calls if self._runs(call.name, state)]
            state.items.extend([await self._run_tool(call, params, state) for call in runnable])
            if not runnable or len(runnable) < len(calls):
                break
        update: dict[str, Any] = {"output": state.items[begun:], "usage": usage}
        if cut is not None:
            update |= {"status": "incomplete", "incomplete_details": NeMoGymIncompleteDetails(reason=cut)}
        reply = reply or _unasked(state)
        return reply.model_copy(update={**update, "metadata": {**(reply.metadata or {}), **self._account(state)}})

    def _params(self, state: State) -> NeMoGymResponseCreateParamsNonStreaming:
        """Return the request to the model: the notes and the whole conversation."""
        shown: list[Any] = []
        if state.notes:
            text = "\n".join(["Notes of this conversation:", *(f"- {note}" for note in state.notes)])
            shown = [NeMoGymEasyInputMessage(role="developer", content=text)]
        update: dict[str, Any] = {"input": [*shown, *state.items]}
        if self._remembers(state):
            update["tools"] = [*state.params.tools, REMEMBER_TOOL]
        return state.params.model_copy(update=update)

    def _remembers(self, state: State) -> bool:
        """Whether `remember` is ours: a tool that the caller offers by this name is the caller's."""
        return self.config.remember_tool and REMEMBER not in _names(state.params.tools)

    def _runs(self, name: str, state: State) -> bool:
        """Whether a call is run here; without a resources server the caller runs the tools that it has offered."""
        return self.config.resources_server is not None or name not in _names(state.params.tools)

    def _used_up(self, state: State) -> str | None:
        """Return which budget is used up, if one is."""
        if self.config.token_budget is not None and state.tokens >= self.config.token_budget:
            return TOKEN_BUDGET_REASON
        if self.config.step_budget is not None and state.steps >= self.config.step_budget:
            return STEP_BUDGET_REASON
        return None

    def _account(self, state: State) -> dict[str, str]:
        """Return what is used and left, as a reply's metadata: texts."""
        account = {"steps_used": str(state.steps), "tokens_used": str(state.tokens)}
        if self.config.step_budget is not None:
            account["steps_left"] = str(max(0, self.config.step_budget - state.steps))
        if self.config.token_budget is not None:
            account["tokens_left"] = str(max(0, self.config.token_budget - state.tokens))
        return account

    # Sessions

    @asynccontextmanager
    async def _turn_of(self, request: Request) -> AsyncIterator[Conversation]:
        """Hold the session's conversation for one request, a new one where the session is new."""
        conversation = self._find(request)
        if conversation is None:
            try:
                conversation = self._conversations.begin(request.session[SESSION_ID_KEY])
            except NoRoomError as error:
                detail = f"all {self.config.max_sessions} conversations of this worker have a request in hand"
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail) from error
            request.session[_HAS_CONVERSATION] = True
        try:
            async with conversation.turn():
                yield conversation
        except ReleasedError as error:
            raise _gone() from error

    def _find(self, request: Request) -> Conversation | None:
        """Return the session's conversation; None where the session is new and has none.

        Raises:
            HTTPException: The request's cookie says that there was one, or is no good (410).
        """
        conversation = self._conversations.find(request.session[SESSION_ID_KEY])
        if conversation is not None:
            return conversation
        no_good = NEW_SESSION_KEY in request.scope and self.get_session_middleware_key() in request.cookies
        if no_good or _HAS_CONVERSATION in request.session:
            raise _gone()
        return None

    async def _begin_at_resources_server(self, conversation: Conversation, request: Request) -> None:
        """Have a session at the resources server: the one that the caller names, or one of our own."""
        if self.config.resources_server is None:
            return
        if self.config.seed is None:
            conversation.state.resources.update(self._cookies_of(request).resources)
        elif not conversation.seeded:
            await self._ask_resources_server("/seed_session", self.config.seed, conversation.state)
            conversation.seeded = True


def _gone() -> HTTPException:
    detail = (
        "the conversation of this session is not here any more: it was dropped, or the server has been started again "
        "since, or its cookie is no longer valid. Begin a new conversation, without this cookie."
    )
    return HTTPException(HTTPStatus.GONE, detail)


def _as_items(given: str | list[Any]) -> list[Any]:
    if isinstance(given, str):
        return [NeMoGymEasyInputMessage(role="user", content=given)] if given else []
    return list(given)


def _add_note(notes: list[str], note: Any) -> str | None:
    """Add a note; return why not, where it can't be."""
    if not isinstance(note, str) or not note.strip():
        return "a note is a text that is not blank"
    if len(note) > _MAX_NOTE_LENGTH:
        return f"a note has at most {_MAX_NOTE_LENGTH} characters, and this one {len(note)}"
    if len(notes) >= _MAX_NOTES:
        return f"a conversation has at most {_MAX_NOTES} notes"
    notes.append(note.strip())
    return None


def _not_run(call: NeMoGymResponseFunctionToolCall) -> NeMoGymFunctionCallOutput:
    output = json.dumps({"error": "not run, as the reply that made this call was cut off"})
    return NeMoGymFunctionCallOutput(call_id=call.call_id, output=output)


def _names(tools: list[dict[str, Any]]) -> set[str]:
    return {str(tool.get("name")) for tool in tools}


def _unasked(state: State) -> NeMoGymResponse:
    """Return the response of a turn in which the model was not asked."""
    return NeMoGymResponse(
        id=f"resp_{uuid.uuid4().hex}", created_at=int(time.time()), model=state.params.model or "", output=[]
    )


if __name__ == "__main__":
    ConversationAgent.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = ConversationAgent.run_webserver()
