"""Responses API <-> Chat Completions: what is said in one is said in the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from openai.types.responses import Response as SdkResponse

from nemo_gym import responses_converter
from nemo_gym.errors import ConversionError
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessageForTraining,
)
from nemo_gym.responses_converter import ResponsesConverter, VLLMConverter, split_responses_input_output_items

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}

CONVERTER = ResponsesConverter()
THINK_TAGS = ResponsesConverter(uses_reasoning_parser=False)


def params_of(items: Any = "Hi", **fields: Any) -> NeMoGymResponseCreateParamsNonStreaming:
    return NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": items, **fields})


def request_of(items: Any = "Hi", converter: ResponsesConverter = CONVERTER, **fields: Any) -> dict[str, Any]:
    converted = converter.responses_to_chat_completion_create_params(params_of(items, **fields))
    return converted.model_dump(exclude_unset=True)


def messages_of(*items: Any, converter: ResponsesConverter = CONVERTER) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = request_of(list(items), converter)["messages"]
    return messages


def completion_of(message: dict[str, Any], *, reason: str = "stop", **more: Any) -> NeMoGymChatCompletion:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
    choice |= {key: more.pop(key) for key in ("logprobs", "token_ids") if key in more}
    return NeMoGymChatCompletion.model_validate(
        {"id": "c", "object": "chat.completion", "created": 7, "model": "m", "choices": [choice], **more}
    )


def reply_of(
    message: dict[str, Any], converter: ResponsesConverter = CONVERTER, request: Any = None, **more: Any
) -> NeMoGymResponse:
    return converter.chat_completion_to_response(request or params_of(), completion_of(message, **more))


def call_item(call_id: str, name: str = "add") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def chat_call(call_id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_item(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": f"result of {call_id}"}


def words(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": text}]}


# Requests


def test_a_string_is_what_the_user_says_after_the_instructions() -> None:
    assert request_of("Hi", instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_developer_messages_become_system_messages_unless_the_template_knows_them() -> None:
    item = {"role": "developer", "content": "Be brief."}
    assert messages_of(item) == [{"role": "system", "content": "Be brief."}]
    assert messages_of(item, converter=ResponsesConverter(keeps_developer_role=True)) == [item]


def test_thought_words_and_parallel_calls_of_one_turn_are_one_message() -> None:
    assert messages_of(
        {"role": "user", "content": "Go."},
        thought("Two calls."),
        words("I call."),
        call_item("a"),
        call_item("b"),
        result_item("a"),
        result_item("b"),
        words("Done."),
    ) == [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "reasoning_content": "Two calls.",
            "content": "I call.",
            "tool_calls": [chat_call("a"), chat_call("b")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "result of a"},
        {"role": "tool", "tool_call_id": "b", "content": "result of b"},
        {"role": "assistant", "content": "Done."},
    ]


def test_thoughts_between_calls_stay_in_the_turn_whose_results_are_awaited() -> None:
    first, *rest = messages_of(
        thought("A."), call_item("a"), thought("B."), call_item("b"), result_item("a"), result_item("b")
    )
    assert first["tool_calls"] == [chat_call("a"), chat_call("b")]
    assert first["reasoning_content"] == "A.\nB."
    assert [message["tool_call_id"] for message in rest] == ["a", "b"]


def test_a_call_without_words_has_no_content_and_a_turn_without_calls_has_some() -> None:
    assert messages_of(call_item("a"))[0]["content"] is None
    assert messages_of(thought("Hm."))[0]["content"] == ""


def test_two_messages_of_the_assistant_stay_two() -> None:
    assert [message["content"] for message in messages_of(words("One."), thought("Hm."), words("Two."))] == [
        "One.",
        "Two.",
    ]


def test_full_reasoning_is_preferred_to_its_summary() -> None:
    item = thought("short") | {"content": [{"type": "reasoning_text", "text": "long"}]}
    assert messages_of(item)[0]["reasoning_content"] == "long"


def test_reasoning_without_a_parser_stands_in_the_text() -> None:
    (message,) = messages_of(thought("Hm."), words("Three."), converter=THINK_TAGS)
    assert message == {"role": "assistant", "content": "<think>Hm.</think>Three."}


def test_images_keep_their_url_and_detail() -> None:
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
        {"type": "input_image", "image_url": "https://example.com/x.png"},
    ]
    assert messages_of({"role": "user", "content": content})[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
    ]


def test_a_lone_text_part_becomes_a_string() -> None:
    assert messages_of({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]})[0]["content"] == "Hi"


def test_files_and_audio_find_their_counterparts() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}
    file = {"type": "input_file", "file_data": "data:,x", "filename": "x.txt"}
    assert messages_of({"role": "user", "content": [audio, file]})[0]["content"] == [
        audio,
        {"type": "file", "file": {"file_data": "data:,x", "filename": "x.txt"}},
    ]


def test_what_the_assistant_refused_stays_a_refusal() -> None:
    item = words("") | {"content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_of(item) == [{"role": "assistant", "content": "", "refusal": "No."}]


@pytest.mark.parametrize(
    ("choice", "converted"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
        ),
    ],
)
def test_tools_and_the_choice_among_them_are_converted(choice: Any, converted: Any) -> None:
    request = request_of(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert request["tools"] == [CHAT_TOOL]
    assert request["tool_choice"] == converted
    assert request["parallel_tool_calls"] is False


def test_tools_in_the_form_of_chat_completions_are_accepted() -> None:
    assert request_of(tools=[CHAT_TOOL])["tools"] == [CHAT_TOOL]


def test_without_tools_nothing_is_said_about_them() -> None:
    assert request_of(tool_choice="auto", parallel_tool_calls=True).keys() == {"messages"}


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        ({}, {}),
        ({"format": {"type": "text"}}, {}),
        ({"format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True}, "verbosity": "low"},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True},
                },
                "verbosity": "low",
            },
        ),
    ],
)
def test_the_format_of_the_text_is_converted(text: dict[str, Any], converted: dict[str, Any]) -> None:
    request = request_of(text=text)
    del request["messages"]
    assert request == converted


def test_settings_are_renamed_where_needed_and_others_pass() -> None:
    request = request_of(
        model="m",
        max_output_tokens=9,
        temperature=0.0,
        top_p=0.5,
        reasoning={"effort": "low"},
        top_logprobs=2,
        user="u",
        top_k=4,
        metadata={"a": "b"},
        store=False,
        truncation="auto",
        service_tier=None,
    )
    del request["messages"]
    assert request == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "user": "u",
        "top_k": 4,
    }


@pytest.mark.parametrize(
    ("items", "fields", "told"),
    [
        ("Hi", {"previous_response_id": "r"}, "previous_response_id"),
        ("Hi", {"background": True}, "background"),
        ("Hi", {"tools": [{"type": "web_search"}]}, "'web_search'"),
        ("Hi", {"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "s"}}, "'mcp'"),
        ("Hi", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "without its field 'tools'"),
        ("Hi", {"text": {"format": {"name": "n"}}}, "without its field 'type'"),
        ([{"type": "item_reference", "id": "x"}], {}, "'item_reference'"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], {}, "image_url"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], {}, "'hologram'"),
    ],
)
def test_what_chat_completions_can_not_say_is_an_error_that_names_it(
    items: Any, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConversionError, match=told):
        request_of(items, **fields)


def test_a_setting_that_is_off_is_no_obstacle() -> None:
    assert request_of(background=False, previous_response_id=None).keys() == {"messages"}


# Replies


def test_a_reply_becomes_reasoning_words_and_calls_in_this_order() -> None:
    response = reply_of(
        {"content": "I call.", "reasoning_content": "Hm.", "tool_calls": [chat_call("a"), chat_call("b")]},
        reason="tool_calls",
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response.output
    assert reasoning["summary"][0].text == "Hm."
    assert message["content"][0].text == "I call."
    assert (first["call_id"], second["call_id"]) == ("a", "b")
    assert response.status == "completed"
    assert response.incomplete_details is None
    SdkResponse.model_validate(response.model_dump(mode="json", exclude_unset=True), strict=True)


def test_newer_backends_name_the_reasoning_field_reasoning() -> None:
    assert reply_of({"content": "x", "reasoning": "Hm."}).output[0].type == "reasoning"


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        (None, "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
@pytest.mark.parametrize("message", [{"content": "x"}, {"reasoning_content": "x"}, {"tool_calls": [chat_call("a")]}])
def test_the_finish_reason_tells_whether_the_last_item_is_whole(
    message: dict[str, Any], reason: str, status: str, details: str | None
) -> None:
    response = reply_of(message, reason=reason)
    assert response.status == status
    assert response.output[-1]["status"] == status
    assert (response.incomplete_details.reason if response.incomplete_details else None) == details


def test_a_refusal_is_a_part_of_the_message() -> None:
    (message,) = reply_of({"content": None, "refusal": "No."}).output
    assert [part.model_dump(exclude_unset=True) for part in message["content"]] == [
        {"type": "refusal", "refusal": "No."}
    ]


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_answer_is_an_empty_message(content: str | None) -> None:
    (message,) = reply_of({"content": content}).output
    assert message["content"][0].text == ""


def test_empty_content_beside_calls_or_reasoning_makes_no_message() -> None:
    assert [item.type for item in reply_of({"content": "", "tool_calls": [chat_call("a")]}).output] == ["function_call"]
    assert [item.type for item in reply_of({"content": "", "reasoning_content": "Hm."}).output] == ["reasoning"]


@pytest.mark.parametrize(
    ("content", "reasoning", "text"),
    [
        ("<think>Hm.</think>Three.", "Hm.", "Three."),
        ("\n<think>\nHm.\n</think>\n\nThree.", "\nHm.\n", "\n\nThree."),
        ("Hm.</think>Three.", "Hm.", "Three."),
        ("<think>Hm", "Hm", None),
        ("Three.", None, "Three."),
        ("Three <think>", None, "Three <think>"),
    ],
)
def test_think_tags_are_told_from_the_answer(content: str, reasoning: str | None, text: str | None) -> None:
    output = reply_of({"content": content}, THINK_TAGS).output
    found = {item.type: item for item in output}
    assert (found["reasoning"]["summary"][0].text if "reasoning" in found else None) == reasoning
    assert (found["message"]["content"][0].text if "message" in found else None) == text


def test_think_tags_are_left_alone_where_the_backend_has_a_parser() -> None:
    assert reply_of({"content": "<think>Hm.</think>Three."}).output_text == "<think>Hm.</think>Three."


def test_a_call_without_an_id_gets_one() -> None:
    first, second = reply_of({"tool_calls": [chat_call(""), chat_call("")]}).output
    assert first["call_id"] != second["call_id"]
    assert first["call_id"].startswith("call_")


def test_the_reply_repeats_the_settings_of_the_request() -> None:
    request = params_of(
        instructions="Be brief.", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, metadata={"a": "b"}
    )
    response = reply_of({"content": "x"}, request=request)
    assert response.tools == [TOOL]
    assert (response.tool_choice, response.parallel_tool_calls) == ("required", False)
    assert (response.instructions, response.metadata, response.model) == ("Be brief.", {"a": "b"}, "m")


def test_usage_comes_with_cached_and_reasoning_tokens() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    converted = reply_of({"content": "x"}, usage=usage).usage
    assert converted is not None
    assert converted.model_dump() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_usage_without_details_counts_none_of_them() -> None:
    details = {"prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": None}}
    usage = reply_of({"content": "x"}, usage={"prompt_tokens": 1, "completion_tokens": 2, **details}).usage
    assert usage is not None
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert usage.total_tokens == 3
    assert reply_of({"content": "x"}).usage is None


def test_log_probabilities_are_attached_when_asked_for() -> None:
    logprobs = {
        "content": [{"token": "x", "logprob": -1.0, "bytes": None, "top_logprobs": [{"token": "y", "logprob": -2}]}]
    }
    asked = reply_of({"content": "x"}, request=params_of(top_logprobs=1), logprobs=logprobs)
    assert asked.output[0]["content"][0].logprobs == [
        {
            "token": "x",
            "bytes": [120],
            "logprob": -1.0,
            "top_logprobs": [{"token": "y", "bytes": [121], "logprob": -2}],
        }
    ]
    assert reply_of({"content": "x"}, logprobs=logprobs).output[0]["content"][0].logprobs is None


def test_ids_are_made_by_uuid4_of_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        hex = "123"

    monkeypatch.setattr(responses_converter, "uuid4", Fixed)
    response = reply_of({"content": "x", "reasoning_content": "Hm.", "tool_calls": [chat_call("a")]})
    assert [response.id, *(item["id"] for item in response.output)] == ["resp_123", "rs_123", "msg_123", "fc_123"]


def test_no_choices_are_an_error() -> None:
    completion = completion_of({"content": "x"}).model_copy(update={"choices": []})
    with pytest.raises(ConversionError, match="no choices"):
        CONVERTER.chat_completion_to_response(params_of(), completion)


# Tokens, for training

LOGPROBS = {"content": [{"token": "token_id:3", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ({}, {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": LOGPROBS}),
        ({}, {"prompt_token_ids": [1, 2], "logprobs": LOGPROBS}),
        (TOKENS, {}),
    ],
    ids=["return_token_ids", "return_tokens_as_token_ids", "message"],
)
def test_tokens_are_found_wherever_the_backend_puts_them_and_belong_to_the_last_item(
    message: dict[str, Any], more: dict[str, Any]
) -> None:
    first, last = reply_of({"content": "x", "tool_calls": [chat_call("a")], **message}, **more).output
    assert isinstance(last, NeMoGymResponseFunctionToolCallForTraining)
    assert last.model_dump(include=set(TOKENS)) == TOKENS
    assert not isinstance(first, NeMoGymResponseOutputMessageForTraining)
    assert "generation_token_ids" not in first


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt_token_ids": [1, 2]},
        {"token_ids": [3], "logprobs": LOGPROBS},
        {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": LOGPROBS},
    ],
)
def test_missing_or_unequal_tokens_are_an_error_where_they_are_needed(more: dict[str, Any]) -> None:
    assert "generation_token_ids" not in reply_of({"content": "x"}, **more).output[0]
    with pytest.raises(ConversionError, match="return_token_id_information"):
        reply_of({"content": "x"}, VLLMConverter(return_token_id_information=True), **more)


def test_tokens_are_asked_for_and_sent_back_only_where_they_are_needed() -> None:
    item = words("x") | TOKENS
    training = VLLMConverter(return_token_id_information=True)
    request = request_of([item], training)
    assert request["return_token_ids"] is True
    assert request["logprobs"] is True
    assert {key: request["messages"][0][key] for key in TOKENS} == TOKENS
    plain = request_of([item], VLLMConverter())
    assert plain == {"messages": [{"role": "assistant", "content": "x"}]}


# Splitting


def test_a_conversation_is_split_before_the_models_first_item() -> None:
    items = params_of(
        [{"role": "user", "content": "Go."}, thought("Hm."), words("x"), {"role": "user", "content": "?"}]
    ).input
    assert not isinstance(items, str)
    given, made = split_responses_input_output_items(items)
    assert [item.type for item in given] == ["message"]
    assert [item.type for item in made] == ["reasoning", "message", "message"]
    assert split_responses_input_output_items(given) == (given, [])


# There and back

TEXT = st.text(st.characters(exclude_characters="<>", codec="utf-8"), min_size=1, max_size=20)
IMAGE = st.builds(
    lambda url, detail: {"type": "image_url", "image_url": {"url": url, "detail": detail}},
    TEXT,
    st.sampled_from(["low", "high", "auto"]),
)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT) | IMAGE, min_size=2, max_size=3)
PROMPT = st.builds(
    lambda role, content: [{"role": role, "content": content}], st.sampled_from(["user", "system"]), TEXT | PARTS
)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What the model says after a prompt, with the results of its calls."""
    calls = draw(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=3, unique_by=lambda call: call[0]))
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXT | st.none() if calls else TEXT)}
    if calls:
        message["tool_calls"] = [chat_call(*call) for call in calls]
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT)
    return [message, *({"role": "tool", "tool_call_id": call[0], "content": draw(TEXT)} for call in calls)]


