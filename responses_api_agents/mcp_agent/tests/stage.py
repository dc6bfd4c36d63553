"""The stage of the tests: a real resources server with its tools exposed, a scripted model, and agents between them."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server.middleware import DisconnectMiddleware
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from responses_api_agents.mcp_agent.app import McpAgent, McpAgentConfig
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

WHERE: dict[str, Any] = {"host": "", "port": 0, "entrypoint": ""}
NOWHERE = ServerClient.from_config(OmegaConf.create({}))
PREFIX = "mcp__room__"
TOOLS = ("look", "take", "fail", "wait")
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "go"}]}, "id": "row-1"}


class TakeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: int = Field(ge=1)


class FailRequest(BaseModel):
    status: int
    detail: str = "no luck"


class Verdict(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class Room(SimpleResourcesServer):
    """Looks are counted per session; the reward is their number."""

    allowed: list[str] | None = None

    _looks: dict[str, int] = PrivateAttr(default_factory=dict)
    _waiting: threading.Event = PrivateAttr(default_factory=threading.Event)
    _let_go: threading.Event = PrivateAttr(default_factory=threading.Event)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        for name in TOOLS:
            app.post(f"/{name}")(getattr(self, name))
        return app

    @property
    def waiting(self) -> threading.Event:
        """Set when a call of `wait` has begun."""
        return self._waiting

    @property
    def let_go(self) -> threading.Event:
        """Set when a call of `wait` has ended, which only its cancellation does."""
        return self._let_go

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None:
        return self.allowed

    async def look(self, request: Request) -> dict[str, int]:
        """Look around."""
        session_id = request.session[SESSION_ID_KEY]
        self._looks[session_id] = self._looks.get(session_id, 0) + 1
        return {"seen": self._looks[session_id]}

    async def take(self, body: TakeRequest) -> Response:
        return Response(f'{{"taken": {body.amount}, "ü": "ß"}}', media_type="application/json")

    async def fail(self, body: FailRequest) -> None:
        raise HTTPException(body.status, body.detail)

    async def wait(self) -> None:
        self._waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._let_go.set()

    async def verify(self, request: Request, body: BaseVerifyRequest) -> Verdict:  # type: ignore[override]
        names = [item.name for item in body.response.output if item.type == "function_call"]
        looks = self._looks.get(request.session[SESSION_ID_KEY], 0)
        return Verdict(**dict(body), reward=float(looks), seen_names=names)


def room(**settings: Any) -> Room:
    settings = {"expose_tools_over_mcp": True, **settings}
    return Room(config=BaseResourcesServerConfig(**WHERE, name="room", **settings), server_client=NOWHERE)


def exposed(server: SimpleResourcesServer) -> FastAPI:
    app = server.setup_webserver()
    server.expose(app)
    app.add_middleware(DisconnectMiddleware)
    return app


def no_change(scope: Any, body: bytes) -> None:
    pass


class Watched:
    """An application, with what reaches its MCP endpoint noted, and changed where a test says so.

    Args:
        app: The application.
        change: Called with the scope and the body of each POST; may change the scope, or return a reply.
    """

    def __init__(self, app: Any, change: Callable[[Any, bytes], Response | None] = no_change) -> None:
        self.app = app
        self.change = change
        self.methods: list[str] = []
        self.clients: set[int] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/mcp":
            await self.app(scope, receive, send)
            return
        message = await receive()
        assert not message.get("more_body")
        self.methods.append(scope["method"])
        self.clients.add(scope["client"][1])
        reply = self.change(scope, message.get("body", b""))
        messages = [message]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await (reply or self.app)(scope, replay, send)


class BrokenReply(Response):
    """Promises a body and breaks off the connection before its end."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"9"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class ScriptedModel:
    """Says its turns one after the other (the last again and again), and notes what it was sent."""

    def __init__(self, *turns: dict[str, Any]) -> None:
        self.turns = list(turns)
        self.seen: list[Any] = []
        self.app = FastAPI()
        self.app.add_api_route("/v1/responses", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Any:
        self.seen.append(await request.json())
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """Serve `app` on a free port, from a thread of its own; requests wait in the listening socket until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


def agent_app(agent_class: type[SimpleAgent], environment: int, model: int, **settings: Any) -> FastAPI:
    global_config = {
        "room": {"resources_servers": {"x": {"host": "127.0.0.1", "port": environment}}},
        "model": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": model}}},
    }
    config_class = McpAgentConfig if agent_class is McpAgent else SimpleAgentConfig
    config = config_class(
        **WHERE,
        name="agent",
        resources_server={"type": "resources_servers", "name": "room"},
        model_server={"type": "responses_api_models", "name": "model"},
        **settings,
    )
    client = ServerClient.from_config(OmegaConf.create(global_config))
    return agent_class(config=config, server_client=client).setup_webserver()


@contextmanager
def stage(
    environment: Any, model: Any, agent_class: type[SimpleAgent] = McpAgent, **settings: Any
) -> Iterator[TestClient]:
    with ExitStack() as stack:
        ports = [stack.enter_context(serving(environment)), stack.enter_context(serving(model))]
        yield stack.enter_context(TestClient(agent_app(agent_class, *ports, **settings)))


@dataclass
class House:
    """A room and a model that serve many tests."""

    environment: Watched
    model: ScriptedModel
    ports: tuple[int, int]

    @contextmanager
    def agent(self, agent_class: type[SimpleAgent] = McpAgent, **settings: Any) -> Iterator[TestClient]:
        with TestClient(agent_app(agent_class, *self.ports, **settings)) as agent:
            yield agent


def reply(*output: dict[str, Any]) -> dict[str, Any]:
    return {"id": "resp_1", "created_at": 0, "model": "scripted", "object": "response", "output": list(output)}


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def call(name: str, arguments: str = "{}", call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **more}


def outputs(result: dict[str, Any]) -> list[Any]:
    return [item["output"] for item in result["response"]["output"] if item["type"] == "function_call_output"]


def eventually(what: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not what():
        assert time.monotonic() < give_up, "it did not come to that"
        time.sleep(0.01)


def is_tool_call(body: bytes) -> bool:
    return b'"tools/call"' in body
