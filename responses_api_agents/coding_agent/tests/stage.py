"""The agent between two scripted servers on ports of this machine: a model, and an environment with tools."""

from __future__ import annotations

import inspect
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym.server.middleware import DisconnectMiddleware
from nemo_gym.server_utils import ServerClient
from responses_api_agents.coding_agent.app import CodingAgent, CodingAgentConfig


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}


TOOLS = [tool("run_command"), tool("read_file")]
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "Repair it."}], "tools": TOOLS},
    "id": "row-1",
}
USAGE = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}


def reply(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": [*output], "usage": USAGE, **more}


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(name: str = "run_command", call_id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


class Scripted:
    """A server that answers each path with its script's next reply (the last one again), and notes what it was sent.

    Args:
        replies: Per path, the replies: JSON values, ready responses, or functions that return (or await) one.
    """

    def __init__(self, replies: dict[str, list[Any]]) -> None:
        self.replies = replies
        self.seen: list[tuple[str, Any]] = []
        self.cookies: list[dict[str, str]] = []
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["POST"])

    async def answer(self, request: Request, path: str) -> Response:
        self.seen.append((path, await request.json()))
        self.cookies.append(dict(request.cookies))
        if path not in self.replies:
            return Response('{"detail": "Not Found"}', 404)
        script = self.replies[path]
        following = script.pop(0) if len(script) > 1 else script[0]
        if inspect.isfunction(following):
            following = following()
        if inspect.isawaitable(following):
            following = await following
        answer = following if isinstance(following, Response) else Response(json.dumps(following))
        answer.set_cookie("session", "of-the-server")
        return answer

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body in self.seen if seen == path]


@dataclass(frozen=True)
class Stage:
    agent: TestClient
    environment: Scripted
    model: Scripted

    def run(self, row: dict[str, Any] = ROW) -> dict[str, Any]:
        """Run a rollout and return the response as it was verified."""
        result = self.agent.post("/run", json=row)
        assert result.status_code == 200, result.text
        verified: dict[str, Any] = self.environment.bodies("verify")[-1]["response"]
        return verified

    def asked(self) -> list[Any]:
        return self.model.bodies("v1/responses")


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve `app` on a free port, from a thread of its own; requests wait in the listening socket until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
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
        config = CodingAgentConfig(
            host="",
            port=0,
            entrypoint="",
            name="agent",
            resources_server={"type": "resources_servers", "name": "environment"},
            model_server={"type": "responses_api_models", "name": "model"},
            **settings,
        )
        agent = CodingAgent(config=config, server_client=ServerClient.from_config(OmegaConf.create(global_config)))
        app = agent.setup_webserver()
        app.add_middleware(DisconnectMiddleware)  # as a server process has it
        yield stack.enter_context(TestClient(app))


@contextmanager
def stage(*turns: Any, **settings: Any) -> Iterator[Stage]:
    """Yield the agent, with an environment whose tools answer in few words, and a model that says `turns`."""
    environment = Scripted(
        {
            "seed_session": [{"workdir": "/repository"}],
            "verify": [{"reward": 1.0, **ROW, "response": reply(message("as verified"))}],
            "close_session": [{}],
            "run_command": [{"return_code": 0, "stdout": "fine"}],
            "read_file": [{"content": "text"}],
        }
    )
    model = Scripted({"v1/responses": [*turns]})
    with agent_between(environment.app, model.app, **settings) as agent:
        yield Stage(agent, environment, model)


def outputs(response: dict[str, Any]) -> list[str]:
    return [item["output"] for item in response["output"] if item["type"] == "function_call_output"]
