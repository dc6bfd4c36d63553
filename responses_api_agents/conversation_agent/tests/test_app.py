"""Talks with the agent over HTTP, in this process, before a scripted model and the counter on real sockets."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Response
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)
from responses_api_agents.conversation_agent.app import ConversationAgent, ConversationAgentConfig
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig

FOLDER = Path(__file__).parents[1]
ROWS = [json.loads(line) for line in (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
ENVIRONMENT = {"type": "resources_servers", "name": "counter"}
WAIT_LIMIT_S = 20
ADD = {
    "type": "function",
    "name": "increment_counter",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}


class FakeModel:
    """Answers what the script says, and else with all it was told, joined; it keeps what it was sent.

    Attributes:
        script: The next replies: lists of output items, whole replies, or statuses.
        hold: While it is cleared, replies wait.
    """

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.reset()
        self.app = FastAPI()
        # A plain function runs in a thread, where it may wait.
        self.app.add_api_route("/v1/responses", self.answer, methods=["POST"])

    def reset(self) -> None:
        self.script: list[Any] = []
        self.seen: list[dict[str, Any]] = []
        self.asked = threading.Semaphore(0)
        self.hold.set()

    def answer(self, body: dict[str, Any]) -> Response:
        self.seen.append(body)
        self.asked.release()
        assert self.hold.wait(WAIT_LIMIT_S)
        said = self.script.pop(0) if self.script else [message(" ".join(texts_of(body["input"])))]
        if isinstance(said, int):
            return Response(json.dumps({"detail": f"said {said}"}), said)
        whole = said if isinstance(said, dict) else reply(*said)
        return Response(json.dumps(whole), media_type="application/json")


def texts_of(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"] for item in items if item.get("role") in ("user", "developer")]


def reply(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 8, "output_tokens": 2, "total_tokens": 10}
    return {"id": "r", "created_at": 0, "model": "fake", "object": "response", "output": output, "usage": usage, **more}


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(name: str, call_id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve `app` on a free port, from a thread of its own; requests wait in the listening socket until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(WAIT_LIMIT_S)


def client_of(servers: dict[str, Any]) -> ServerClient:
    return ServerClient.from_config(OmegaConf.create(servers))


class Caller:
    """One caller of the agent: it keeps its cookie and nothing else."""

    def __init__(self, agent: TestClient) -> None:
        self.agent = agent
        self.cookies: dict[str, str] = {}

    def post(self, path: str, body: Any = None) -> Any:
        header = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        # The test client's own jar is everybody's.
        self.agent.cookies.clear()
        answer = self.agent.post(path, json=body, headers={"cookie": header} if header else {})
        self.cookies |= dict(answer.cookies)
        return answer

    def say(self, text: Any, **params: Any) -> Any:
        answer = self.post("/v1/responses", {"input": text, **params})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def whole(self) -> Any:
        return self.post("/conversation").json()


Build = Callable[..., TestClient]


@pytest.fixture(scope="module")
def fake_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def model(fake_model: FakeModel) -> Iterator[FakeModel]:
    fake_model.reset()
    yield fake_model
    fake_model.hold.set()


@pytest.fixture(scope="module")
def servers(fake_model: FakeModel) -> Iterator[dict[str, Any]]:
    """Serve the counter, the fake model and the pattern model, and yield a configuration of them."""
    counter_config = StatefulCounterResourcesServerConfig(host="", port=0, entrypoint="", name="counter")
    pattern_config = PatternModelConfig(host="", port=0, entrypoint="", name="pattern")
    counter = StatefulCounterResourcesServer(config=counter_config, server_client=client_of({}))
    pattern = PatternModel(config=pattern_config, server_client=client_of({}))
    with (
        serving(counter.setup_webserver()) as counter_port,
        serving(fake_model.app) as fake_port,
        serving(pattern.setup_webserver()) as pattern_port,
    ):
        yield {
            "counter": {"resources_servers": {"x": {"host": "127.0.0.1", "port": counter_port}}},
            "fake": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": fake_port}}},
            "pattern": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": pattern_port}}},
        }


@pytest.fixture
def build(model: FakeModel, servers: dict[str, Any]) -> Iterator[Build]:
    """Yield what starts an agent before one of the models."""
    with ExitStack() as stack:

        def built(model_name: str = "fake", **settings: Any) -> TestClient:
            model_server = {"type": "responses_api_models", "name": model_name}
            config = ConversationAgentConfig(
                host="", port=0, entrypoint="", name="agent", model_server=model_server, **settings
            )
            agent = ConversationAgent(config=config, server_client=client_of(servers))
            return stack.enter_context(TestClient(agent.setup_webserver()))

        yield built


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["output"][-1]["content"][0]["text"]
    return text


# The conversation


def test_the_model_reads_all_that_was_said_and_the_caller_only_what_is_new(build: Build, model: FakeModel) -> None:
    caller = Caller(build())
    assert text_of(caller.say("one")) == "one"
    second = caller.say([{"role": "user", "content": "two"}])
    assert text_of(second) == "one two"
    assert len(second["output"]) == 1
    assert [item["role"] for item in model.seen[1]["input"]] == ["user", "assistant", "user"]
    whole = caller.whole()
    assert [item["role"] for item in whole["items"]] == ["user", "assistant", "user", "assistant"]
    assert (whole["steps_used"], whole["tokens_used"], whole["notes"]) == (2, 20, [])


def test_conversations_of_two_callers_stay_apart(build: Build) -> None:
    agent = build()
    ada, bob = Caller(agent), Caller(agent)
    ada.say("ada")
    bob.say("bob")
    assert text_of(ada.say("again")) == "ada again"
    assert text_of(bob.say("again")) == "bob again"


def test_what_is_set_once_beside_the_input_holds_until_it_is_changed(build: Build, model: FakeModel) -> None:
    caller = Caller(build())
    caller.say("one", instructions="Be brief.", temperature=0.5)
    caller.say("two")
    caller.say("three", instructions=None)
    assert [seen.get("instructions") for seen in model.seen] == ["Be brief.", "Be brief.", None]
    assert [seen.get("temperature") for seen in model.seen] == [0.5] * 3


@pytest.mark.parametrize(
    "failure", [503, 400, {**reply(), "error": {"code": "x", "message": "no"}}, {"no": "response"}]
)
def test_a_failing_model_leaves_the_conversation_as_it_was(build: Build, model: FakeModel, failure: Any) -> None:
    caller = Caller(build())
    caller.say("one", instructions="Be brief.")
    before = caller.whole()
    model.script = [failure]
    assert caller.post("/v1/responses", {"input": "two", "instructions": "Shout."}).status_code >= 400
    assert caller.whole() == before
    assert text_of(caller.say("two")) == "one two"
    assert model.seen[-1]["instructions"] == "Be brief."


def test_a_failing_first_request_begins_a_conversation_all_the_same(build: Build, model: FakeModel) -> None:
    caller = Caller(build())
    model.script = [503]
    assert caller.post("/v1/responses", {"input": "one"}).status_code == 503
    assert caller.whole()["items"] == []
    assert text_of(caller.say("one")) == "one"


@pytest.mark.parametrize(
    ("body", "problem"),
    [({"input": ""}, "empty"), ({"input": []}, "empty"), ({"input": "x", "previous_response_id": "r"}, "cookie")],
)
def test_a_request_that_says_nothing_or_names_its_conversation_otherwise_is_refused(
    build: Build, body: Any, problem: str
) -> None:
    answer = Caller(build()).post("/v1/responses", body)
    assert answer.status_code == 422
    assert problem in answer.json()["detail"]


def test_requests_of_one_conversation_are_taken_one_after_another(build: Build, model: FakeModel) -> None:
    agent = build()
    caller, other = Caller(agent), Caller(agent)
    caller.say("one")
    assert model.asked.acquire(timeout=WAIT_LIMIT_S)
    model.hold.clear()
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(caller.say, "two")
        assert model.asked.acquire(timeout=WAIT_LIMIT_S)
        waiting = threads.submit(caller.say, "three")
        elsewhere = threads.submit(other.say, "another conversation")
        # Another conversation is not kept waiting; when it has got through, this one's request has had its chance.
        assert model.asked.acquire(timeout=WAIT_LIMIT_S)
        assert [texts_of(seen["input"])[-1] for seen in model.seen] == ["one", "two", "another conversation"]
        model.hold.set()
        assert text_of(slow.result()) == "one two"
        assert text_of(waiting.result()) == "one two three"
        assert text_of(elsewhere.result()) == "another conversation"


# Conversations that are not there


def test_one_that_never_began_is_not_found(build: Build) -> None:
    assert Caller(build()).post("/conversation").status_code == 404


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "x"}), ("/notes", {}), ("/conversation", None)])
def test_beyond_the_limit_the_one_untouched_for_longest_is_dropped_and_says_so(
    build: Build, path: str, body: Any
) -> None:
    agent = build(max_sessions=2)
    first, second, third = (Caller(agent) for _ in range(3))
    first.say("one")
    second.say("two")
    first.whole()
    third.say("three")
    for _ in range(2):
        lost = second.post(path, body)
        assert lost.status_code == 410
        assert "Begin a new conversation" in lost.json()["detail"]
    assert text_of(first.say("still here")) == "one still here"


def test_a_server_started_again_does_not_go_on_with_an_empty_conversation(build: Build) -> None:
    caller = Caller(build())
    caller.say("one")
    caller.agent = build()
    assert caller.post("/v1/responses", {"input": "two"}).status_code == 410


def test_a_cookie_that_is_no_good_is_not_taken_for_a_new_conversation(build: Build) -> None:
    caller = Caller(build())
    caller.say("one")
    ((name, value),) = caller.cookies.items()
    for forged in (value[:-2], "nonsense", value.partition(".")[2], ""):
        caller.cookies = {name: forged}
        assert caller.post("/v1/responses", {"input": "two"}).status_code == 410, forged


def test_a_session_that_is_closed_has_no_conversation_any_more(build: Build) -> None:
    agent = build(session_end={}, max_sessions=1)
    caller, other = Caller(agent), Caller(agent)
    caller.say("one")
    assert caller.post("/close_session").status_code == 200
    assert caller.post("/v1/responses", {"input": "two"}).status_code == 410
    assert text_of(other.say("two")) == "two"


def test_one_with_a_request_in_hand_is_never_dropped_for_room(build: Build, model: FakeModel) -> None:
    agent = build(max_sessions=1)
    busy, other = Caller(agent), Caller(agent)
    model.hold.clear()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(busy.say, "one")
        assert model.asked.acquire(timeout=WAIT_LIMIT_S)
        assert other.post("/v1/responses", {"input": "two"}).status_code == 503
        model.hold.set()
        assert text_of(answer.result()) == "one"
    assert text_of(other.say("two")) == "two"
    assert busy.post("/conversation").status_code == 410


async def test_a_released_conversation_refuses_the_requests_that_waited() -> None:
    from responses_api_agents.conversation_agent.conversations import Conversations, ReleasedError

    conversations = Conversations(1)
    conversation = conversations.begin("a")
    for _ in range(2):
        conversations.release("a")
    assert len(conversations) == 0
    with pytest.raises(ReleasedError):
        async with conversation.turn():
            pass


# The budget


def test_a_reply_tells_what_is_left_and_a_used_up_budget_adds_nothing(build: Build, model: FakeModel) -> None:
    caller = Caller(build(step_budget=2, token_budget=1000))
    first = caller.say("one")
    assert first["metadata"] == {"steps_used": "1", "tokens_used": "10", "steps_left": "1", "tokens_left": "990"}
    assert caller.say("two")["metadata"]["steps_left"] == "0"
    for _ in range(2):
        cut = caller.say("three")
        assert (cut["status"], cut["incomplete_details"], cut["output"]) == (
            "incomplete",
            {"reason": "step_budget"},
            [],
        )
    assert len(model.seen) == 2
    assert [item["role"] for item in caller.whole()["items"]] == ["user", "assistant"] * 2


def test_tokens_are_budgeted_over_the_whole_conversation(build: Build) -> None:
    caller = Caller(build(token_budget=15))
    assert caller.say("one")["metadata"]["tokens_left"] == "5"
    over = caller.say("two")
    assert (over["metadata"]["tokens_left"], over.get("incomplete_details")) == ("0", None)
    assert caller.say("three")["incomplete_details"] == {"reason": "token_budget"}


@pytest.mark.parametrize(("limit", "reason"), [("step_budget", "step_budget"), ("max_steps", "max_steps")])
def test_a_budget_that_ends_within_a_turn_keeps_what_was_done(
    build: Build, model: FakeModel, limit: str, reason: str
) -> None:
    caller = Caller(build(remember_tool=True, **{limit: 1}))
    model.script = [[call("remember", note="blue")]]
    cut = caller.say("one")
    assert [item["type"] for item in cut["output"]] == ["function_call", "function_call_output"]
    assert (cut["status"], cut["incomplete_details"]["reason"]) == ("incomplete", reason)
    whole = caller.whole()
    assert (len(whole["items"]), whole["notes"]) == (3, ["blue"])


# Notes


def test_notes_are_shown_to_the_model_at_every_turn_and_are_no_part_of_the_conversation(
    build: Build, model: FakeModel
) -> None:
    caller = Caller(build())
    assert caller.post("/notes", {"add": ["It is Monday.", " Ada likes tea. "]}).json() == {
        "notes": ["It is Monday.", "Ada likes tea."]
    }
    caller.say("one")
    caller.say("two")
    for seen in model.seen:
        assert seen["input"][0] == {
            "role": "developer",
            "content": "Notes of this conversation:\n- It is Monday.\n- Ada likes tea.",
        }
    assert len(caller.whole()["items"]) == 4
    assert caller.post("/notes", {}).json()["notes"] == ["It is Monday.", "Ada likes tea."]


def test_notes_that_do_not_fit_are_refused_as_a_whole(build: Build) -> None:
    caller = Caller(build())
    for wrong in ([" "], ["good", "x" * 2001], ["x"] * 101):
        answer = caller.post("/notes", {"add": wrong})
        assert (answer.status_code, "no note was added" in answer.text) == (422, True)
    assert caller.post("/notes", {}).json() == {"notes": []}


def test_the_model_keeps_notes_with_the_tool_remember(build: Build, model: FakeModel) -> None:
    caller = Caller(build(remember_tool=True))
    model.script = [[call("remember", note="Ada likes tea.")], [message("Noted.")], [call("remember", note=5)]]
    first = caller.say("Ada likes tea.")
    assert [item["type"] for item in first["output"]] == ["function_call", "function_call_output", "message"]
    assert json.loads(first["output"][1]["output"]) == {"notes": 1}
    assert "error" in json.loads(caller.say("And?")["output"][1]["output"])
    assert "Ada likes tea." in model.seen[2]["input"][0]["content"]
    assert [tool["name"] for tool in model.seen[0]["tools"]] == ["remember"]


def test_a_note_of_a_turn_that_fails_is_not_kept(build: Build, model: FakeModel) -> None:
    caller = Caller(build(remember_tool=True))
    model.script = [[call("remember", note="blue")], 500]
    assert caller.post("/v1/responses", {"input": "one"}).status_code == 500
    assert caller.whole() == {"items": [], "notes": [], "steps_used": 0, "tokens_used": 0}


# Tools


def test_calls_of_the_callers_own_tools_are_answered_to_the_caller(build: Build, model: FakeModel) -> None:
    caller = Caller(build(remember_tool=True))
    model.script = [[call("remember", "c1", note="blue"), call("increment_counter", "c2", count=1)]]
    first = caller.say("one", tools=[ADD])
    assert [item["type"] for item in first["output"]] == ["function_call", "function_call", "function_call_output"]
    caller.say([{"type": "function_call_output", "call_id": "c2", "output": "7"}])
    assert model.seen[1]["input"][-1]["output"] == "7"


def test_a_tool_that_nobody_has_is_told_to_the_model(build: Build, model: FakeModel) -> None:
    model.script = [[call("fly")]]
    output = Caller(build()).say("one")["output"]
    assert "no tool 'fly'" in output[1]["output"]
    assert output[-1]["type"] == "message"


def test_calls_in_a_reply_that_was_cut_off_are_not_run_and_get_a_result(build: Build, model: FakeModel) -> None:
    caller = Caller(build(remember_tool=True))
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    model.script = [{**reply(call("remember", note="bl")), **cut}]
    first = caller.say("one")
    assert first["incomplete_details"]["reason"] == "max_output_tokens"
    assert "not run" in first["output"][1]["output"]
    assert caller.whole()["notes"] == []


def test_an_environments_tools_act_in_the_session_that_the_agent_began(build: Build, model: FakeModel) -> None:
    caller = Caller(build(resources_server=ENVIRONMENT, seed={"initial_count": 5}))
    model.script = [503]
    assert caller.post("/v1/responses", {"input": "zero"}).status_code == 503
    for number in (1, 2):
        model.script = [[call("increment_counter", count=number), call("get_counter_value", "call_2")]]
        output = caller.say(f"add {number}")["output"]
    assert json.loads(output[3]["output"]) == {"count": 8}


def test_an_environments_lost_session_ends_the_turn_and_leaves_the_conversation(build: Build, model: FakeModel) -> None:
    caller = Caller(build(resources_server=ENVIRONMENT))
    caller.say("one")
    model.script = [[call("increment_counter", count=1)]]
    assert caller.post("/v1/responses", {"input": "two"}).status_code == 410
    assert len(caller.whole()["items"]) == 2


# Rollouts


def test_every_example_row_is_played_turn_by_turn_and_rewarded(build: Build) -> None:
    agent = build("pattern", resources_server=ENVIRONMENT)
    assert len(ROWS) >= 5
    for row in ROWS:
        verdict = Caller(agent).post("/run", row).json()
        assert verdict["reward"] == 1.0, row["id"]
        said = [item["content"] for item in verdict["response"]["output"] if item.get("role") == "user"]
        assert said == row["turns"]


def test_a_rollout_ends_when_its_budget_does_and_is_verified(build: Build) -> None:
    agent = build("pattern", resources_server=ENVIRONMENT, step_budget=2)
    verdict = Caller(agent).post("/run", ROWS[0]).json()
    assert (verdict["reward"], verdict["final_count"]) == (0.0, 3)
    response = verdict["response"]
    assert response["incomplete_details"] == {"reason": "step_budget"}
    assert response["output"][-1]["content"] == ROWS[0]["turns"][0]
    assert response["usage"]["total_tokens"] == int(response["metadata"]["tokens_used"])


def test_a_rollout_leaves_no_conversation_behind(build: Build) -> None:
    caller = Caller(build("pattern", resources_server=ENVIRONMENT))
    caller.post("/run", ROWS[0])
    assert caller.post("/conversation").status_code == 404


def test_without_an_environment_a_rollout_says_that_it_needs_one(build: Build) -> None:
    answer = Caller(build()).post("/run", ROWS[0])
    assert (answer.status_code, "resources_server" in answer.text) == (422, True)
