"""The items of a Responses API conversation: messages, calls, results, reasoning.

Field names and meanings follow https://platform.openai.com/docs/api-reference/responses. An item is told by its
`type`; a message by its content too, see `_item_tag`. An item of a type this module does not model becomes a
`NeMoGymUnknownItem` with all its fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from nemo_gym.wire.base import WireModel, as_dict, as_plain

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
JsonDict: TypeAlias = Annotated[dict[str, Any], BeforeValidator(as_dict)]

REQUIRED_TOKEN_METADATA_FIELDS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOKEN_METADATA_FIELDS: Final = REQUIRED_TOKEN_METADATA_FIELDS


class TokenIDLogProbMixin(WireModel):
    """What a trainer needs of a generation: its tokens exactly as sampled.

    Args:
        prompt_token_ids: The token ids the model was given, of the whole conversation so far.
        generation_token_ids: The sampled token ids.
        generation_log_probs: Natural-log probability of each sampled token, one per id.
    """

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]


# Content parts


class NeMoGymResponseInputText(WireModel):
    """Text given to the model."""

    always_sent = ("type",)
    text: str
    type: Literal["input_text"] = "input_text"


class NeMoGymResponseInputImage(WireModel):
    """An image given to the model, by URL (also a `data:` URL) or by the id of an uploaded file."""

    always_sent = ("type",)
    type: Literal["input_image"] = "input_image"
    detail: Literal["low", "high", "auto", "original"] | None = None
    image_url: str | None = None
    file_id: str | None = None


class NeMoGymResponseOutputText(WireModel):
    """Text the model wrote."""

    always_sent = ("type", "annotations")
    annotations: list[JsonDict] = Field(default_factory=list)
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: list[JsonDict] | None = None


class NeMoGymResponseOutputRefusal(WireModel):
    """The model's words for why it does not answer."""

    always_sent = ("type",)
    refusal: str
    type: Literal["refusal"] = "refusal"


class NeMoGymUnknownContent(WireModel):
    """A content part of a type that is not modelled here, kept whole."""

    type: str


class NeMoGymSummary(WireModel):
    """One part of the summary of the model's reasoning."""

    always_sent = ("type",)
    text: str
    type: Literal["summary_text"] = "summary_text"


class NeMoGymReasoningText(WireModel):
    """One part of the model's reasoning, in full."""

    always_sent = ("type",)
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


_CONTENT_TAGS: Final = frozenset({"input_text", "input_image", "output_text", "refusal"})


def _content_tag(value: Any) -> str:
    kind = _field(value, "type")
    return kind if kind in _CONTENT_TAGS else "unknown"


def _field(value: Any, key: str) -> Any:
    if type(value) is dict:
        return value.get(key)
    return value.get(key) if isinstance(value, (Mapping, WireModel)) else None


NeMoGymResponseContent: TypeAlias = Annotated[
    Annotated[NeMoGymResponseInputText, Tag("input_text")]
    | Annotated[NeMoGymResponseInputImage, Tag("input_image")]
    | Annotated[NeMoGymResponseOutputText, Tag("output_text")]
    | Annotated[NeMoGymResponseOutputRefusal, Tag("refusal")]
    | Annotated[NeMoGymUnknownContent, Tag("unknown")],
    Discriminator(_content_tag),
    BeforeValidator(as_plain),
]
NeMoGymResponseOutputContent: TypeAlias = Annotated[
    NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal, Discriminator("type"), BeforeValidator(as_plain)
]


# Items


class NeMoGymEasyInputMessage(WireModel):
    """A message to the model in its short form; with role `assistant`, the model's own earlier words."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[NeMoGymResponseContent]
    type: Literal["message"] = "message"


class NeMoGymMessage(WireModel):
    """A message to the model in the form in which the API gives it back: parts, and a status."""

    role: Literal["user", "system", "developer"]
    content: list[NeMoGymResponseContent]
    status: ItemStatus | None = None
    type: Literal["message"] = "message"


class NeMoGymResponseOutputMessage(WireModel):
    """A message from the model."""

    always_sent = ("role", "status", "type")
    id: str
    content: list[NeMoGymResponseOutputContent]
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "completed"
    type: Literal["message"] = "message"


class NeMoGymResponseFunctionToolCall(WireModel):
    """The model's wish to call a function; `arguments` is JSON text, perhaps invalid."""

    always_sent = ("type",)
    arguments: str
    call_id: str
    name: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: ItemStatus | None = None


class NeMoGymFunctionCallOutput(WireModel):
    """The result of a function call, for the model to read."""

    always_sent = ("type",)
    call_id: str
    output: str | list[NeMoGymResponseContent]
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: ItemStatus | None = None


NeMoGymResponseFunctionCallOutput: TypeAlias = NeMoGymFunctionCallOutput


