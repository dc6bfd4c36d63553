"""Runs the agent between real servers on ports of this machine: scripted ones, and the counter with its model."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "go"}]}, "id": "row-1", "goal": 3}
USAGE = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}


BROKEN = object()


class Disconnecting(Response):
    """Promises a body and breaks off the connection before its end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class Scripted:
    """A server that answers each path with its script's next reply (the last one again), and notes what it was sent.

    Args:
        replies: Per path, the replies: JSON values, or ready responses.
        cookie: The name of the cookie that counts its requests.
    """

    def __init__(self, replies: dict[str, list[Any]], cookie: str) -> None:
        self.replies = replies
        self.cookie = cookie
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["POST"])

    async def answer(self, request: Request, path: str) -> Response:
        self.seen.append((path, await request.json(), dict(request.cookies)))
        if path not in self.replies:
            reply = Response('{"detail": "Not Found"}', 404)
        else:
            script = self.replies[path]
            next_reply = script.pop(0) if len(script) > 1 else script[0]
            if next_reply is BROKEN:
                return Disconnecting()
            reply = next_reply if isinstance(next_reply, Response) else Response(json.dumps(next_reply))
        reply.set_cookie(self.cookie, str(len(self.seen)))
        return reply

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body, _ in self.seen if seen == path]


@contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """Serve `app` on a free port, from a thread of its own; requests wait in the listening socket until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


@contextmanager
def agent_between(environment: FastAPI, model: FastAPI, **settings: Any) -> Iterator[TestClient]:
    with ExitStack() as stack:
        ports = {"environment": stack.enter_context(serving(environment)), "model": stack.enter_context(serving(model))}
        global_config = {
            "environment": {"resources_servers": {"x": {"host": "127.0.0.1", "port": ports["environment"]}}},
            "model": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": ports["model"]}}},
        }
        config = SimpleAgentConfig(
            host="",
            port=0,
            entrypoint="",
            name="agent",
            resources_server={"type": "resources_servers", "name": "environment"},
            model_server={"type": "responses_api_models", "name": "model"},
            **settings,
        )
        client = ServerClient.from_config(OmegaConf.create(global_config))
        agent = SimpleAgent(config=config, server_client=client)
        yield stack.enter_context(TestClient(agent.setup_webserver()))


def reply(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "created_at": 0,
        "model": "scripted",
        "object": "response",
        "output": list(output),
        "usage": USAGE,
        **more,
    }


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(name: str, arguments: str = "{}", call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


@contextmanager
def stage(model: list[Any], **settings: Any) -> Iterator[tuple[TestClient, Scripted, Scripted]]:
    """Yield the agent, its environment (tools `look` and `take`) and its model, which says `model` turn by turn."""
    environment = Scripted(
        {
            "seed_session": [{}],
            "verify": [{"reward": 0.5, "note": "half", **ROW, "response": reply(message("as verified"))}],
            "look": [{"seen": 1}, {"seen": 2}],
            "take": [Response('{"detail": "nothing there"}', 409)],
            "gone": [Response('{"detail": "worker gone"}', 410, headers={"X-NeMo-Gym-Session-Lost": "worker_gone"})],
        },
        cookie="environment",
    )
    scripted_model = Scripted({"v1/responses": model}, cookie="model")
    with agent_between(environment.app, scripted_model.app, **settings) as agent:
        yield agent, environment, scripted_model


def outputs(trajectory: list[dict[str, Any]]) -> list[Any]:
    return [item["output"] for item in trajectory if item["type"] == "function_call_output"]


def test_a_rollout_seeds_with_the_row_and_verifies_with_row_and_trajectory() -> None:
    with stage([reply(call("look")), reply(message("done"))]) as (agent, environment, _):
        result = agent.post("/run", json=ROW)
    assert environment.paths == ["seed_session", "look", "verify"]
    assert environment.bodies("seed_session") == [ROW]
    (verified,) = environment.bodies("verify")
    assert {key: verified[key] for key in ROW} == ROW
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"]
    assert (result.status_code, result.json()["reward"], result.json()["note"]) == (200, 0.5, "half")
    assert (result.json()["id"], result.json()["goal"]) == ("row-1", 3)
    assert result.json()["response"]["output"][0]["content"][0]["text"] == "as verified"


def test_the_reply_tells_where_the_time_went() -> None:
    with stage([reply(call("look")), reply(message("done"))]) as (agent, _, _):
        seconds = agent.post("/run", json={**ROW, "_ng_rollout_seconds": {"model": 1000}}).json()["_ng_rollout_seconds"]
    assert set(seconds) == {"model", "tools", "seed", "verify"}
    assert all(0 < spent < 1000 for spent in seconds.values())


def test_the_trajectory_holds_every_item_and_the_model_is_shown_it_again() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    turns = [reply(reasoning, call("look", call_id="call_a")), reply(message("one more"), call("look", call_id="b"))]
    with stage([*turns, reply(message("done"))]) as (agent, _, model):
        result = agent.post("/v1/responses", json={"input": "go"}).json()
    output = result["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert [item["call_id"] for item in output if "call_id" in item] == ["call_a", "call_a", "b", "b"]
    assert outputs(output) == ['{"seen": 1}', '{"seen": 2}']
    shown = [body["input"] for body in model.bodies("v1/responses")]
    assert [len(items) for items in shown] == [1, 4, 7]
    assert shown[0] == [{"role": "user", "content": "go"}]
    assert shown[2][1:] == output[:6]


def test_usage_is_summed_over_all_turns() -> None:
    with stage([reply(call("look")), reply(call("look")), reply(message("done"))]) as (agent, _, _):
        usage = agent.post("/v1/responses", json={"input": "go"}).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (30, 6, 36)


def test_parallel_calls_run_in_order() -> None:
    calls = [call("look", call_id="first"), call("take", call_id="second"), call("look", call_id="third")]
    with stage([reply(*calls), reply(message("done"))]) as (agent, environment, _):
        output = agent.post("/v1/responses", json={"input": "go"}).json()["output"]
    assert environment.paths == ["look", "take", "look"]
    results = [item for item in output if item["type"] == "function_call_output"]
    assert [item["call_id"] for item in results] == ["first", "second", "third"]
    assert json.loads(results[0]["output"]) == {"seen": 1}
    assert json.loads(results[2]["output"]) == {"seen": 2}


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"text"', "null", "5"])
def test_arguments_that_are_no_json_object_are_told_to_the_model_and_not_sent(arguments: str) -> None:
    with stage([reply(call("look", arguments)), reply(message("sorry"))]) as (agent, environment, model):
        output = agent.post("/v1/responses", json={"input": "go"}).json()["output"]
    assert environment.paths == []
    assert "JSON" in json.loads(outputs(output)[0])["error"]
    assert model.bodies("v1/responses")[1]["input"][-1]["output"] == outputs(output)[0]


def test_a_tools_error_is_told_to_the_model_and_the_rollout_goes_on() -> None:
    with stage([reply(call("take")), reply(call("look")), reply(message("done"))]) as (agent, _, _):
        output = agent.post("/v1/responses", json={"input": "go"}).json()["output"]
    assert json.loads(outputs(output)[0]) == {"error": "nothing there", "status": 409}
    assert json.loads(outputs(output)[1]) == {"seen": 1}


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_call_that_the_server_could_not_carry_out_ends_the_rollout_and_is_not_shown_to_the_model(status: int) -> None:
    with stage([reply(call("look")), reply(message("done"))]) as (agent, environment, model):
        environment.replies["look"] = [Response('{"detail": "no descriptors left"}', status)]
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "no descriptors left" in result.json()["detail"]) == (status, True)
    assert len(model.paths) == 1
    assert "verify" not in environment.paths


def test_an_unknown_tool_is_told_to_the_model() -> None:
    with stage([reply(call("fly")), reply(message("done"))]) as (agent, environment, _):
        output = agent.post("/v1/responses", json={"input": "go"}).json()["output"]
    assert environment.paths == ["fly"]
    assert json.loads(outputs(output)[0]) == {"error": "there is no tool 'fly'"}


@pytest.mark.parametrize(
    "name",
    ["verify", "seed_session", "aggregate_metrics", "../verify", "a/../verify", "%76erify", "look?x=1", "", ".", "a b"],
)
def test_a_tools_name_reaches_no_other_route(name: str) -> None:
    with stage([reply(call(name)), reply(message("done"))]) as (agent, environment, _):
        output = agent.post("/v1/responses", json={"input": "go"}).json()["output"]
    assert environment.paths == []
    assert "can't be called" in json.loads(outputs(output)[0])["error"]


def test_only_offered_tools_are_called_where_tools_are_offered() -> None:
    tools = [{"type": "function", "name": "take", "parameters": {"type": "object", "properties": {}}}]
    with stage([reply(call("look")), reply(message("done"))]) as (agent, environment, _):
        output = agent.post("/v1/responses", json={"input": "go", "tools": tools}).json()["output"]
    assert environment.paths == []
    assert json.loads(outputs(output)[0])["error"] == "there is no tool 'look'; the tools are: take"


def test_a_lost_session_ends_the_rollout_with_its_410_and_is_not_shown_to_the_model() -> None:
    with stage([reply(call("gone")), reply(message("never said"))]) as (agent, environment, model):
        result = agent.post("/run", json=ROW)
    assert result.status_code == 410
    assert result.headers["X-NeMo-Gym-Session-Lost"] == "worker_gone"
    assert "worker gone" in result.json()["detail"]
    assert len(model.paths) == 1
    assert "verify" not in environment.paths


def test_a_failing_model_fails_the_rollout_and_nothing_is_verified() -> None:
    overloaded = Response('{"detail": "too many requests"}', 429)
    with stage([overloaded]) as (agent, environment, _):
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "too many requests" in result.json()["detail"]) == (429, True)
    failed = reply(status="failed", error={"code": "server_error", "message": "out of memory"})
    with stage([failed]) as (agent, environment, _):
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "out of memory" in result.json()["detail"]) == (502, True)
    assert environment.paths == ["seed_session"]


@pytest.mark.parametrize("path", ["seed_session", "look", "verify"])
def test_a_connection_that_breaks_ends_the_rollout_with_502_and_is_not_shown_to_the_model(path: str) -> None:
    with stage([reply(call("look")), reply(message("done"))]) as (agent, environment, model):
        environment.replies[path] = [BROKEN]
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "lost its connection" in result.json()["detail"]) == (502, True)
    assert environment.paths.count(path) == 1
    assert len(model.paths) == {"seed_session": 0, "look": 1, "verify": 2}[path]


def test_after_max_steps_the_last_calls_are_run_and_the_response_is_incomplete() -> None:
    with stage([reply(call("look"))], max_steps=2) as (agent, environment, model):
        result = agent.post("/v1/responses", json={"input": "go"}).json()
    assert len(model.paths) == 2
    assert environment.paths == ["look", "look"]
    assert (result["status"], result["incomplete_details"]) == ("incomplete", {"reason": "max_steps"})
    assert result["output"][-1]["type"] == "function_call_output"


def test_an_answer_in_the_last_step_is_complete() -> None:
    turns = [reply(call("look")), reply(message("done"), status="completed")]
    with stage(turns, max_steps=2) as (agent, _, _):
        result = agent.post("/v1/responses", json={"input": "go"}).json()
    assert (result["status"], result.get("incomplete_details")) == ("completed", None)


def test_calls_of_a_reply_that_was_cut_off_are_not_run() -> None:
    cut = reply(call("look", '{"a": 1'), status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    with stage([cut]) as (agent, environment, _):
        result = agent.post("/v1/responses", json={"input": "go"}).json()
    assert environment.paths == []
    assert result["incomplete_details"] == {"reason": "max_output_tokens"}


def test_each_server_gets_its_own_cookies_as_it_last_set_them() -> None:
    with stage([reply(call("look")), reply(call("look")), reply(message("done"))]) as (agent, environment, model):
        assert agent.post("/run", json=ROW).status_code == 200
    assert [cookies for _, _, cookies in environment.seen] == [
        {},
        {"environment": "1"},
        {"environment": "2"},
        {"environment": "3"},
    ]
    assert [cookies for _, _, cookies in model.seen] == [{}, {"model": "1"}, {"model": "2"}]


def test_a_caller_that_seeds_itself_is_served_in_its_sessions_and_gets_their_cookies_back() -> None:
    with stage([reply(call("look")), reply(message("done"))]) as (agent, environment, _):
        agent.cookies = {"environment": "seeded"}
        result = agent.post("/v1/responses", json={"input": "go"})
    assert environment.seen[0][2] == {"environment": "seeded"}
    assert (result.cookies["environment"], result.cookies["model"]) == ("1", "2")
    assert "SimpleAgent___agent" in result.cookies


def test_the_agents_own_cookie_stays_with_the_agent() -> None:
    with stage([reply(message("done"))]) as (agent, environment, model):
        assert agent.post("/run", json=ROW).status_code == 200
        assert agent.post("/run", json=ROW).status_code == 200
    assert all("SimpleAgent___agent" not in cookies for _, _, cookies in environment.seen + model.seen)


def test_metrics_are_asked_of_the_environment() -> None:
    with stage([reply(message("done"))]) as (agent, environment, _):
        environment.replies["aggregate_metrics"] = [{"agent_metrics": {"mean/reward": 0.5}}]
        result = agent.post("/aggregate_metrics", json={"verify_responses": [{"reward": 0.5}]})
    assert environment.bodies("aggregate_metrics") == [{"verify_responses": [{"reward": 0.5}]}]
    assert result.json()["agent_metrics"] == {"mean/reward": 0.5}


def test_the_counters_rows_are_solved_through_real_servers() -> None:
    where: dict[str, Any] = {"host": "", "port": 0, "entrypoint": ""}
    client = ServerClient.from_config(OmegaConf.create({}))
    counter = StatefulCounterResourcesServer(
        config=StatefulCounterResourcesServerConfig(**where, name="environment"), server_client=client
    )
    model = PatternModel(config=PatternModelConfig(**where, name="model"), server_client=client)
    folder = Path(__file__).parents[3] / "resources_servers" / "example_session_state_mgmt"
    rows = [json.loads(line) for line in (folder / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
    with agent_between(counter.setup_webserver(), model.setup_webserver()) as agent:
        results = [agent.post("/run", json=row).json() for row in rows]
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    assert [result["id"] for result in results] == [row["id"] for row in rows]