CONVERSATIONS = st.lists(st.tuples(PROMPT, turns()), min_size=1, max_size=4).map(
    lambda pairs: [message for pair in pairs for messages in pair for message in messages]
)


@given(CONVERSATIONS)
def test_chat_messages_survive_the_way_to_items_and_back(messages: list[dict[str, Any]]) -> None:
    items = CONVERTER.chat_completions_messages_to_responses_items(messages)
    wire = params_of([item.model_dump(mode="json", exclude_unset=True) for item in items])
    assert CONVERTER.input_to_messages(wire.input) == messages


@given(CONVERSATIONS)
def test_items_survive_the_way_through_think_tags(messages: list[dict[str, Any]]) -> None:
    items = CONVERTER.chat_completions_messages_to_responses_items(messages)
    tagged = THINK_TAGS.input_to_messages(items)
    assert not any("reasoning_content" in message for message in tagged)
    back = THINK_TAGS.chat_completions_messages_to_responses_items(tagged)
    without_ids = [[item.model_dump(exclude={"id"}) for item in some] for some in (items, back)]
    assert without_ids[0] == without_ids[1]


@given(turns())
def test_a_reply_put_back_into_the_input_is_the_message_it_was(turn: list[dict[str, Any]]) -> None:
    message = turn[0]
    output = reply_of(message).model_dump(mode="json", exclude_unset=True)["output"]
    assert messages_of(*output) == [message]
