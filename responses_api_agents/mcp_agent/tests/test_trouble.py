"""What ends a rollout, with what the caller of `/run` reads of it; and that nothing is left of a connection."""

import asyncio
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from fastapi import FastAPI, Response

from nemo_gym.base_resources_server import (
    NEMO_GYM_MCP_SESSION_TOKEN_HEADER,
    BaseResourcesServerConfig,
    session_token_serializer,
)
from nemo_gym.server.middleware import DisconnectMiddleware
from nemo_gym.session_routing import SESSION_OWNER_KEY
from responses_api_agents.mcp_agent.app import McpAgent
from responses_api_agents.mcp_agent.tests.stage import (
    NOWHERE,
    PREFIX,
    ROW,
    WHERE,
    BrokenReply,
    House,
    Room,
    ScriptedModel,
    Watched,
    agent_app,
    call,
    eventually,
    exposed,
    is_tool_call,
    message,
    reply,
    room,
    serving,
    stage,
)


def of_an_earlier_start(server: Room) -> Callable[[Any, bytes], None]:
    """Give tool calls a token that names a worker, as it was minted when the server still had several."""
    token = session_token_serializer(server).dumps({"sid": "a" * 32, "tools": None, SESSION_OWNER_KEY: "0" * 32})
    name = NEMO_GYM_MCP_SESSION_TOKEN_HEADER.lower().encode()

    def change(scope: Any, body: bytes) -> None:
        if is_tool_call(body):
            headers = [(key, value) for key, value in scope["headers"] if key.lower() != name]
            scope["headers"] = [*headers, (name, token.encode())]

    return change


@pytest.mark.parametrize("setting", ["http", "jsonrpc"])
def test_a_lost_session_ends_the_rollout_with_410_and_is_not_shown_to_the_model(setting: str) -> None:
    server = room(mcp_lost_session=setting)
    environment = Watched(exposed(server), of_an_earlier_start(server))
    model = ScriptedModel(reply(call(PREFIX + "look")), reply(message("never said")))
    with stage(environment, model.app) as agent:
        result = agent.post("/run", json=ROW)
    assert result.status_code == 410
    assert result.headers["X-NeMo-Gym-Session-Lost"] == "worker_gone"
    assert "worker" in result.json()["detail"]
    assert len(model.seen) == 1


def test_a_refused_token_ends_the_rollout_and_is_not_shown_to_the_model(house: House) -> None:
    name = NEMO_GYM_MCP_SESSION_TOKEN_HEADER.lower().encode()

    def change(scope: Any, body: bytes) -> None:
        if is_tool_call(body):
            scope["headers"] = [(key, value) for key, value in scope["headers"] if key.lower() != name]

    house.environment.change = change
    house.model.turns = [reply(call(PREFIX + "look")), reply(message("never said"))]
    with house.agent() as agent:
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "refused the session token" in result.json()["detail"]) == (401, True), result.text
    assert len(house.model.seen) == 1


ERRORS = {
    "410": (Response('{"detail": "all gone"}', 410, {"X-NeMo-Gym-Session-Lost": "worker_gone"}), 410, "all gone"),
    "421": (Response("not by this name", 421, media_type="text/plain"), 421, "not by this name"),
    "503": (Response('{"detail": "no descriptors left"}', 503), 503, "no descriptors left"),
    "no body": (Response(status_code=504), 504, "answered 504"),
    "broken": (BrokenReply(), 502, "may have run"),
    "no JSON": (Response("hello", media_type="application/json"), 502, "JSON-RPC error"),
    "no MCP": (Response("hello", media_type="text/html"), 502, "text/html"),
}


