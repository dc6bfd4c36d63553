"""Instructions whose next call depends on what a tool has shown, played against a counter of our own."""

import json
from typing import Any

import pytest

from responses_api_models.pattern_model.conversation import Call, Conversation, Tool
from responses_api_models.pattern_model.policy import Decision, decide

LOOK = Tool("look", "See how things stand.", {"type": "object", "properties": {}})
MOVE = Tool(
    "move",
    "Go somewhere.",
    {
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": ["climb", "rest"]}},
        "required": ["direction"],
    },
)


def turn(text: str, calls: list[Call], tools: list[Tool]) -> Decision:
    return decide(Conversation(text, tools, calls, parallel=True, text=text))


def played(text: str, *, top: int = 99, tools: list[Tool] | None = None) -> list[str]:
    """Return what is done on a mountain where each climb is 10 metres, from 30, until the policy stops."""
    height, calls = 30, list[Call]()
    while True:
        decision = turn(text, calls, tools or [LOOK, MOVE])
        if not decision.steps:
            assert decision.text.startswith("Done."), decision.text
            return [call.arguments and json.loads(call.arguments).get("direction", call.name) for call in calls]
        (step,) = decision.steps
        height += 10 * (step.arguments.get("direction") == "climb")
        shown = {"observation": {"height_m": height, "wind": 3, "cold": True}, "terminated": height >= top}
        calls.append(Call(f"call_{len(calls)}", step.tool, json.dumps(step.arguments), json.dumps(shown)))


@pytest.mark.parametrize(
    ("text", "climbs", "rests"),
    [
        ("Climb while the height is below 50, then rest.", 2, 1),
        ("Climb while the height is at most 50, then rest.", 3, 1),
        ("Climb as long as your height is not above 50; otherwise rest.", 3, 1),
        ("Climb until the height reaches 50. Then rest.", 2, 1),
        ("Climb until the height is more than 50, then rest.", 3, 1),
        ("Climb until the height is 50 or more, then rest!", 2, 1),
        ("climb until height_m is 45", 2, 0),
        ("What a day: climb while the height is less than 31.5, and then rest.", 1, 1),
        ("Climb while the height is over 50, then rest.", 0, 1),
    ],
)
def test_an_act_is_repeated_as_the_shown_number_demands(text: str, climbs: int, rests: int) -> None:
    assert played(text) == ["look", *["climb"] * climbs, *["rest"] * rests]


def test_it_ends_when_a_result_says_that_it_is_over() -> None:
    assert played("Climb while the height is below 500, then rest.", top=50) == ["look", "climb", "climb"]


def test_acts_may_be_tools_of_their_own() -> None:
    tools = [LOOK, Tool("rest", "Wait.", {"type": "object", "properties": {}}), MOVE]
    with_two = turn("Climb while the height is below 50, then rest.", [], tools)
    assert "'rest' could mean several calls" in with_two.text
    plain = Tool("wait", "Wait.", {"type": "object", "properties": {}})
    assert turn("Climb until the height is 50, then wait.", [], [LOOK, MOVE, plain]).steps[0].tool == "look"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Climb while the height is below 50, then sing.", "no tool seems to 'sing'"),
        ("Climb while the height is nearly 50, then rest.", "I don't see when"),
        ("Climb while the height is 50, then rest.", "I don't see when"),
        ("Don't climb while the height is below 50.", "don't"),
        ("Never mind. Rest. Climb while the height is below 50.", "it says 'never'"),
        ("Rest. Climb while the height is below 50.", "it says 'rest'"),
        ("Climb while the height is below 50, then rest, then climb.", "then climb"),
        ("Climb while your is below 50.", "I don't see what shows"),
    ],
)
def test_what_is_not_understood_is_refused_as_a_whole(text: str, problem: str) -> None:
    decision = turn(text, [], [LOOK, MOVE])
    assert decision.steps == []
    assert problem in decision.text


@pytest.mark.parametrize(
    ("shown", "problem"),
    [({"weather": 1}, "0 numbers"), ({"height": 1, "b": {"height": 2}}, "2 numbers"), ("high", "no JSON")],
)
def test_a_result_that_does_not_show_the_number_ends_it(shown: Any, problem: str) -> None:
    result = shown if isinstance(shown, str) else json.dumps(shown)
    calls = [Call("call_0", "look", "{}", result)]
    assert problem in turn("Climb while the height is below 50.", calls, [LOOK, MOVE]).text


def test_foreign_calls_and_errors_end_it() -> None:
    text = "Climb while the height is below 50."
    assert "not have made" in turn(text, [Call("c", "jump", "{}", "{}")], [LOOK, MOVE]).text
    failed = [Call("c", "look", "{}", '{"error": "fog"}')]
    assert turn(text, failed, [LOOK, MOVE]).text == "I stopped: look answered with an error: fog"


def test_a_loop_that_no_tool_is_for_is_left_to_the_other_rules() -> None:
    counter = Tool("add", "Add.", {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]})
    assert "it says 'until'" in turn("Add 3 until the sum is 12.", [], [counter, LOOK]).text
