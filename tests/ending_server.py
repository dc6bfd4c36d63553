"""A resources server and an agent that write down how their sessions end, for the tests of session end and body ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from unittest.mock import MagicMock

import aiohttp
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server.middleware import DisconnectMiddleware
from nemo_gym.server.session_end import SessionEndReason
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from tests.support import serving

RESPONSE = {"id": "resp_1", "created_at": 0, "model": "m", "object": "response", "output": []}
VERIFY = {"responses_create_params": {"input": "go"}, "response": RESPONSE}


class Gate:
    """Holds up those who pass until it is opened, and tells when someone waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def passing(self) -> None:
        self.reached.set()
        await self.open.wait()


class Seed(BaseSeedSessionRequest):
    fails: bool = False
    slow: bool = False
    resources_session_id: str | None = None


class Seeded(BaseSeedSessionResponse):
    session_id: str
    resources_session_id: str | None = None


class Add(BaseModel):
    resources_session_id: str | None = None
    amount: int = 1


class Verify(BaseVerifyRequest):
    fails: bool = False


class Ledger(SimpleResourcesServer):
    """Keeps a number per session, and a record of all ends."""

    config: BaseResourcesServerConfig
    numbers: dict[str, int] = Field(default_factory=dict)
    ended: list[tuple[str, str]] = Field(default_factory=list)
    gates: dict[str, Gate] = Field(default_factory=dict)
    hook_error: Exception | None = None
    log: list[str] = Field(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        app.post("/slow")(self.slow)
        app.post("/background")(self.background)
        app.post("/stream")(self.stream)
        app.websocket("/socket")(self.socket)
        return app

    def gate(self, name: str) -> Gate:
        return self.gates.setdefault(name, Gate())

    async def seed_session(self, request: Request, body: Seed) -> Seeded:  # type: ignore[override]
        session_id = request.session[SESSION_ID_KEY]
        self.numbers[session_id] = 0
        if body.slow:
            await self.gate("seed").passing()
        if body.fails:
            raise HTTPException(503, "no room")
        made = None if self.body_session_field is None else self.new_body_session_id(request)
        return Seeded(session_id=session_id, resources_session_id=made)

    async def add(self, request: Request, body: Add) -> dict[str, Any]:
        session_id = request.session[SESSION_ID_KEY]
        self.numbers[session_id] = self.numbers.get(session_id, 0) + body.amount
        return {"number": self.numbers[session_id], "session_id": session_id}

    async def slow(self, request: Request) -> dict[str, str]:
        await self.gate("slow").passing()
        self.log.append("slow is over")
        return {"session_id": request.session[SESSION_ID_KEY]}

    async def background(self, tasks: BackgroundTasks) -> dict[str, str]:
        tasks.add_task(self.gate("background").passing)
        return {}

    async def stream(self) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "begun"
            await self.gate("stream").passing()
            yield "done"

        return StreamingResponse(parts())

    async def socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive_text()
        await websocket.close()

    async def verify(self, request: Request, body: Verify) -> BaseVerifyResponse:  # type: ignore[override]
        if body.fails:
            raise HTTPException(500, "no verdict")
        return BaseVerifyResponse(**dict(body), reward=float(self.numbers.get(request.session[SESSION_ID_KEY], -1)))

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        self.ended.append((session_id, str(reason)))
        self.log.append(f"ended: {reason}")
        if "hook" in self.gates:
            await self.gates["hook"].passing()
        self.numbers.pop(session_id, None)
        if self.hook_error is not None:
            raise self.hook_error


class NamedLedger(Ledger):
    """The same, for clients that name the session in the body."""

    body_session_field: ClassVar[str | None] = "resources_session_id"


class Agent(SimpleResponsesAPIAgent):
    """Counts its turns per session."""

    config: BaseResponsesAPIAgentConfig
    turns: dict[str, int] = Field(default_factory=dict)
    ended: list[tuple[str, str]] = Field(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/relay")(self.relay)
        return app

    async def relay(self, request: Request) -> Any:
        """Call itself within the session of the caller, over HTTP, as `call_self` does."""
        async with (
            aiohttp.ClientSession(str(request.base_url), cookies=self.session_cookies(request)) as http,
            http.post("/v1/responses", json={"input": "go"}) as reply,
        ):
            return await reply.json()

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        session_id = request.session[SESSION_ID_KEY]
        self.turns[session_id] = self.turns.get(session_id, 0) + 1
        return NeMoGymResponse.model_validate({**RESPONSE, "id": f"resp_{self.turns[session_id]}"})

    async def run(self, request: Request, body: dict[str, Any] = Body()) -> BaseVerifyResponse:  # type: ignore[override]
        await self.responses(request, body["responses_create_params"])
        return BaseVerifyResponse(**VERIFY, reward=self.turns[request.session[SESSION_ID_KEY]])

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        self.ended.append((session_id, str(reason)))


def make(kind: type[Any], session_end: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = kind.config_type()(
        host="127.0.0.1", port=0, entrypoint="app.py", name="it", session_end=session_end, **settings
    )
    return kind(config=config, server_client=MagicMock(spec=ServerClient))


class Client:
    """A client on connections of its own, with or without a memory for cookies."""

    def __init__(self, url: str, *, keeps_cookies: bool = True) -> None:
        self.url = url
        jar = aiohttp.CookieJar(unsafe=True) if keeps_cookies else aiohttp.DummyCookieJar()
        self.http = aiohttp.ClientSession(url, cookie_jar=jar)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.post(path, json={} if body is None else body, **kwargs) as reply:
            return reply.status, await reply.json(content_type=None)

    async def seed(self, **body: Any) -> str:
        status, reply = await self.post("/seed_session", body)
        assert status == 200, reply
        session_id: str = reply["session_id"]
        return session_id


@asynccontextmanager
async def clients(url: str, number: int = 1, **options: Any) -> AsyncIterator[list[Client]]:
    made = [Client(url, **options) for _ in range(number)]
    try:
        yield made
    finally:
        for client in made:
            await client.http.close()


@asynccontextmanager
async def running(server: Any, number: int = 1, *, keeps_cookies: bool = True) -> AsyncIterator[list[Client]]:
    """Serve `server`; yields clients of it. Everything must be over within 20 seconds."""
    async with asyncio.timeout(20):
        app = server.setup_webserver()
        # As the bootstrap does.
        app.add_middleware(DisconnectMiddleware)
        async with serving(app) as url, clients(url, number, keeps_cookies=keeps_cookies) as made:
            yield made


async def until(condition: Any) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a server tells nobody
            await asyncio.sleep(0.002)
