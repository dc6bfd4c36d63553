"""Runs the agent between real servers on ports of this machine, beside `simple_agent`: both must come to the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool
from starlette.testclient import TestClient

from nemo_gym.server.middleware import LogContextMiddleware, put_outermost
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)
from responses_api_agents.mcp_agent.app import McpAgent
from responses_api_agents.mcp_agent.tests.stage import (
    NOWHERE,
    PREFIX,
    ROW,
    TOOLS,
    WHERE,
    House,
    ScriptedModel,
    Watched,
    agent_app,
    call,
    exposed,
    function,
    message,
    outputs,
    reply,
    room,
    serving,
    stage,
)
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig


def test_a_rollout_seeds_and_verifies_over_http_and_calls_its_tools_over_mcp() -> None:
    turns = [reply(call(PREFIX + "look")), reply(call(PREFIX + "look")), reply(message("done"))]
    environment, model = Watched(exposed(room())), ScriptedModel(*turns)
    with stage(environment, model.app) as agent:
        results = [agent.post("/run", json=ROW).json()]
        model.turns = turns
        results.append(agent.post("/run", json=ROW).json())
    assert [result["reward"] for result in results] == [2.0, 2.0]
    assert results[0]["id"] == "row-1"
    assert outputs(results[0]) == ['{"seen":1}', '{"seen":2}']
    assert results[0]["seen_names"] == ["look", "look"]
    assert set(environment.methods) == {"POST"}
    assert len(environment.clients) == 2


def test_calls_over_mcp_say_for_which_rollout_they_are(house: House) -> None:
    seen: list[str | None] = []

    def note(scope: Any, body: bytes) -> None:
        seen.append(dict(scope["headers"]).get(b"nemo-gym-rollout", b"").decode())

    house.environment.change = note
    house.model.turns = [reply(call(PREFIX + "look")), reply(message("done"))]
    app = agent_app(McpAgent, *house.ports)
    put_outermost(app, LogContextMiddleware)
    with TestClient(app) as agent:
        agent.post("/run", json=ROW, headers={"nemo-gym-rollout": "17-3"}).raise_for_status()
    assert set(seen) == {"17-3"}


def test_the_model_is_offered_the_listed_tools_in_place_of_the_rows(house: House) -> None:
    own = [function("take", strict=True), {"type": "web_search"}, function("elsewhere"), function("look")]
    row = {"responses_create_params": {"input": "go", "tools": own, "tool_choice": "required"}}
    house.model.turns = [reply(message("done"))]
    with house.agent() as agent:
        agent.post("/run", json=row).raise_for_status()
        agent.post("/run", json=ROW).raise_for_status()
    sent = house.model.seen
    offered = sent[0]["tools"]
    names = [tool.get("name") for tool in offered]
    assert names == [PREFIX + "take", None, "elsewhere", PREFIX + "look", PREFIX + "fail", PREFIX + "wait"]
    assert offered[1:3] == own[1:3]
    assert offered[3]["description"] == "Look around."
    assert offered[0]["parameters"]["properties"]["amount"]["minimum"] == 1
    assert {tool["strict"] for tool in offered if tool.get("name", "").startswith(PREFIX)} == {False}
    assert sent[0]["tool_choice"] == "required"
    assert [tool["name"] for tool in sent[1]["tools"]] == [PREFIX + name for name in TOOLS]


def test_the_servers_own_names_are_offered_where_the_settings_say_so(house: House) -> None:
    house.model.turns = [reply(call("look")), reply(message("done"))]
    with house.agent(tool_names="bare") as agent:
        result = agent.post("/run", json=ROW).json()
    assert [tool["name"] for tool in house.model.seen[0]["tools"]] == list(TOOLS)
    assert (outputs(result), result["reward"]) == (['{"seen":1}'], 1.0)


@pytest.mark.parametrize("allowed", [["take"], []])
def test_a_session_that_may_use_few_tools_is_offered_these_only(allowed: list[str]) -> None:
    environment = room()
    environment.allowed = allowed
    own = [function("look")]
    row = {"responses_create_params": {"input": "go", "tools": own}}
    model = ScriptedModel(reply(call("look"), call(PREFIX + "look")), reply(message("done")))
    with stage(exposed(environment), model.app) as agent:
        result = agent.post("/run", json=row).json()
    assert [tool["name"] for tool in model.seen[0]["tools"]] == ["look", *(PREFIX + name for name in allowed)]
    assert outputs(result)[0] == '{"error": "there is no tool \'look\'"}'
    assert "there is no tool" in outputs(result)[1]
    assert result["reward"] == 0.0


def test_a_tool_choice_names_the_tool_as_it_is_offered(house: House) -> None:
    one = {"type": "function", "name": "take"}
    some = {"type": "allowed_tools", "mode": "auto", "tools": [one, {"type": "function", "name": "elsewhere"}]}
    house.model.turns = [reply(message("done"))]
    with house.agent() as agent:
        for choice in (one, some):
            row = {"responses_create_params": {"input": "go", "tool_choice": choice}}
            agent.post("/run", json=row).raise_for_status()
    assert house.model.seen[0]["tool_choice"] == {"type": "function", "name": PREFIX + "take"}
    assert [tool["name"] for tool in house.model.seen[1]["tool_choice"]["tools"]] == [PREFIX + "take", "elsewhere"]


def both_ways(house: House, turns: Callable[[str], list[Any]], **settings: Any) -> list[tuple[Any, list[Any]]]:
    """Run one rollout with each agent; return its reply and what its model was sent, with the names made equal."""
    told = []
    row = {**ROW, "responses_create_params": {"input": "go", "tools": [function(name) for name in TOOLS]}}
    for agent_class, prefix in ((SimpleAgent, ""), (McpAgent, PREFIX)):
        house.model.turns, house.model.seen = turns(prefix), []
        with house.agent(agent_class, **settings) as agent:
            result = agent.post("/run", json=row)
        told.append((result, bare([seen["input"] for seen in house.model.seen])))
    return told


def bare(items: Any) -> Any:
    return json.loads(json.dumps(items).replace(PREFIX, ""))


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("look", "{}"),
        ("look", ""),
        ("take", '{"amount": 3}'),
        ("take", '{"amount": 0}'),
        ("take", '{"amount": 1, "more": 2}'),
        ("take", "{}"),
        ("take", '{"amount": '),
        ("take", "[1]"),
        ("fly", "{}"),
        ("verify", "{}"),
        ("fail", '{"status": 400, "detail": "no \u00fcber"}'),
        ("fail", '{"status": 401}'),
        ("fail", '{"status": 404}'),
        ("fail", '{"status": 404, "detail": "Not Found"}'),
        ("fail", '{"status": 409, "detail": ""}'),
        ("fail", '{"status": 429}'),
        ("fail", '{"status": 500}'),
        ("fail", json.dumps({"status": 418, "detail": "x" * 5_000})),
    ],
)
def test_the_model_reads_the_same_as_over_http(house: House, tool: str, arguments: str) -> None:
    def turns(prefix: str) -> list[Any]:
        return [reply(call(prefix + tool, arguments)), reply(call(prefix + "look")), reply(message("done"))]

    (over_http, sent_over_http), (over_mcp, sent_over_mcp) = both_ways(house, turns)
    assert over_mcp.status_code == 200
    assert sent_over_mcp == sent_over_http
    assert bare(over_mcp.json()["response"]["output"]) == over_http.json()["response"]["output"]
    assert over_mcp.json()["reward"] == over_http.json()["reward"] >= 1.0


@pytest.mark.parametrize("status", [410, 502, 503, 504])
def test_what_ends_a_rollout_over_http_ends_it_over_mcp(house: House, status: int) -> None:
    def turns(prefix: str) -> list[Any]:
        return [reply(call(prefix + "fail", json.dumps({"status": status}))), reply(message("never said"))]

    (over_http, sent_over_http), (over_mcp, sent_over_mcp) = both_ways(house, turns)
    assert over_mcp.status_code == over_http.status_code == status
    assert over_mcp.json()["detail"].endswith("no luck")
    assert len(sent_over_mcp) == len(sent_over_http) == 1


def test_parallel_calls_run_in_order_and_the_last_step_is_cut_the_same(house: House) -> None:
    def turns(prefix: str) -> list[Any]:
        amounts = ("look", "{}"), ("take", '{"amount": 2}'), ("look", "{}")
        return [reply(*(call(prefix + name, text, f"call_{at}") for at, (name, text) in enumerate(amounts)))]

    (over_http, _), (over_mcp, sent) = both_ways(house, turns, max_steps=2)
    trajectory = over_mcp.json()["response"]
    assert trajectory["output"] == over_http.json()["response"]["output"]
    assert trajectory["incomplete_details"] == over_http.json()["response"]["incomplete_details"]
    assert outputs(over_mcp.json())[-1] == '{"seen":4}'
    assert len(sent) == 2


def test_any_server_that_speaks_mcp_will_do() -> None:
    """A stand-in with a session of its own, an older protocol, its tools on two pages, and no statuses."""

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        second = params is not None and params.cursor == "2"
        tools = [Tool(name="lift" if second else "look.at", input_schema={"type": "object"})]
        return ListToolsResult(tools=tools, next_cursor=None if second else "2")

    async def call_tool(context: Any, params: Any) -> CallToolResult:
        texts = [TextContent(text=text) for text in ("one", "two")]
        return CallToolResult(content=texts, is_error=params.name == "lift")

    manager = StreamableHTTPSessionManager(Server("stand-in", on_list_tools=list_tools, on_call_tool=call_tool))

    async def stand_in(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with manager.run():
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] == "/mcp":
            await manager.handle_request(scope, receive, send)
        else:
            await Response(json.dumps(plain[scope["path"]]), media_type="application/json")(scope, receive, send)

    def older(scope: Any, body: bytes) -> Response | None:
        return Response(status_code=404) if b"server/discover" in body else None

    access = {"server_name": "stand-in", "url_path": "/mcp", "transport": "streamable_http", "headers": {}}
    plain = {"/seed_session": {"mcp": access}, "/verify": {**ROW, "response": reply(), "reward": 1.0}}
    calls = [call("mcp__stand-in__look.at", call_id="a"), call("mcp__stand-in__lift", call_id="b")]
    model = ScriptedModel(reply(*calls), reply(message("done")))
    with stage(Watched(stand_in, older), model.app) as agent:
        assert agent.post("/run", json=ROW).status_code == 200
    told = [item["output"] for item in model.seen[1]["input"] if item.get("type") == "function_call_output"]
    assert told == ["one\ntwo", '{"error": "one\\ntwo"}']


def test_the_counters_rows_score_the_same_over_both_transports() -> None:
    folder = Path(__file__).parents[3] / "resources_servers" / "example_session_state_mgmt"
    rows = [json.loads(line) for line in (folder / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
    config = StatefulCounterResourcesServerConfig(**WHERE, name="counter", expose_tools_over_mcp=True)
    counter = StatefulCounterResourcesServer(config=config, server_client=NOWHERE)
    model = PatternModel(config=PatternModelConfig(**WHERE, name="model"), server_client=NOWHERE)
    ends: list[list[tuple[Any, ...]]] = []
    with serving(exposed(counter)) as environment_port, serving(model.setup_webserver()) as model_port:
        for agent_class in (SimpleAgent, McpAgent):
            with TestClient(agent_app(agent_class, environment_port, model_port)) as agent:
                results = [agent.post("/run", json=row).json() for row in rows]
            names = [[it.get("name") for it in result["response"]["output"]] for result in results]
            ends.append(
                [(it["id"], it["reward"], it["final_count"], calls) for it, calls in zip(results, names, strict=True)]
            )
    assert [reward for _, reward, _, _ in ends[0]] == [1.0] * len(rows)
    assert ends[1] == ends[0]
