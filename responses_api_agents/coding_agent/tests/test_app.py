"""Runs the agent between real servers on ports of this machine."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from fastapi import Response

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from responses_api_agents.coding_agent.app import INSTRUCTIONS
from responses_api_agents.coding_agent.progress import repeated
from responses_api_agents.coding_agent.tests.stage import (
    ROW,
    TOOLS,
    call,
    message,
    outputs,
    reply,
    serving,
    stage,
    tool,
)
from responses_api_agents.coding_agent.tool_output import shorten, with_notice

DONE = reply(message("done"))


def row(**params: Any) -> dict[str, Any]:
    return {**ROW, "responses_create_params": {**ROW["responses_create_params"], **params}}


def notices(response: dict[str, Any]) -> list[str]:
    return [json.loads(output).get("agent_notice", "") for output in outputs(response)]


# What the model is told


def test_the_model_is_told_where_it_works_and_how_to_finish() -> None:
    with stage(DONE, max_steps=7) as it:
        it.run(row(instructions="Answer in French."))
    (asked,) = it.asked()
    assert asked["instructions"].startswith("You work in a sandbox")
    assert "The working directory is /repository;" in asked["instructions"]
    assert "You have 7 steps" in asked["instructions"]
    assert "no tool call" in asked["instructions"]
    assert asked["instructions"].endswith("\n\nAnswer in French.")
    assert asked["input"] == ROW["responses_create_params"]["input"]
    assert asked["tools"] == TOOLS


def test_a_line_about_what_is_not_known_is_left_out() -> None:
    with stage(DONE, max_steps=None) as it:
        it.environment.replies["seed_session"] = [{}]
        it.run()
    (asked,) = it.asked()
    known = [line for line in INSTRUCTIONS.splitlines() if "{" not in line]
    assert asked["instructions"] == "\n".join(known)


def test_instructions_are_a_setting() -> None:
    with stage(DONE, instructions="In {workdir}, {braces} and all.") as it:
        it.run()
    assert it.asked()[0]["instructions"] == "In /repository, {braces} and all."
    with stage(DONE, instructions="") as it:
        it.run()
    assert "instructions" not in it.asked()[0]


def test_tools_come_from_the_reply_to_the_seed_where_the_row_has_none() -> None:
    untyped = {key: value for key, value in TOOLS[1].items() if key != "type"}
    with stage(reply(call("read_file")), DONE) as it:
        it.environment.replies["seed_session"] = [{"tools": [TOOLS[0], untyped]}]
        it.run(row(tools=[{"type": "web_search"}]))
    assert it.asked()[0]["tools"] == [{"type": "web_search"}, *TOOLS]
    assert it.environment.paths == ["seed_session", "read_file", "verify"]


def test_the_rows_own_tools_are_all_that_is_offered() -> None:
    with stage(reply(call("read_file")), DONE) as it:
        it.environment.replies["seed_session"] = [{"tools": TOOLS}]
        response = it.run(row(tools=[tool("run_command")]))
    assert it.asked()[0]["tools"] == [tool("run_command")]
    assert "there is no tool 'read_file'" in outputs(response)[0]


@pytest.mark.parametrize("seeded", [{}, {"tools": []}, None])
def test_without_tools_the_rollout_ends_with_an_error_that_says_so(seeded: Any) -> None:
    with stage(DONE) as it:
        it.environment.replies["seed_session"] = [seeded]
        result = it.agent.post("/run", json=row(tools=[]))
    assert result.status_code == 422
    assert "there are no tools to work with" in result.json()["detail"]
    assert "'environment'" in result.json()["detail"]
    assert it.asked() == []


@pytest.mark.parametrize("tools", ["text", [3], [{"function": {"name": "f"}}]])
def test_tools_in_the_seeds_reply_that_are_none_are_the_environments_fault(tools: Any) -> None:
    with stage(DONE) as it:
        it.environment.replies["seed_session"] = [{"tools": tools}]
        result = it.agent.post("/run", json=row(tools=[]))
    assert result.status_code == 502
    assert "no function tool" in result.json()["detail"]


# The loop


def test_a_rollout_seeds_works_and_verifies() -> None:
    turns = [reply(call(command="ls", call_id="a")), reply(message("hm"), call("read_file", path="x", call_id="b"))]
    with stage(*turns, DONE) as it:
        response = it.run()
    assert it.environment.paths == ["seed_session", "run_command", "read_file", "verify"]
    assert it.environment.bodies("run_command") == [{"command": "ls"}]
    kinds = ["function_call", "function_call_output", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in response["output"]] == kinds
    assert outputs(response) == ['{"return_code": 0, "stdout": "fine"}', '{"content": "text"}']
    assert response["usage"]["total_tokens"] == 36
    assert [len(asked["input"]) for asked in it.asked()] == [1, 3, 6]
    assert it.environment.cookies[1:] == [{"session": "of-the-server"}] * 3


def test_a_tools_error_is_told_and_the_work_goes_on() -> None:
    with stage(reply(call()), reply(call("read_file")), DONE) as it:
        it.environment.replies["run_command"] = [Response('{"detail": "no such file"}', 400)]
        response = it.run()
    assert [json.loads(output) for output in outputs(response)] == [
        {"error": "no such file", "status": 400},
        {"content": "text"},
    ]


def test_a_caller_that_seeds_itself_has_the_same_budgets_and_keeps_its_session() -> None:
    with stage(reply(call()), DONE, max_steps=1) as it:
        params = {"input": "Repair it.", "tools": TOOLS}
        response = it.agent.post("/v1/responses", json=params).json()
        assert response["incomplete_details"] == {"reason": "max_steps"}
        assert "working directory" not in it.asked()[0]["instructions"]
        assert it.agent.post("/v1/responses", json={"input": "Repair it."}).status_code == 422
    assert it.environment.paths == ["run_command"]


# Budgets


def test_the_last_of_the_steps_is_run_and_ends_the_rollout_as_incomplete() -> None:
    with stage(reply(call()), max_steps=3) as it:
        response = it.run()
    assert len(it.asked()) == 3
    assert len(outputs(response)) == 3
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_steps"})
    assert it.environment.paths[-1] == "verify"


def test_the_model_is_told_when_its_steps_run_low() -> None:
    turns = [reply(call("read_file", path=str(at))) for at in range(10)]
    with stage(*turns, max_steps=10) as it:
        response = it.run()
    told = notices(response)
    assert told[:7] == [""] * 7
    assert told[7].startswith("2 of your 10 steps left.")
    assert told[8].startswith("1 of your 10 steps left.")
    assert told[9] == ""
    assert it.asked()[8]["input"][-1]["output"] == outputs(response)[7]


def test_a_notice_stands_in_the_last_answer_of_a_step() -> None:
    with stage(reply(call(command="a"), call(command="b", call_id="call_2")), DONE, max_steps=2) as it:
        told = notices(it.run())
    assert told[0] == ""
    assert told[1].startswith("1 of your 2 steps left.")


def test_long_outputs_are_shortened_in_the_middle_wherever_they_are_kept() -> None:
    text = "begin" + "x" * 5_000 + "end"
    with stage(reply(call()), DONE, max_tool_output=1_000) as it:
        it.environment.replies["run_command"] = [{"return_code": 1, "stdout": text, "stderr": "why"}]
        response = it.run()
    (output,) = outputs(response)
    parsed = json.loads(output)
    assert len(output) <= 1_000
    assert (parsed["return_code"], parsed["stderr"]) == (1, "why")
    assert parsed["stdout"].startswith("beginx")
    assert parsed["stdout"].endswith("xend")
    assert "characters left out" in parsed["stdout"]
    assert it.asked()[1]["input"][-1]["output"] == output


def test_the_budget_of_tool_output_runs_low_and_ends_the_rollout() -> None:
    turns = [reply(call(command=str(at))) for at in range(20)]
    with stage(*turns, tool_output_budget=1_000) as it:
        it.environment.replies["run_command"] = [{"stdout": "x" * 186}]
        response = it.run()
    assert response["incomplete_details"] == {"reason": "tool_output_budget"}
    told = notices(response)
    assert told[:4] == ["", "", "", told[3]]
    assert told[3].startswith("You have read 800 of the 1000 characters")
    assert len(told) == 5
    assert it.environment.paths[-1] == "verify"


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {"detail": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens"},
        {"error": {"message": "Your input exceeds the context window of this model."}},
    ],
)
def test_a_conversation_too_long_for_the_model_is_judged_by_the_work_done(refusal: Any) -> None:
    with stage(reply(call()), lambda: Response(json.dumps(refusal), 400)) as it:
        response = it.run()
    assert response["incomplete_details"] == {"reason": "context_window"}
    assert response["usage"]["total_tokens"] == 12
    assert len(outputs(response)) == 1


def test_a_task_too_long_for_the_model_and_any_other_refusal_are_failures() -> None:
    too_long = '{"error": {"code": "context_length_exceeded"}}'
    with stage(lambda: Response(too_long, 400)) as it:
        assert it.agent.post("/run", json=ROW).status_code == 400
    with stage(reply(call()), lambda: Response('{"detail": "no such model"}', 400)) as it:
        assert it.agent.post("/run", json=ROW).status_code == 400


def test_a_reply_that_the_model_left_incomplete_ends_the_rollout_as_it_is() -> None:
    cut = reply(call(), status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    with stage(cut) as it:
        response = it.run()
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert it.environment.paths == ["seed_session", "verify"]


# Going round in circles


def test_the_model_is_told_when_it_repeats_a_call() -> None:
    turns = [reply(call(command="make", timeout_s=5)), reply(call(timeout_s=5, command="make"))]
    with stage(*turns, reply(call(command="make", timeout_s=5)), reply(call(command="ls")), DONE) as it:
        told = notices(it.run())
    assert told[:2] == ["", ""]
    assert told[2].startswith("You have made this very call 3 times in a row.")
    assert told[3] == ""


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("", (0, 0)),
        ("a", (0, 0)),
        ("aa", (0, 0)),
        ("aaa", (1, 3)),
        ("baaaa", (1, 4)),
        ("aaab", (0, 0)),
        ("abab", (0, 0)),
        ("ababab", (2, 3)),
        ("bababab", (2, 3)),
        ("xabcabcabc", (3, 3)),
        ("abcdabcdabcd", (4, 3)),
        ("abcdeabcdeabcde", (0, 0)),
        ("abcabdabc", (0, 0)),
    ],
)
def test_circles_are_seen_from_the_third_round_on(calls: str, expected: tuple[int, int]) -> None:
    assert repeated(list(calls)) == expected


# What a tool's answer becomes


def test_what_is_short_enough_stays_as_it_is() -> None:
    assert shorten('{"a":  1}', 500) == '{"a":  1}'


@pytest.mark.parametrize("limit", [500, 1_000, 16_000])
@pytest.mark.parametrize(
    "value",
    [
        {"stdout": "\n" * 100_000, "stderr": "\\" * 100_000},
        {"stdout": "\u00e9\U0001f600" * 50_000},
        {"deep": [{"a": "x" * 20_000}, {"b": ["y" * 20_000]}], "code": 0},
    ],
)
def test_objects_stay_objects_of_the_same_shape(value: dict[str, Any], limit: int) -> None:
    short = shorten(json.dumps(value), limit)
    assert len(short) <= limit
    assert json.loads(short).keys() == value.keys()


@pytest.mark.parametrize(
    "output",
    ["line\n" * 20_000, json.dumps(list(range(20_000))), json.dumps({"files": [f"f{n}" for n in range(9_999)]})],
)
def test_all_else_keeps_its_beginning_and_its_end(output: str) -> None:
    short = shorten(output, 1_000)
    assert short[:500] == output[:500]
    assert short[-500:] == output[-500:]
    assert f"\n[... {len(output) - 1_000} characters left out ...]\n" in short
    assert len(short) < 1_100


def test_a_notice_is_a_field_of_an_object_and_a_line_after_all_else() -> None:
    assert json.loads(with_notice('{"a": 1}', "Mind.")) == {"a": 1, "agent_notice": "Mind."}
    assert with_notice("text", "Mind.") == "text\n\n[agent_notice: Mind.]"
    assert with_notice("[1]", "Mind.") == "[1]\n\n[agent_notice: Mind.]"


# Trouble


@pytest.mark.parametrize(
    ("status", "where"), [(410, "run_command"), (503, "run_command"), (500, "v1/responses"), (429, "v1/responses")]
)
def test_a_rollout_that_fails_closes_its_session_and_passes_the_status_on(status: int, where: str) -> None:
    with stage(reply(call()), DONE) as it:
        it.environment.replies["run_command"] = [lambda: Response('{"detail": "over"}', status)]
        if where == "v1/responses":
            it.model.replies[where] = [lambda: Response('{"detail": "over"}', status)]
        result = it.agent.post("/run", json=ROW)
    assert (result.status_code, "over" in result.json()["detail"]) == (status, True)
    assert it.environment.paths[-1] == "close_session"
    assert it.environment.cookies[-1] == {"session": "of-the-server"}
    assert "verify" not in it.environment.paths


@pytest.mark.parametrize("status", [404, 410, 500])
def test_an_environment_that_can_not_close_sessions_changes_nothing(status: int) -> None:
    with stage(lambda: Response('{"detail": "the model is down"}', 500)) as it:
        it.environment.replies["close_session"] = [lambda: Response("{}", status)]
        result = it.agent.post("/run", json=ROW)
    assert (result.status_code, "the model is down" in result.json()["detail"]) == (500, True)


def test_a_caller_that_goes_away_leaves_no_session_open() -> None:
    async def ask_briefly(port: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
            with pytest.raises(TimeoutError):
                await session.post(f"http://127.0.0.1:{port}/run", json=ROW)

    with stage(lambda: asyncio.sleep(60)) as it, serving(it.agent.app) as port:
        asyncio.run(ask_briefly(port))
        deadline = time.monotonic() + 20
        while it.environment.paths != ["seed_session", "close_session"]:
            assert time.monotonic() < deadline, it.environment.paths
            time.sleep(0.02)


def test_what_a_model_of_another_kind_adds_is_kept() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    with stage(reply(reasoning, call()), DONE) as it:
        response = it.run(row(temperature=0.5, max_output_tokens=64))
    assert response["output"][0] == reasoning
    assert it.asked()[1]["input"][1] == reasoning
    assert [(asked["temperature"], asked["max_output_tokens"]) for asked in it.asked()] == [(0.5, 64)] * 2
    NeMoGymResponseCreateParamsNonStreaming.model_validate(it.asked()[1])
