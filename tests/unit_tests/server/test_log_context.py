"""What is logged while a request is handled says which rollout and session it is for, on every server it reaches."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, Request
from omegaconf import OmegaConf
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.logs import rollout_id, session_id
from nemo_gym.server.client import ServerClient, get_response_json
from nemo_gym.server.middleware import LogContextMiddleware, SessionIdMiddleware, put_outermost
from nemo_gym.session_routing import FrontedApp
from tests.support import serving

pytestmark = pytest.mark.usefixtures("closed_client")


class FrontedFastAPI(FrontedApp, FastAPI):
    """As the servers' own."""


def telling_app(inner: ServerClient | None = None, kind: type[FastAPI] = FrontedFastAPI) -> FastAPI:
    """Return an application that answers what its log lines would say; with `inner`, of the server called there."""
    app = kind()

    @app.post("/tell")
    async def tell(request: Request) -> dict[str, Any]:
        if inner is not None:
            reply: dict[str, Any] = await get_response_json(await inner.post("inner", "/tell"))
            return reply
        return {"rollout": rollout_id.get(), "is_its_session": session_id.get() == request.session["session_id"]}

    app.add_middleware(SessionIdMiddleware)
    app.add_middleware(SessionMiddleware, secret_key="secret")
    put_outermost(app, LogContextMiddleware)
    return app


def client_of(name: str, url: str) -> ServerClient:
    port = int(url.rpartition(":")[2])
    settings = {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}
    return ServerClient.from_config(OmegaConf.create({name: {"resources_servers": {"it": settings}}}))


async def ask(client: ServerClient, rollout: str | None) -> Any:
    token = rollout_id.set(rollout)
    try:
        return await get_response_json(await client.post("outer", "/tell"))
    finally:
        rollout_id.reset(token)


@pytest.mark.parametrize("kind", [FastAPI, FrontedFastAPI])
async def test_a_rollout_is_known_on_each_server_that_its_calls_reach(kind: type[FastAPI]) -> None:
    async with serving(telling_app(kind=kind)) as inner_url:
        async with serving(telling_app(client_of("inner", inner_url), kind)) as outer_url:
            client = client_of("outer", outer_url)
            assert await ask(client, "17-3") == {"rollout": "17-3", "is_its_session": True}
            # On the same connection.
            assert await ask(client, None) == {"rollout": None, "is_its_session": True}


async def test_a_call_without_a_rollout_has_no_header_of_one() -> None:
    app = FastAPI()

    @app.post("/tell")
    async def tell(request: Request) -> list[str]:
        return list(request.headers)

    async with serving(app) as url:
        assert "nemo-gym-rollout" not in await ask(client_of("outer", url), None)
        assert "nemo-gym-rollout" in await ask(client_of("outer", url), "1-2")


@pytest.mark.parametrize("header", [b"x" * 65, b"", b"17-3 ERROR", b"\xe9\x1b[31m", b"17\t3"])
async def test_a_header_that_names_no_rollout_is_passed_over(header: bytes) -> None:
    token = rollout_id.set("from the request before")
    found = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(rollout_id.get())

    for headers in ([(b"nemo-gym-rollout", header)], [], [(b"nemo-gym-rollout", b"17-3")]):
        await LogContextMiddleware(app)({"type": "http", "headers": headers}, _no_receive, _no_send)
    rollout_id.reset(token)
    assert found == [None, None, "17-3"]


async def _no_receive() -> Message:
    raise AssertionError


async def _no_send(message: Message) -> None:
    raise AssertionError


async def test_a_call_that_is_made_otherwise_can_name_its_rollout_too() -> None:
    client = client_of("outer", "http://127.0.0.1:1")
    token = rollout_id.set(None)
    assert client.context_headers() == {}
    rollout_id.set("17-3")
    assert client.context_headers() == {"nemo-gym-rollout": "17-3"}
    rollout_id.reset(token)