class NeMoGymResponseReasoningItem(WireModel):
    """The model's reasoning before what it said or called."""

    always_sent = ("summary", "type")
    id: str
    summary: list[NeMoGymSummary] = Field(default_factory=list)
    type: Literal["reasoning"] = "reasoning"
    content: list[NeMoGymReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class NeMoGymResponseMcpCall(WireModel):
    """A call that the backend made itself on an MCP server."""

    always_sent = ("type",)
    id: str
    arguments: str
    name: str
    server_label: str
    type: Literal["mcp_call"] = "mcp_call"
    error: Any = None
    output: str | None = None
    status: str | None = None


class NeMoGymUnknownItem(WireModel):
    """An item of a type that is not modelled here, kept whole."""

    type: str


class NeMoGymEasyInputMessageForTraining(NeMoGymEasyInputMessage, TokenIDLogProbMixin):
    """An input message together with the tokens of the model that once wrote it."""


class NeMoGymMessageForTraining(NeMoGymMessage, TokenIDLogProbMixin):
    """A message in the API's long form together with tokens."""


class NeMoGymResponseOutputMessageForTraining(NeMoGymResponseOutputMessage, TokenIDLogProbMixin):
    """A message from the model together with its tokens."""


class NeMoGymResponseFunctionToolCallForTraining(NeMoGymResponseFunctionToolCall, TokenIDLogProbMixin):
    """A function call together with the tokens of the generation that asked for it."""


class NeMoGymResponseReasoningItemForTraining(NeMoGymResponseReasoningItem, TokenIDLogProbMixin):
    """A reasoning item together with the tokens of its generation."""


RESPONSES_TO_TRAIN: Final[dict[type[WireModel], type[TokenIDLogProbMixin]]] = {
    NeMoGymEasyInputMessage: NeMoGymEasyInputMessageForTraining,
    NeMoGymMessage: NeMoGymMessageForTraining,
    NeMoGymResponseOutputMessage: NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseFunctionToolCall: NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseReasoningItem: NeMoGymResponseReasoningItemForTraining,
}
"""Each item the model generates, and its variant that carries tokens."""

_TRAINABLE: Final = frozenset({"easy_message", "message", "output_message", "function_call", "reasoning"})
_TYPES: Final = frozenset({"function_call", "function_call_output", "reasoning", "mcp_call"})


def _item_tag(value: Any) -> str:
    """Name the model of an item of `input`.

    A message without a `type` is still a message. What the assistant said is an output message when it has an
    id and parts; the short form has no id.
    """
    known = _TAG_OF_CLASS.get(type(value))
    if known is not None:
        return known
    kind = _field(value, "type")
    if kind in _TYPES:
        tag = str(kind)
    elif kind == "message" or (kind is None and _field(value, "role") is not None):
        tag = _message_tag(value)
    else:
        return "unknown"
    if tag in _TRAINABLE and _field(value, "generation_token_ids") is not None:
        return f"{tag}_for_training"
    return tag


def _message_tag(value: Any) -> str:
    if isinstance(value, NeMoGymEasyInputMessage):
        return "easy_message"
    if not isinstance(_field(value, "content"), list):
        return "easy_message"
    if _field(value, "role") == "assistant":
        return "easy_message" if _field(value, "id") is None else "output_message"
    is_long = isinstance(value, NeMoGymMessage) or _field(value, "status") is not None
    return "message" if is_long else "easy_message"


def _output_item_tag(value: Any) -> str:
    """Name the model of an item of `output`: as in `input`, but the assistant speaks in the long form."""
    tag = _item_tag(value)
    if tag.startswith("easy_message") and _field(value, "role") == "assistant" and isinstance(value, Mapping):
        return tag.replace("easy_message", "output_message")
    return tag


_AnyItem: TypeAlias = (
    Annotated[NeMoGymEasyInputMessage, Tag("easy_message")]
    | Annotated[NeMoGymMessage, Tag("message")]
    | Annotated[NeMoGymResponseOutputMessage, Tag("output_message")]
    | Annotated[NeMoGymResponseFunctionToolCall, Tag("function_call")]
    | Annotated[NeMoGymFunctionCallOutput, Tag("function_call_output")]
    | Annotated[NeMoGymResponseReasoningItem, Tag("reasoning")]
    | Annotated[NeMoGymResponseMcpCall, Tag("mcp_call")]
    | Annotated[NeMoGymEasyInputMessageForTraining, Tag("easy_message_for_training")]
    | Annotated[NeMoGymMessageForTraining, Tag("message_for_training")]
    | Annotated[NeMoGymResponseOutputMessageForTraining, Tag("output_message_for_training")]
    | Annotated[NeMoGymResponseFunctionToolCallForTraining, Tag("function_call_for_training")]
    | Annotated[NeMoGymResponseReasoningItemForTraining, Tag("reasoning_for_training")]
    | Annotated[NeMoGymUnknownItem, Tag("unknown")]
)

# What has been parsed already tells by its class; both validation and serialisation ask.
_TAG_OF_CLASS: Final[dict[type, str]] = {part.__origin__: part.__metadata__[0].tag for part in get_args(_AnyItem)}

NeMoGymResponseInputItem: TypeAlias = Annotated[_AnyItem, Discriminator(_item_tag), BeforeValidator(as_plain)]
"""One item of a request's `input`."""

NeMoGymResponseOutputItem: TypeAlias = Annotated[_AnyItem, Discriminator(_output_item_tag), BeforeValidator(as_plain)]
"""One item of a reply's `output`; a trajectory's output holds tool results and later user turns as well."""

NeMoGymResponseInput: TypeAlias = list[NeMoGymResponseInputItem]
