"""Chat Completions: request, reply, and the messages of both.

Field names and meanings follow https://platform.openai.com/docs/api-reference/chat, and the additions of vLLM
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). As in the `openai` package, what is
sent (`...Param`) is a TypedDict and what is received is a model.
"""

import json
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field
from typing_extensions import TypedDict

from nemo_gym.wire.base import NoStreaming, WireModel, as_dict, as_plain, null_means
from nemo_gym.wire.items import JsonDict, TokenIDLogProbMixin

CHAT_REQUEST_PROVIDER_EXTENSION_FIELDS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "min_p",
        "min_tokens",
        "prompt_logprobs",
        "repetition_penalty",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
    }
)
"""Fields that vLLM and its relatives add to the request of the official API."""

_KEEP_UNKNOWN: Final = ConfigDict(extra="allow")


class NeMoGymChatCompletionContentPartTextParam(TypedDict):
    """Text within a message."""

    type: Required[Literal["text"]]
    text: Required[str]


class NeMoGymChatCompletionMessageToolCallFunctionParam(TypedDict):
    """Name and JSON-text arguments of a call in a message of the assistant."""

    name: Required[str]
    arguments: Required[str]


class NeMoGymChatCompletionMessageToolCallParam(TypedDict):
    """A call in a message of the assistant."""

    id: Required[str]
    type: Required[Literal["function"]]
    function: Required[NeMoGymChatCompletionMessageToolCallFunctionParam]


MessageContent: TypeAlias = str | list[dict[str, Any]] | list[NeMoGymChatCompletionContentPartTextParam]


class NeMoGymChatCompletionDeveloperMessageParam(TypedDict):
    """Instructions of the developer, for models that tell them from the system's."""

    __pydantic_config__ = _KEEP_UNKNOWN  # type: ignore[misc]
    role: Required[Literal["developer"]]
    content: Required[MessageContent]
    name: NotRequired[str]


class NeMoGymChatCompletionSystemMessageParam(TypedDict):
    """Instructions."""

    __pydantic_config__ = _KEEP_UNKNOWN  # type: ignore[misc]
    role: Required[Literal["system"]]
    content: Required[MessageContent]
    name: NotRequired[str]


class NeMoGymChatCompletionUserMessageParam(TypedDict):
    """What the user says; content parts may be images."""

    __pydantic_config__ = _KEEP_UNKNOWN  # type: ignore[misc]
    role: Required[Literal["user"]]
    content: Required[MessageContent]
    name: NotRequired[str]


class NeMoGymChatCompletionAssistantMessageParam(TypedDict):
    """What the model said in an earlier turn; `content` may be missing when it only called tools."""

    __pydantic_config__ = _KEEP_UNKNOWN  # type: ignore[misc]
    role: Required[Literal["assistant"]]
    content: NotRequired[MessageContent | None]
    refusal: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[NeMoGymChatCompletionMessageToolCallParam] | None]
    name: NotRequired[str]


class NeMoGymChatCompletionAssistantMessageForTrainingParam(NeMoGymChatCompletionAssistantMessageParam):
    """What the model said in an earlier turn, with its tokens; see `TokenIDLogProbMixin`."""

    prompt_token_ids: Required[list[int]]
    generation_token_ids: Required[list[int]]
    generation_log_probs: Required[list[float]]


class NeMoGymChatCompletionToolMessageParam(TypedDict):
    """The result of a call."""

    __pydantic_config__ = _KEEP_UNKNOWN  # type: ignore[misc]
    role: Required[Literal["tool"]]
    content: Required[MessageContent]
    tool_call_id: Required[str]


NeMoGymChatCompletionMessageParam: TypeAlias = Annotated[
    NeMoGymChatCompletionDeveloperMessageParam
    | NeMoGymChatCompletionSystemMessageParam
    | NeMoGymChatCompletionUserMessageParam
    | NeMoGymChatCompletionAssistantMessageParam
    | NeMoGymChatCompletionToolMessageParam,
    Discriminator("role"),
    BeforeValidator(as_dict),
]


class NeMoGymChatCompletionCreateParamsNonStreaming(WireModel):
    """A request to Chat Completions; fields not listed are kept and sent."""

    messages: list[NeMoGymChatCompletionMessageParam]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, int] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] | None = None
    n: int | None = None
    parallel_tool_calls: Annotated[bool, null_means(lambda: True)] = True
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    response_format: JsonDict | None = None
    seed: int | None = None
    service_tier: str | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream: NoStreaming = None
    temperature: float | None = None
    tool_choice: str | JsonDict | None = None
    tools: list[JsonDict] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None


def _as_json_text(value: Any) -> Any:
    """Return arguments that a backend sent as an object in the form the API prescribes: JSON text."""
    return json.dumps(value) if isinstance(value, dict) else value


class NeMoGymFunction(WireModel):
    """Name and arguments (JSON text, perhaps invalid) of a call."""

    arguments: Annotated[str, BeforeValidator(_as_json_text)]
    name: str


class NeMoGymChatCompletionMessageToolCall(WireModel):
    """The model's wish to call a function."""

    always_sent = ("type",)
    id: str
    function: NeMoGymFunction
    type: Literal["function"] = "function"


class NeMoGymChatCompletionMessage(WireModel):
    """What the model answered; `reasoning_content` (or `reasoning`) is vLLM's addition."""

    always_sent = ("role",)
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[NeMoGymChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class NeMoGymChatCompletionMessageForTraining(NeMoGymChatCompletionMessage, TokenIDLogProbMixin):
    """What the model answered, with its tokens."""


def _message_class(value: Any) -> Any:
    """Read a message with tokens as its training variant."""
    value = as_plain(value)
    if isinstance(value, dict) and value.get("generation_token_ids") is not None:
        return NeMoGymChatCompletionMessageForTraining.model_validate(value)
    return value


class NeMoGymChoice(WireModel):
    """One of the answers to a request; `finish_reason` is a free string, for backends have their own."""

    finish_reason: str | None
    index: int = 0
    message: Annotated[
        NeMoGymChatCompletionMessageForTraining | NeMoGymChatCompletionMessage,
        BeforeValidator(_message_class),
    ]
    logprobs: JsonDict | None = None


class NeMoGymChatCompletionUsage(WireModel):
    """Tokens of one model call."""

    completion_tokens: int = 0
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens_details: JsonDict | None = None
    prompt_tokens_details: JsonDict | None = None


class NeMoGymChatCompletion(WireModel):
    """A reply of Chat Completions."""

    always_sent = ("object",)
    id: str
    choices: list[NeMoGymChoice]
    created: int
    model: str
    object: Literal["chat.completion"] = "chat.completion"
    usage: Annotated[NeMoGymChatCompletionUsage | None, BeforeValidator(as_plain)] = Field(default=None)
