"""Responses API <-> Chat Completions, for backends that speak only the latter.

The two cut a conversation differently. A turn of the model is one chat message with reasoning, text and tool
calls in it; in the Responses API it is a reasoning item, a message, and one `function_call` per call. On the
way out neighbouring items of the model are joined into one message; on the way back the message is taken
apart.

What the other API can't say is an error that names it, never silently left out: a request that lost an item
or its `previous_response_id` would be answered, wrongly. Only fields that change nothing in the answer are
left out; see `_WITHOUT_EFFECT`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from nemo_gym.errors import ConversionError
from nemo_gym.openai_utils import (
    REQUIRED_TOKEN_METADATA_FIELDS,
    RESPONSES_TO_TRAIN,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChoice,
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymIncompleteDetails,
    NeMoGymMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymSummary,
)
from nemo_gym.wire.conversion import (
    chat_content_to_parts,
    chat_content_to_text,
    chat_usage_to_responses,
    content_to_chat,
    join_think_tags,
    logprobs_to_responses,
    split_think_tags,
    text_format_to_chat,
    tool_choice_to_chat,
    tool_to_chat,
    usage_detail as _usage_detail,  # noqa: F401 - environments import it from here
)
from nemo_gym.wire.tokens import choice_with_tokens, token_fields

ResponsesItem: TypeAlias = Any
"""An item of `input` or `output`, as a model of `nemo_gym.openai_utils`."""

_RENAMED: Final = {"max_output_tokens": "max_tokens"}
_CONVERTED: Final = frozenset(
    {"input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"}
)
_WITHOUT_EFFECT: Final = frozenset({"include", "max_tool_calls", "metadata", "store", "stream", "truncation"})
_STATEFUL: Final = frozenset({"background", "conversation", "previous_response_id", "prompt"})

_ECHOED: Final = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
}
_MODEL_ITEMS: Final = (NeMoGymResponseOutputMessage, NeMoGymResponseFunctionToolCall, NeMoGymResponseReasoningItem)

_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass
class _AssistantTurn:
    """One message of the assistant, while the items that make it up are read."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, Any] | None = None

    @property
    def has_spoken(self) -> bool:
        """Whether the turn has its words and no calls, so that further words or thoughts are the next turn's.

        A turn with calls stays open until their results come: those must follow the one message that has all
        calls.
        """
        return bool(self.texts or self.refusals) and not self.tool_calls


class VLLMConverterResponsesToChatCompletionsState:
    """The chat messages so far, and the turn of the assistant that is still being put together."""

    def __init__(self, converter: "ResponsesConverter") -> None:
        self._converter = converter
        self._messages: list[dict[str, Any]] = []
        self._turn: _AssistantTurn | None = None

    def add_message(self, message: dict[str, Any]) -> None:
        """Add a message that is not the assistant's; it ends the assistant's turn."""
        self._end_turn()
        self._messages.append(message)

    def turn(self, *, after_words: bool = False) -> _AssistantTurn:
        """Return the turn to add an item to.

        Args:
            after_words: Whether the item may follow the words of the same turn, as a tool call does.
        """
        if self._turn is not None and self._turn.has_spoken and not after_words:
            self._end_turn()
        if self._turn is None:
            self._turn = _AssistantTurn()
        return self._turn

    def finish(self) -> list[dict[str, Any]]:
        """Return all messages."""
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages.append(self._converter.assistant_message(turn))


