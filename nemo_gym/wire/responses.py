"""The Responses API: request, reply and usage. Names and meanings follow OpenAI's reference; see `items`."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from nemo_gym.wire.base import NoStreaming, WireModel, null_means
from nemo_gym.wire.items import (
    JsonDict,
    NeMoGymResponseInput,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputText,
)

_ParallelToolCalls: TypeAlias = Annotated[bool, null_means(lambda: True)]
_ToolChoice: TypeAlias = Annotated[str | JsonDict, null_means(lambda: "auto")]
_Tools: TypeAlias = Annotated[list[JsonDict], null_means(list)]


class NeMoGymFunctionToolParam(TypedDict):
    """A function offered to the model; `parameters` is a JSON Schema object."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None
    strict: NotRequired[bool | None]
    description: NotRequired[str | None]


class NeMoGymResponseInputTokensDetails(WireModel):
    """How the input tokens were come by."""

    always_sent = ("cached_tokens", "cache_write_tokens")
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class NeMoGymResponseOutputTokensDetails(WireModel):
    """What the output tokens were spent on."""

    always_sent = ("reasoning_tokens",)
    reasoning_tokens: int = 0


class NeMoGymResponseUsage(WireModel):
    """Tokens of one model call, or of all calls of a trajectory."""

    always_sent = ("input_tokens_details", "output_tokens_details")
    input_tokens: int
    input_tokens_details: NeMoGymResponseInputTokensDetails = Field(default_factory=NeMoGymResponseInputTokensDetails)
    output_tokens: int
    output_tokens_details: NeMoGymResponseOutputTokensDetails = Field(
        default_factory=NeMoGymResponseOutputTokensDetails
    )
    total_tokens: int


def accumulate_response_usage(
    total: NeMoGymResponseUsage | None, additional: NeMoGymResponseUsage | None
) -> NeMoGymResponseUsage | None:
    """Return the sum of two usages, details and unknown counts included; None stands for "not reported".

    Args:
        total: The usage so far.
        additional: The usage of one more call. Neither argument is changed.
    """
    if total is None or additional is None:
        kept = total if additional is None else additional
        return kept.model_copy(deep=True) if kept is not None else None
    summed = _sum_counts(total.model_dump(), additional.model_dump())
    return NeMoGymResponseUsage.model_validate(summed)


def _sum_counts(left: Any, right: Any) -> Any:
    """Add numbers, merge dicts key by key; where only one side has a value, keep that."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _sum_counts(left.get(key), right.get(key)) for key in left | right}
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left + right
    return right if left is None else left


class NeMoGymIncompleteDetails(WireModel):
    """Why a response is incomplete: `max_output_tokens`, `content_filter`, ..."""

    reason: str | None = None


class NeMoGymResponseError(WireModel):
    """Why a response failed."""

    code: str
    message: str


class NeMoGymResponseCreateParamsNonStreaming(WireModel):
    """A request to the Responses API; a dataset row's `responses_create_params`.

    `model_dump(exclude_unset=True)` is the request as it was given. Fields not listed are kept and sent: a
    backend may know more than this class.
    """

    input: str | NeMoGymResponseInput
    background: bool | None = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    parallel_tool_calls: _ParallelToolCalls = True
    previous_response_id: str | None = None
    prompt: JsonDict | None = None
    reasoning: JsonDict | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: NoStreaming = None
    temperature: float | None = None
    text: JsonDict | None = None
    tool_choice: _ToolChoice = "auto"
    tools: _Tools = Field(default_factory=list)
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None


class NeMoGymResponse(WireModel):
    """A reply of the Responses API; a rollout's trajectory is one as well, with every turn in `output`."""

    always_sent = ("object", "parallel_tool_calls", "tool_choice", "tools")
    id: str
    created_at: float
    model: str
    object: Literal["response"] = "response"
    output: list[NeMoGymResponseOutputItem]
    parallel_tool_calls: _ParallelToolCalls = True
    tool_choice: _ToolChoice = "auto"
    tools: _Tools = Field(default_factory=list)
    error: NeMoGymResponseError | None = None
    incomplete_details: NeMoGymIncompleteDetails | None = None
    instructions: str | list[JsonDict] | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    reasoning: JsonDict | None = None
    status: str | None = None
    temperature: float | None = None
    text: JsonDict | None = None
    top_p: float | None = None
    truncation: str | None = None
    usage: NeMoGymResponseUsage | None = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """All text the model wrote, in order, joined without a separator."""
        return "".join(
            part.text
            for item in self.output
            if isinstance(item, NeMoGymResponseOutputMessage)
            for part in item.content
            if isinstance(part, NeMoGymResponseOutputText)
        )