@pytest.mark.parametrize("method", [b"initialize", b"tools/list", b"tools/call"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_http_error_or_a_broken_connection_ends_the_rollout_with_its_status(
    house: House, method: bytes, error: str
) -> None:
    answer, status, text = ERRORS[error]

    def change(scope: Any, body: bytes) -> Response | None:
        is_meant = method in body or (method == b"initialize" and b"server/discover" in body)
        return answer if is_meant else None

    house.environment.change = change
    house.model.turns = [reply(call(PREFIX + "look")), reply(message("never said"))]
    with house.agent() as agent:
        result = agent.post("/run", json=ROW)
    assert (result.status_code, text in result.json()["detail"]) == (status, True), result.text
    assert result.headers.get("X-NeMo-Gym-Session-Lost") == ("worker_gone" if status == 410 else None)
    assert len(house.model.seen) == (method == b"tools/call")


def test_an_endpoint_that_can_not_be_reached_ends_the_rollout_with_502() -> None:
    class Elsewhere(Room):
        async def seed_session(self) -> Any:  # type: ignore[override]
            return Response(json.dumps({"mcp": access}), media_type="application/json")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = f"@127.0.0.1:{taken.getsockname()[1]}/mcp"
    access = {"server_name": "room", "url_path": path, "transport": "streamable_http", "headers": {}}
    config = BaseResourcesServerConfig(**WHERE, name="room")
    environment = Elsewhere(config=config, server_client=NOWHERE).setup_webserver()
    with stage(environment, ScriptedModel(reply(message("never said"))).app) as agent:
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "could not be reached" in result.json()["detail"]) == (502, True), result.text


def test_a_server_that_does_not_expose_its_tools_is_named_with_the_setting() -> None:
    model = ScriptedModel(reply(message("never said")))
    with stage(exposed(room(expose_tools_over_mcp=False)), model.app) as agent:
        result = agent.post("/run", json=ROW)
    assert result.status_code == 409
    assert "'room'" in result.json()["detail"]
    assert "expose_tools_over_mcp: true" in result.json()["detail"]
    assert model.seen == []


def test_a_failing_model_ends_the_rollout_as_over_http() -> None:
    overloaded = FastAPI()
    overloaded.add_api_route("/v1/responses", lambda: Response('{"detail": "too many"}', 429), methods=["POST"])
    with stage(exposed(room()), overloaded) as agent:
        result = agent.post("/run", json=ROW)
    assert (result.status_code, "too many" in result.json()["detail"]) == (429, True)


def test_responses_alone_are_refused_with_the_way_to_go(house: House) -> None:
    with house.agent() as agent:
        result = agent.post("/v1/responses", json={"input": "go"})
    assert (result.status_code, "/run" in result.json()["detail"]) == (409, True)


def test_the_session_token_is_neither_logged_nor_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    tokens: set[str] = set()

    def change(scope: Any, body: bytes) -> None:
        name = NEMO_GYM_MCP_SESSION_TOKEN_HEADER.lower().encode()
        tokens.update(value.decode() for key, value in scope["headers"] if key.lower() == name)

    failing = call(PREFIX + "fail", '{"status": 410}')
    model = ScriptedModel(reply(call(PREFIX + "look")), reply(failing))
    with caplog.at_level(logging.DEBUG), stage(Watched(exposed(room()), change), model.app, max_steps=3) as agent:
        result = agent.post("/run", json=ROW)
    (token,) = tokens
    assert result.status_code == 410
    assert token not in result.text
    assert token not in caplog.text


class Running:
    """An agent on a socket of its own, with its event loop in sight."""

    def __init__(self, app: FastAPI) -> None:
        app.add_middleware(DisconnectMiddleware)
        self.app = app
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def tasks_of_the_sdk(self) -> list[str]:
        assert self.loop is not None
        names = [task.get_name() for task in asyncio.all_tasks(self.loop)]
        return [name for name in names if name.startswith("mcp.")]


def open_sockets(ports: set[int]) -> list[Any]:
    connections = psutil.Process().net_connections("tcp")
    return [it for it in connections if it.status == "ESTABLISHED" and it.laddr.port in ports]


@pytest.mark.parametrize("ending", ["done", "failed", "client gone in a tool call", "client gone in a model call"])
def test_nothing_of_a_connection_outlives_its_rollout(ending: str) -> None:
    server = room()
    asked, answer = threading.Event(), threading.Event()
    model = FastAPI()

    @model.post("/v1/responses")
    def respond() -> Any:
        asked.set()
        if ending == "client gone in a model call":
            answer.wait(30)
        tool = {"done": "look", "failed": "fail"}.get(ending, "wait")
        return reply(call(PREFIX + tool, '{"status": 502}' if tool == "fail" else "{}"))

    environment = Watched(exposed(server))
    with serving(environment) as environment_port, serving(model) as model_port:
        agent = Running(agent_app(McpAgent, environment_port, model_port, max_steps=1))
        with serving(agent) as agent_port:
            client = http.client.HTTPConnection("127.0.0.1", agent_port, timeout=30)
            client.request("POST", "/run", json.dumps(ROW), {"Content-Type": "application/json"})
            if ending.startswith("client gone"):
                assert (server.waiting if ending.endswith("tool call") else asked).wait(30)
                assert agent.tasks_of_the_sdk()
                assert open_sockets(environment.clients)
                client.close()
                assert ending.endswith("model call") or server.let_go.wait(30)
            else:
                assert client.getresponse().status == {"done": 200, "failed": 502}[ending]
                client.close()
            eventually(lambda: not agent.tasks_of_the_sdk())
            eventually(lambda: not open_sockets(environment.clients))
            answer.set()