class ResponsesConverter(BaseModel):
    """Converts for a Chat Completions backend.

    Args:
        uses_reasoning_parser: Whether the backend takes and gives the model's reasoning in a field of its own
            (`reasoning_content`). Otherwise it stands in the text, between `<think>` and `</think>`, and is
            taken from there and put back there.
        keeps_developer_role: Whether the backend knows the role `developer`. Most chat templates know only
            `system`, and some silently leave out what they don't know.
        return_token_id_information: Whether replies must carry token ids and log probabilities, for training.
    """

    model_config = ConfigDict(frozen=True)

    uses_reasoning_parser: bool = True
    keeps_developer_role: bool = False
    return_token_id_information: bool = False

    # Requests

    def responses_to_chat_completion_create_params(
        self, params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """Return the chat request that asks for the same as `params`.

        Raises:
            ConversionError: When something in it has no counterpart, or lacks a field that the API requires.
        """
        try:
            request = self._chat_request(params)
        except KeyError as error:
            raise ConversionError(f"the request has an object without its field {error}") from error
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(request)

    def _chat_request(self, params: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        given = params.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"input"})
        given = {key: value for key, value in given.items() if value is not None}
        if stateful := [key for key in sorted(_STATEFUL) if given.get(key)]:
            raise ConversionError(f"{stateful[0]} needs a backend that keeps state; Chat Completions keeps none")
        request: dict[str, Any] = {
            _RENAMED.get(key, key): value
            for key, value in given.items()
            if key not in _CONVERTED | _WITHOUT_EFFECT | _STATEFUL
        }
        request["messages"] = self.input_to_messages(params.input, params.instructions)
        # Backends refuse the choice among tools where there are none.
        if params.tools:
            request["tools"] = [tool_to_chat(tool) for tool in params.tools]
            if "tool_choice" in given:
                request["tool_choice"] = tool_choice_to_chat(params.tool_choice)
            if "parallel_tool_calls" in given:
                request["parallel_tool_calls"] = params.parallel_tool_calls
        if params.text is not None:
            request |= text_format_to_chat(params.text)
        if params.reasoning is not None and params.reasoning.get("effort") is not None:
            request["reasoning_effort"] = params.reasoning["effort"]
        if _wants_logprobs(params):
            request["logprobs"] = True
        return request

    def input_to_messages(
        self, items: str | Iterable[ResponsesItem], instructions: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the chat messages for a request's `input` and `instructions`.

        Raises:
            ConversionError: When an item has no counterpart.
        """
        state = VLLMConverterResponsesToChatCompletionsState(self)
        if instructions is not None:
            state.add_message({"role": "system", "content": instructions})
        if isinstance(items, str):
            state.add_message({"role": "user", "content": items})
            return state.finish()
        for item in items:
            self._add_item(item, state)
        return state.finish()

    def _add_item(self, item: ResponsesItem, state: VLLMConverterResponsesToChatCompletionsState) -> None:
        if isinstance(item, (NeMoGymEasyInputMessage, NeMoGymMessage)) and item.role != "assistant":
            role = "system" if item.role == "developer" and not self.keeps_developer_role else item.role
            state.add_message({"role": role, "content": content_to_chat(item.content)})
            return
        if isinstance(item, NeMoGymFunctionCallOutput):
            content = content_to_chat(item.output)
            state.add_message({"role": "tool", "tool_call_id": item.call_id, "content": content})
            return
        if isinstance(item, (NeMoGymEasyInputMessage, NeMoGymResponseOutputMessage)):
            turn = state.turn()
            _add_words(turn, item.content)
        elif isinstance(item, NeMoGymResponseReasoningItem):
            turn = state.turn()
            turn.reasoning.append("".join(part.text for part in item.content or item.summary))
        elif isinstance(item, NeMoGymResponseFunctionToolCall):
            turn = state.turn(after_words=True)
            function = {"name": item.name, "arguments": item.arguments}
            turn.tool_calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            raise ConversionError(f"an input item of type {item.type!r} can't be said in Chat Completions")
        if self.return_token_id_information:
            turn.tokens = token_fields(item, REQUIRED_TOKEN_METADATA_FIELDS) or turn.tokens

    def assistant_message(self, turn: _AssistantTurn) -> dict[str, Any]:
        """Return the chat message of one turn of the assistant."""
        reasoning = "\n".join(turn.reasoning) if turn.reasoning else None
        text = "".join(turn.texts) if turn.texts else None
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning is not None and not self.uses_reasoning_parser:
            text = join_think_tags(reasoning, text or "")
        elif reasoning is not None:
            message["reasoning_content"] = reasoning
        # Only a message that calls tools may be without content.
        message["content"] = text if text is not None or turn.tool_calls else ""
        if turn.refusals:
            message["refusal"] = "".join(turn.refusals)
        if turn.tool_calls:
            message["tool_calls"] = turn.tool_calls
        return message | (turn.tokens or {})

    # Replies

    def chat_completion_to_response(
        self, params: NeMoGymResponseCreateParamsNonStreaming, completion: NeMoGymChatCompletion
    ) -> NeMoGymResponse:
        """Return the reply to `params` for the chat reply that its conversion got.

        Raises:
            ConversionError: When the reply has no choices, or no token ids although they are needed.
        """
        if not completion.choices:
            raise ConversionError("the reply has no choices")
        choice = choice_with_tokens(completion)
        if self.return_token_id_information and token_fields(choice.message, REQUIRED_TOKEN_METADATA_FIELDS) is None:
            raise ConversionError(
                "the reply has no token ids and log probabilities, which return_token_id_information needs"
            )
        items = self.postprocess_chat_response(choice)
        if _wants_logprobs(params):
            _attach_logprobs(items, choice)
        reason = _INCOMPLETE_REASONS.get(choice.finish_reason or "")
        # The reply names the request's settings, as the Responses API does.
        settings = params.model_dump(mode="json", by_alias=True, exclude_unset=True, include=_ECHOED)
        return NeMoGymResponse.model_validate(
            settings
            | {
                "id": f"resp_{uuid4().hex}",
                "created_at": completion.created or int(time.time()),
                "model": completion.model,
                "output": items,
                "status": "incomplete" if reason else "completed",
                "incomplete_details": NeMoGymIncompleteDetails(reason=reason) if reason else None,
                "usage": chat_usage_to_responses(completion.usage),
            }
        )

    def postprocess_chat_response(self, choice: NeMoGymChoice) -> list[ResponsesItem]:
        """Return the output items of one choice; the last is incomplete where the model was cut off."""
        items = self.postprocess_assistant_message_dict(choice.message.model_dump(exclude_unset=True))
        if choice.finish_reason in _INCOMPLETE_REASONS:
            items[-1].status = "incomplete"
        return items

    def postprocess_assistant_message_dict(self, message: Mapping[str, Any]) -> list[ResponsesItem]:
        """Return the items of one message of the assistant: reasoning, words, calls; at least one.

        The message's tokens, where it has them, belong to all its items together and are put on the last.
        """
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        text = chat_content_to_text(message.get("content"))
        if not self.uses_reasoning_parser and reasoning is None:
            reasoning, text = split_think_tags(text)
        calls = message.get("tool_calls") or []
        refusal = message.get("refusal")
        items: list[ResponsesItem] = []
        if reasoning is not None:
            summary = [NeMoGymSummary(text=reasoning)]
            items.append(NeMoGymResponseReasoningItem(id=f"rs_{uuid4().hex}", summary=summary, status="completed"))
        if text or refusal or not (items or calls):
            items.append(_output_message(text, refusal))
        items.extend(_function_call(call) for call in calls)
        tokens = token_fields(message, REQUIRED_TOKEN_METADATA_FIELDS)
        if tokens is not None:
            last = items[-1]
            items[-1] = RESPONSES_TO_TRAIN[type(last)].model_validate(last.model_dump(exclude_unset=True) | tokens)
        return items

    def chat_completions_messages_to_responses_items(
        self, messages: Iterable[Mapping[str, Any]]
    ) -> list[ResponsesItem]:
        """Return the items of a chat conversation: the inverse of `input_to_messages`."""
        items: list[ResponsesItem] = []
        for message in messages:
            role = message["role"]
            if role == "assistant":
                items.extend(self.postprocess_assistant_message_dict(message))
                continue
            content = chat_content_to_parts(message.get("content"))
            if role == "tool":
                fields = {"call_id": message["tool_call_id"], "output": content}
                items.append(NeMoGymFunctionCallOutput.model_validate(fields))
            else:
                items.append(NeMoGymEasyInputMessage.model_validate({"role": role, "content": content}))
        return items


class VLLMConverter(ResponsesConverter):
    """Converts for vLLM, and asks it for token ids in its own way when they are needed."""

    def responses_to_chat_completion_create_params(
        self, params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """Return the chat request that asks for the same as `params`; see the base class."""
        request = super().responses_to_chat_completion_create_params(params)
        if not self.return_token_id_information:
            return request
        extra = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(
            request.model_dump(exclude_unset=True) | extra
        )


def split_responses_input_output_items(
    items: Sequence[ResponsesItem],
) -> tuple[list[ResponsesItem], list[ResponsesItem]]:
    """Split a conversation into what the model was first given and all from its first own item on."""
    for index, item in enumerate(items):
        if isinstance(item, _MODEL_ITEMS) or item.get("role") == "assistant":
            return list(items[:index]), list(items[index:])
    return list(items), []


def _add_words(turn: _AssistantTurn, content: str | list[Any]) -> None:
    """Add the text and the refusals of a message to a turn."""
    if isinstance(content, str):
        turn.texts.append(content)
        return
    for part in content:
        if part.type == "refusal":
            turn.refusals.append(part["refusal"])
        elif "text" in part:
            turn.texts.append(part["text"])
        else:
            raise ConversionError(f"a message of the assistant can't hold a part of type {part.type!r} in chat")


def _output_message(text: str, refusal: str | None) -> NeMoGymResponseOutputMessage:
    content: list[NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal] = []
    if text or not refusal:
        content.append(NeMoGymResponseOutputText(text=text))
    if refusal:
        content.append(NeMoGymResponseOutputRefusal(refusal=refusal))
    return NeMoGymResponseOutputMessage(id=f"msg_{uuid4().hex}", content=content)


def _function_call(call: Mapping[str, Any]) -> NeMoGymResponseFunctionToolCall:
    function = call["function"]
    return NeMoGymResponseFunctionToolCall(
        id=f"fc_{uuid4().hex}",
        call_id=call.get("id") or f"call_{uuid4().hex}",
        name=function["name"],
        arguments=function["arguments"],
        status="completed",
    )


def _wants_logprobs(params: NeMoGymResponseCreateParamsNonStreaming) -> bool:
    return params.top_logprobs is not None or "message.output_text.logprobs" in (params.include or ())


def _attach_logprobs(items: Iterable[ResponsesItem], choice: NeMoGymChoice) -> None:
    """Put a choice's log probabilities on its text, where the text is all the model wrote."""
    written = list(items)
    if len(written) == 1 and isinstance(written[0], NeMoGymResponseOutputMessage):
        part = written[0].content[0]
        if isinstance(part, NeMoGymResponseOutputText):
            part.logprobs = logprobs_to_responses(choice.logprobs)
