"""Wire types and the backend client, through the door that environments use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai.types.chat as sdk_chat
import openai.types.responses as sdk
import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as SdkChatParams,
)
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as SdkParams
from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_gym import openai_utils
from nemo_gym.errors import ModelBackendError
from nemo_gym.openai_utils import (
    RESPONSES_TO_TRAIN,
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymEasyInputMessage,
    NeMoGymEasyInputMessageForTraining,
    NeMoGymFunctionCallOutput,
    NeMoGymMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseInputText,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseMcpCall,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    NeMoGymUnknownContent,
    NeMoGymUnknownItem,
    accumulate_response_usage,
)
from nemo_gym.wire.backend import parse_retry_after
from tests.fake_backend import FakeBackend, running_fake_backend

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}

OUTPUT_MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
}
REFUSAL = OUTPUT_MESSAGE | {"content": [{"type": "refusal", "refusal": "No."}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "fc_1", "status": "completed"}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
EASY = {"role": "user", "content": "Hello"}
EASY_PARTS = {
    "role": "user",
    "type": "message",
    "content": [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
    ],
}
LONG_MESSAGE = EASY_PARTS | {"status": "completed"}
MCP_CALL = {"type": "mcp_call", "id": "m", "arguments": "{}", "name": "f", "server_label": "s"}
WEB_SEARCH = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "q", "queries": ["q"]},
}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": "Adds."}

INPUT_ITEMS = [
    EASY,
    EASY_PARTS,
    LONG_MESSAGE,
    OUTPUT_MESSAGE,
    REFUSAL,
    CALL,
    CALL_OUTPUT,
    REASONING,
    MCP_CALL,
    WEB_SEARCH,
]
OUTPUT_ITEMS = [OUTPUT_MESSAGE, REFUSAL, CALL, REASONING, MCP_CALL, WEB_SEARCH]

REQUEST = {
    "model": "m",
    "input": INPUT_ITEMS,
    "instructions": "Be brief.",
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "add"},
    "parallel_tool_calls": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 100,
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "include": ["reasoning.encrypted_content"],
    "truncation": "disabled",
    "store": False,
    "user": "u",
}
RESPONSE = {
    "id": "resp_1",
    "created_at": 1.0,
    "model": "m",
    "object": "response",
    "output": OUTPUT_ITEMS,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [TOOL],
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "usage": {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 3,
    },
}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT_REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Truly."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "Three.", "refusal": None},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_tokens": 5,
    "stop": ["."],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
}
CHAT_COMPLETION = {
    "id": "chat_1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": "Hm.", "refusal": None, "tool_calls": [CHAT_CALL]},
            "logprobs": {"content": [{"token": "H", "logprob": -1.0, "bytes": [72], "top_logprobs": []}]},
        }
    ],
    "usage": {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}

OURS_AND_THEIRS = pytest.mark.parametrize(
    ("ours", "theirs", "payload"),
    [
        (NeMoGymResponse, sdk.Response, RESPONSE),
        (NeMoGymResponseCreateParamsNonStreaming, SdkParams, REQUEST),
        (NeMoGymChatCompletion, sdk_chat.ChatCompletion, CHAT_COMPLETION),
        (NeMoGymChatCompletionCreateParamsNonStreaming, SdkChatParams, CHAT_REQUEST),
        (NeMoGymResponseOutputMessage, sdk.ResponseOutputMessage, OUTPUT_MESSAGE),
        (NeMoGymResponseFunctionToolCall, sdk.ResponseFunctionToolCall, CALL),
        (NeMoGymResponseReasoningItem, sdk.ResponseReasoningItem, REASONING),
        (NeMoGymResponseUsage, sdk.ResponseUsage, RESPONSE["usage"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)


def items_of(*items: Any) -> list[Any]:
    return list(NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": items}).input)


def output_of(*items: Any) -> list[Any]:
    return NeMoGymResponse.model_validate(RESPONSE | {"output": items}).output


# Agreement with the official SDK


def validated(kind: Any, payload: Any) -> Any:
    """Validate wholly, also what the official types declare as an Iterable."""
    adapter = TypeAdapter(kind)  # It has to live until all is consumed.
    return consumed(adapter.validate_python(payload))


def consumed(value: Any) -> Any:
    """Walk through a validated value: pydantic checks what is declared an Iterable only while it is iterated."""
    if isinstance(value, dict):
        return {key: consumed(item) for key, item in value.items()}
    if isinstance(value, Iterator | list):
        return [consumed(item) for item in value]
    return value


@OURS_AND_THEIRS
def test_what_we_send_is_what_we_were_given_and_valid_for_the_official_sdk(
    ours: type[BaseModel], theirs: Any, payload: dict[str, Any]
) -> None:
    sent = ours.model_validate(payload).model_dump(mode="json", exclude_unset=True)
    assert sent == payload
    validated(theirs, sent)


@OURS_AND_THEIRS
def test_what_the_official_sdk_sends_is_valid_for_us(
    ours: type[BaseModel], theirs: Any, payload: dict[str, Any]
) -> None:
    sent = TypeAdapter(Any).dump_python(validated(theirs, payload), mode="json", exclude_unset=True)
    assert ours.model_validate(sent).model_dump(mode="json", exclude_unset=True) == payload


@pytest.mark.parametrize(
    ("item", "theirs"),
    [
        (NeMoGymResponseOutputText(text="x"), sdk.ResponseOutputText),
        (NeMoGymResponseOutputRefusal(refusal="x"), sdk.ResponseOutputRefusal),
        (
            NeMoGymResponseOutputMessage(id="m", content=[NeMoGymResponseOutputText(text="x")]),
            sdk.ResponseOutputMessage,
        ),
        (NeMoGymResponseFunctionToolCall(call_id="c", name="n", arguments="{}"), sdk.ResponseFunctionToolCall),
        (NeMoGymResponseReasoningItem(id="r"), sdk.ResponseReasoningItem),
        (NeMoGymResponseUsage(input_tokens=1, output_tokens=1, total_tokens=2), sdk.ResponseUsage),
        (NeMoGymResponse(id="r", created_at=1, model="m", output=[]), sdk.Response),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_defaults_that_the_api_requires_are_sent(item: BaseModel, theirs: type[BaseModel]) -> None:
    theirs.model_validate(item.model_dump(exclude_unset=True), strict=True)


def test_objects_of_the_official_sdk_can_be_put_into_ours() -> None:
    call = sdk.ResponseFunctionToolCall(call_id="c", name="n", arguments="{}", type="function_call")
    message = sdk.ResponseOutputMessage.model_validate(OUTPUT_MESSAGE)
    assert [type(item) for item in output_of(call, message)] == [
        NeMoGymResponseFunctionToolCall,
        NeMoGymResponseOutputMessage,
    ]
    tool = sdk.FunctionTool.model_validate(TOOL)
    assert NeMoGymResponseCreateParamsNonStreaming(input="x", tools=[tool]).tools == [TOOL]


# Telling items apart


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (EASY, NeMoGymEasyInputMessage),
        (EASY_PARTS, NeMoGymEasyInputMessage),
        ({"role": "assistant", "content": "Hi."}, NeMoGymEasyInputMessage),
        ({"role": "assistant", "content": OUTPUT_MESSAGE["content"]}, NeMoGymEasyInputMessage),
        (LONG_MESSAGE, NeMoGymMessage),
        (OUTPUT_MESSAGE, NeMoGymResponseOutputMessage),
        (REFUSAL, NeMoGymResponseOutputMessage),
        (CALL, NeMoGymResponseFunctionToolCall),
        (CALL_OUTPUT, NeMoGymFunctionCallOutput),
        (REASONING, NeMoGymResponseReasoningItem),
        (MCP_CALL, NeMoGymResponseMcpCall),
        (WEB_SEARCH, NeMoGymUnknownItem),
        (CALL | TOKENS, NeMoGymResponseFunctionToolCallForTraining),
        ({"role": "assistant", "content": "Hi."} | TOKENS, NeMoGymEasyInputMessageForTraining),
    ],
)
def test_each_input_item_gets_its_own_type_and_keeps_its_fields(item: dict[str, Any], kind: type[BaseModel]) -> None:
    (parsed,) = items_of(item)
    assert type(parsed) is kind
    assert parsed.model_dump(exclude_unset=True) == item
    (again,) = items_of(parsed)
    assert again is parsed


@pytest.mark.parametrize("item", [*OUTPUT_ITEMS, CALL_OUTPUT, EASY, OUTPUT_MESSAGE | TOKENS, REASONING | TOKENS])
def test_output_items_keep_their_fields_also_those_of_later_turns(item: dict[str, Any]) -> None:
    assert [parsed.model_dump(exclude_unset=True) for parsed in output_of(item)] == [item]


def test_unknown_fields_and_parts_are_kept() -> None:
    item = EASY | {"content": [{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}], "weight": 1}
    (parsed,) = items_of(item)
    assert isinstance(parsed.content[0], NeMoGymUnknownContent)
    assert parsed.model_dump(exclude_unset=True) == item
    request = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "x", "top_k": 3})
    assert request.model_dump(exclude_unset=True) == {"input": "x", "top_k": 3}


@pytest.mark.parametrize(
    "item",
    [
        EASY | {"role": "usr"},
        {"role": "user"},
        {"type": "function_call", "name": "add"},
        {"a": 1},
        "text",
        3,
    ],
)
def test_a_malformed_item_is_refused(item: Any) -> None:
    with pytest.raises(ValidationError):
        items_of(item)


def test_the_trainable_variant_of_every_item_is_one_of_its_own_subclasses() -> None:
    for plain, trainable in RESPONSES_TO_TRAIN.items():
        assert issubclass(trainable, plain)
        assert trainable.model_fields.keys() >= TOKENS.keys()


def test_a_chat_message_with_tokens_is_read_as_the_trainable_one() -> None:
    choice = {"finish_reason": "stop", "message": {"content": "x"} | TOKENS}
    completion = NeMoGymChatCompletion.model_validate(CHAT_COMPLETION | {"choices": [choice]})
    assert isinstance(completion.choices[0].message, NeMoGymChatCompletionMessageForTraining)


def test_call_arguments_that_came_as_an_object_become_json_text() -> None:
    call = CHAT_CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    choice = {"finish_reason": "tool_calls", "message": {"tool_calls": [call]}}
    completion = NeMoGymChatCompletion.model_validate(CHAT_COMPLETION | {"choices": [choice]})
    assert completion.choices[0].message.tool_calls
    assert completion.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'


# Reading


def test_parts_can_be_read_as_attributes_or_as_json() -> None:
    part = NeMoGymResponseInputText.model_validate({"text": "x", "weight": 2})
    assert (part.text, part["text"], part.get("text"), part["weight"]) == ("x", "x", "x", 2)
    assert part.get("missing", 0) == 0
    assert "weight" in part
    assert "get" not in part
    with pytest.raises(KeyError):
        part["get"]


def test_output_text_joins_what_the_model_said() -> None:
    response = NeMoGymResponse.model_validate(RESPONSE | {"output": [OUTPUT_MESSAGE, CALL, REFUSAL, OUTPUT_MESSAGE]})
    assert response.output_text == "Hi.Hi."


# Usage


def usage(count: int, **more: Any) -> NeMoGymResponseUsage:
    return NeMoGymResponseUsage(
        input_tokens=count,
        input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=count),
        output_tokens=2 * count,
        output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=count),
        total_tokens=3 * count,
        **more,
    )


def test_usages_add_up_with_their_details_and_counts_we_do_not_know() -> None:
    total = accumulate_response_usage(usage(1, cost=0.5, draft={"accepted": 1}), usage(10, cost=0.25))
    assert total == usage(11, cost=0.75, draft={"accepted": 1})


def test_usage_that_was_not_reported_adds_nothing() -> None:
    one = usage(1)
    assert accumulate_response_usage(None, None) is None
    assert accumulate_response_usage(one, None) == one
    added = accumulate_response_usage(None, one)
    assert added == one
    assert added is not one


# The backend client


@pytest.fixture(scope="module")
def fake_process() -> Iterator[FakeBackend]:
    with running_fake_backend() as fake:
        yield fake


@pytest.fixture
def fake(fake_process: FakeBackend) -> FakeBackend:
    fake_process.reset()
    return fake_process


async def test_the_client_returns_dicts_of_both_apis(fake: FakeBackend) -> None:
    async with NeMoGymAsyncOpenAI(base_url=fake.base_url, api_key="k") as client:
        params = NeMoGymResponseCreateParamsNonStreaming(input="Hi", model="m")
        response = await client.create_response(**params.model_dump(exclude_unset=True))
        completion = await client.create_chat_completion(model="m", messages=[{"role": "user", "content": "Hi"}])
    assert NeMoGymResponse.model_validate(response).output_text == "Hello from the fake."
    assert completion["choices"][0]["message"]["content"] == "Hello from the fake."


async def test_parameters_may_hold_models(fake: FakeBackend) -> None:
    async with NeMoGymAsyncOpenAI(base_url=fake.base_url + "/", api_key="k") as client:
        await client.create_response(model="m", input=[NeMoGymEasyInputMessage(role="user", content="Hi")])
    (call,) = fake.calls()
    assert call["path"] == "/v1/responses"
    assert call["body"]["input"] == [{"role": "user", "content": "Hi"}]


async def test_credentials_in_the_url_are_used_and_never_shown(fake: FakeBackend) -> None:
    url = fake.base_url.replace("http://", "http://me:hush@")
    async with NeMoGymAsyncOpenAI(base_url=url, max_retries=0) as client:
        fake.script("ok", "500")
        await client.create_response(model="m", input="Hi")
        with pytest.raises(ModelBackendError) as caught:
            await client.create_response(model="m", input="Hi")
    assert fake.calls()[0]["headers"]["Authorization"] == "Basic bWU6aHVzaA=="
    assert "hush" not in str(caught.value)
    assert caught.value.url == f"{fake.base_url}/responses"
    assert caught.value.status == 500


def test_the_key_is_not_in_the_clients_representation() -> None:
    assert "sk-secret" not in repr(NeMoGymAsyncOpenAI(base_url="http://x", api_key="sk-secret"))


async def test_no_more_calls_than_allowed_are_under_way_at_once(fake: FakeBackend) -> None:
    async with NeMoGymAsyncOpenAI(base_url=fake.base_url, max_concurrency=2) as client:
        await asyncio.gather(*(client.create_response(model="fake:slow:0.1", input="Hi") for _ in range(5)))
    assert max(call["in_flight"] for call in fake.calls()) == 2
    assert len(fake.calls()) == 5


def test_a_client_can_be_used_from_one_event_loop_after_another(fake: FakeBackend) -> None:
    client = NeMoGymAsyncOpenAI(base_url=fake.base_url, max_concurrency=1)

    async def call_and_close() -> None:
        await client.create_response(model="m", input="Hi")
        await client.aclose()

    asyncio.run(call_and_close())
    asyncio.run(call_and_close())
    assert len(fake.calls()) == 2


async def test_a_name_that_does_not_exist_is_told(fake: FakeBackend) -> None:
    async with NeMoGymAsyncOpenAI(base_url="http://no-such-host.invalid/v1", max_retries=0) as client:
        with pytest.raises(ModelBackendError, match=r"no-such-host\.invalid/v1/responses can't be found") as caught:
            await client.create_response(model="m", input="Hi")
    assert caught.value.http_status == 502


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:40 GMT"}, 0),
        ({"retry-after-ms": "250", "Retry-After": "3"}, 0.25),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, now=60) == seconds


# The door


def test_every_name_of_the_door_is_there() -> None:
    assert len(set(openai_utils.__all__)) == len(openai_utils.__all__)
    for name in openai_utils.__all__:
        assert getattr(openai_utils, name) is not None


def test_importing_the_wire_types_does_not_import_the_sdk() -> None:
    code = "import sys, nemo_gym.openai_utils; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("value", [True, "true", 1])
def test_a_request_for_streaming_is_told_that_there_is_none(value: Any) -> None:
    with pytest.raises(ValidationError, match="replies are not streamed here: leave `stream` out"):
        NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "hi", "stream": value})
    with pytest.raises(ValidationError, match="replies are not streamed here: leave `stream` out"):
        NeMoGymChatCompletionCreateParamsNonStreaming.model_validate({"messages": [], "model": "m", "stream": value})


def test_nulls_of_optional_fields_mean_not_given() -> None:
    nulls = {"tools": None, "tool_choice": None, "parallel_tool_calls": None, "stream": None, "temperature": None}
    request = NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "hi", **nulls})
    assert (request.tools, request.tool_choice, request.parallel_tool_calls) == ([], "auto", True)
    reply = {"id": "r", "created_at": 0, "model": "m", "output": [], **nulls}
    response = NeMoGymResponse.model_validate(reply)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
