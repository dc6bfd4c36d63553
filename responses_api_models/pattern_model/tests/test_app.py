"""Drives the model server over HTTP, in this process, as agents do."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig
from responses_api_models.pattern_model.reading import tokenize

ROOT = Path(__file__).parents[3]
COUNTER_TOOLS = [
    {
        "type": "function",
        "name": "increment_counter",
        "description": "Add an amount to the counter.",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
    {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}},
]


@pytest.fixture(scope="module")
def client() -> TestClient:
    config = PatternModelConfig(host="", port=0, entrypoint="", name="policy_model")
    return TestClient(PatternModel(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver())


def respond(client: TestClient, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    parsed: dict[str, Any] = reply.json()
    return parsed


def calls_in(reply: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (item["name"], json.loads(item["arguments"])) for item in reply["output"] if item["type"] == "function_call"
    ]


def text_of(reply: dict[str, Any]) -> str:
    (message,) = reply["output"]
    text: str = message["content"][0]["text"]
    return text


def ask(client: TestClient, text: str, tools: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return respond(client, input=[{"role": "user", "content": text}], tools=tools, **more)


def converse(client: TestClient, text: str, tools: list[dict[str, Any]], result: str = '{"ok": true}') -> Any:
    """Answer every call with `result` until the model is done; return all calls and the last text."""
    items: list[dict[str, Any]] = [{"role": "user", "content": text}]
    made: list[tuple[str, Any]] = []
    while True:
        reply = respond(client, input=items, tools=tools)
        new = calls_in(reply)
        if not new:
            return made, text_of(reply)
        made += new
        items += reply["output"]
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": result} for item in reply["output"]
        ]


def added(made: list[tuple[str, Any]]) -> list[int]:
    return [arguments["count"] for name, arguments in made if name == "increment_counter"]


@pytest.mark.parametrize(
    ("instruction", "amounts"),
    [
        ("add 4 then add 3 then get the count", [4, 3]),
        ("Please bump the counter twice.", [1, 1]),
        ("Increase it by twenty-one, then by one hundred and five.", [21, 105]),
        ("Take a dozen away, then add 1,000", [-12, 1000]),
        ("Add minus three and -4 to the counter", [-3, -4]),
        ("Three times, increase the counter by 2.", [2, 2, 2]),
        ("The counter starts at 10. Give it 5 more.", [5]),
        ("Increase the counter from 3 by 4", [4]),
        ("Apply these increments, one by one: 3, 4 and 5", [3, 4, 5]),
        ("Add 4 and do the same again", [4, 4]),
        ("1. add 2\n2. subtract 1", [2, -1]),
        ("Add zero to it", [0]),
    ],
)
def test_amounts_are_read_in_digits_and_in_words(client: TestClient, instruction: str, amounts: list[int]) -> None:
    made, _ = converse(client, instruction, COUNTER_TOOLS)
    assert added(made) == amounts


def test_tools_of_the_same_names_with_other_arguments_are_called_with_those(client: TestClient) -> None:
    made = []
    for argument in ("count", "amount", "count"):
        parameters = {"type": "object", "properties": {argument: {"type": "integer"}}, "required": [argument]}
        tools = [{**COUNTER_TOOLS[0], "parameters": parameters}]
        made.extend(calls_in(ask(client, "Add 4.", tools)))
    assert [arguments for _, arguments in made] == [{"count": 4}, {"amount": 4}, {"count": 4}]


@pytest.mark.parametrize(
    ("instruction", "names"),
    [
        ("Tell me the value after adding 5 and 3.", ["increment_counter", "increment_counter", "get_counter_value"]),
        ("Before you read it, add 3.", ["increment_counter", "get_counter_value"]),
        ("Read it before adding 3.", ["get_counter_value", "increment_counter"]),
        ("What does the counter show?", ["get_counter_value"]),
        ("Read it, add 1, and read it again.", ["get_counter_value", "increment_counter", "get_counter_value"]),
    ],
)
def test_calls_come_in_the_order_that_was_meant(client: TestClient, instruction: str, names: list[str]) -> None:
    made, _ = converse(client, instruction, COUNTER_TOOLS)
    assert [name for name, _ in made] == names


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("Don't add 3.", "don't"),
        ("If it is even, add 2.", "if"),
        ("Reset the counter.", "reset"),
        ("Double it.", "double"),
        ("Raise it to 15.", "target, 15"),
        ("Increment by 2.5", "whole numbers"),
        ("Keep adding 2 until it is full.", "until"),
        ("I have 3 apples.", "'3'"),
        ("Raise it down by 3", "up and down"),
        ("Add 3, no wait, 4", "corrects itself"),
        ("Add 3-4", "'-'"),
        ("Increase it by 10%", "'%'"),
        ("Add between 3 and 5", "between"),
        ("Add 5, wait 10 seconds, add 6", "wait 10 seconds"),
        ("Raise by 2 each for the 3 of us", "each"),
        ("Sing a song.", "none of the tools"),
        ("", "none of the tools"),
    ],
)
def test_what_is_not_understood_is_refused_without_a_call(client: TestClient, instruction: str, reason: str) -> None:
    reply = ask(client, instruction, COUNTER_TOOLS)
    assert calls_in(reply) == []
    assert text_of(reply).startswith("I can't work out what to do")
    assert reason in text_of(reply)


def in_words(number: int) -> str:
    small = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    if number < 20:
        return small[number]
    if number < 100:
        return tens[number // 10 - 2] + (f"-{small[number % 10]}" if number % 10 else "")
    scale, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % scale
    joint = " and " if rest and (scale == 100 or rest < 100) else " "
    return f"{in_words(number // scale)} {name}" + (f"{joint}{in_words(rest)}" if rest else "")


def test_numbers_in_words_are_read_exactly() -> None:
    for number in [*range(1_200), *range(1_200, 1_000_000, 4_679)]:
        values = [token.value for token in tokenize(f"add {in_words(number)}, seven and {in_words(number)}")]
        assert [value for value in values if value is not None] == [number, 7, number], in_words(number)


def rows_of(name: str) -> list[dict[str, Any]]:
    path = ROOT / "resources_servers" / name / "data" / "example.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_solves_the_counters_rows(client: TestClient) -> None:
    for row in rows_of("example_session_state_mgmt"):
        params = row["responses_create_params"]
        made, _ = converse(client, params["input"][0]["content"], params["tools"])
        assert row["initial_count"] + sum(added(made)) == row["expected_count"], params["input"]


def test_tools_served_over_mcp_are_known_by_the_last_part_of_their_names(client: TestClient) -> None:
    prefix = "mcp__read_and_lower_state__"
    tools = [{**tool, "name": prefix + tool["name"]} for tool in COUNTER_TOOLS]
    for row in rows_of("example_session_state_mgmt"):
        instruction = row["responses_create_params"]["input"][0]["content"]
        bare, _ = converse(client, instruction, COUNTER_TOOLS)
        made, _ = converse(client, instruction, tools)
        assert bare
        assert made == [(prefix + name, arguments) for name, arguments in bare]


def test_it_solves_the_weathers_rows(client: TestClient) -> None:
    for row in rows_of("example_single_tool_call"):
        params = row["responses_create_params"]
        ((name, arguments),), _ = converse(client, params["input"][0]["content"], params["tools"])
        assert name == "get_weather"
        assert arguments["city"].split(",")[0].casefold() == row["expected_city"].casefold()


def test_it_solves_sums_and_says_that_it_can_do_no_other_puzzle(client: TestClient) -> None:
    for row in rows_of("reasoning_gym"):
        text = text_of(respond(client, **row["responses_create_params"]))
        if row["dataset"]["name"] == "chain_sum":
            assert text == f"<answer>{row['entry']['answer']}</answer>"
        else:
            assert text.startswith("I can't work out what to do")


def tool(name: str, parameters: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters) if required is None else required,
    }
    return {"type": "function", "name": name, "description": "", "parameters": schema}


def test_tools_it_has_never_seen_are_filled_by_their_schema(client: TestClient) -> None:
    deposit = [tool("deposit", {"amount": {"type": "number"}}), tool("withdraw", {"amount": {"type": "number"}})]
    made, _ = converse(client, "Deposit 20, then withdraw 5.5", deposit)
    assert made == [("deposit", {"amount": 20}), ("withdraw", {"amount": 5.5})]

    notes = [tool("add_note", {"text": {"type": "string"}}), tool("list_notes", {})]
    made, _ = converse(client, "Add the notes 'buy milk' and \"call Ada\", then show all notes.", notes)
    assert made == [("add_note", {"text": "buy milk"}), ("add_note", {"text": "call Ada"}), ("list_notes", {})]

    power = [tool("multiply", {"a": {"type": "integer"}, "b": {"type": "integer"}})]
    assert calls_in(ask(client, "Multiply 6 by 7", power)) == [("multiply", {"a": 6, "b": 7})]

    optional = [tool("add", {"n": {"type": "integer"}, "why": {"type": ["string", "null"]}})]
    assert calls_in(ask(client, "Add 2", optional)) == [("add", {"n": 2, "why": None})]


def test_what_a_schema_does_not_allow_is_not_called(client: TestClient) -> None:
    bounded = [tool("add", {"n": {"type": "integer", "minimum": 0, "maximum": 10}})]
    assert "out of the range" in text_of(ask(client, "Subtract 3", bounded))
    assert "out of the range" in text_of(ask(client, "Add 11", bounded))
    assert "out of the range" in text_of(ask(client, "Decrement it", bounded))
    beyond_it = [tool("add", {"items": {"type": "array"}})]
    assert "none of the tools" in text_of(ask(client, "Add some", beyond_it))


def test_several_names_mean_several_calls_and_a_qualifier_stays_with_its_name(client: TestClient) -> None:
    weather = [tool("get_weather", {"city": {"type": "string"}})]
    made, _ = converse(client, "Weather for Paris, Rio de Janeiro and Oslo, please", weather)
    assert [arguments["city"] for _, arguments in made] == ["Paris", "Rio de Janeiro", "Oslo"]
    assert calls_in(ask(client, "How is the weather in the capital of France?", weather)) == []
    made, _ = converse(client, "What is the weather in Paris, Texas?", weather)
    assert [arguments["city"] for _, arguments in made] == ["Paris, Texas"]
    assert calls_in(ask(client, "Tokyo\u2019s weather?", weather)) == [("get_weather", {"city": "Tokyo"})]


def test_the_last_text_says_what_the_tools_answered(client: TestClient) -> None:
    _, text = converse(client, "What is the counter's value?", COUNTER_TOOLS, result='{"count": 7}')
    assert text == "Done. get_counter_value answered count = 7."


@pytest.mark.parametrize("error", ['{"error": "no such session", "status": 404}', "Error: no such session"])
def test_a_tools_error_ends_the_attempt_in_words(client: TestClient, error: str) -> None:
    made, text = converse(client, "Add 3, then 4.", [COUNTER_TOOLS[0]], result=error)
    assert len(made) <= 2
    assert "increment_counter answered with an error" in text
    assert "no such session" in text


def test_one_call_a_turn_where_parallel_calls_are_not_wanted(client: TestClient) -> None:
    assert len(calls_in(ask(client, "Add 3, 4 and 5", COUNTER_TOOLS))) == 3
    assert len(calls_in(ask(client, "Add 3, 4 and 5", COUNTER_TOOLS, parallel_tool_calls=False))) == 1


def test_tool_choice_is_kept(client: TestClient) -> None:
    assert calls_in(ask(client, "Add 3", COUNTER_TOOLS, tool_choice="none")) == []
    only_reading = {"type": "function", "name": "get_counter_value"}
    names = [name for name, _ in calls_in(ask(client, "What does it show?", COUNTER_TOOLS, tool_choice=only_reading))]
    assert names == ["get_counter_value"]


def test_a_later_message_of_the_user_is_a_new_instruction(client: TestClient) -> None:
    first = ask(client, "Add 3", COUNTER_TOOLS)
    call_id = first["output"][0]["call_id"]
    items = [
        {"role": "user", "content": "Add 3"},
        *first["output"],
        {"type": "function_call_output", "call_id": call_id, "output": "{}"},
        {"role": "user", "content": [{"type": "input_text", "text": "Now add 8."}]},
    ]
    assert calls_in(respond(client, input=items, tools=COUNTER_TOOLS)) == [("increment_counter", {"count": 8})]


def test_the_same_request_has_the_same_answer_and_turns_have_ids_of_their_own(client: TestClient) -> None:
    one, two = (ask(client, "Add 3", COUNTER_TOOLS) for _ in range(2))
    assert one["output"] == two["output"]
    assert one["usage"] == two["usage"]
    assert ask(client, "Add 4", COUNTER_TOOLS)["output"][0]["call_id"] != one["output"][0]["call_id"]


def test_usage_counts_a_token_for_every_four_characters(client: TestClient) -> None:
    usage = respond(client, input="x" * 41)["usage"]
    assert usage["input_tokens"] == 11
    assert usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_chat_completions_take_the_same_decisions(client: TestClient) -> None:
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in COUNTER_TOOLS]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "Add 3 and 4, then read the counter."},
    ]
    made: list[tuple[str, str]] = []
    for _ in range(3):
        reply = client.post("/v1/chat/completions", json={"messages": messages, "tools": tools, "model": "m"}).json()
        (choice,) = reply["choices"]
        assert reply["model"] == "m"
        assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
        messages.append(choice["message"])
        calls = choice["message"]["tool_calls"] or []
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        for call in calls:
            made.append((call["function"]["name"], call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"count": 12}'})
    assert made == [
        ("increment_counter", '{"count": 3}'),
        ("increment_counter", '{"count": 4}'),
        ("get_counter_value", "{}"),
    ]
    assert "count = 12" in messages[-1]["content"]
