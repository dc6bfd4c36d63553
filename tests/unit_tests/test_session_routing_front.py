"""An application with the router in front of it: its middleware runs once, where a request is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.session_routing import FrontedApp
from tests.session_workers import COOKIE, SECRET, owned_cookie, running_workers


class App(FrontedApp, FastAPI):
    """What users of the library derive."""


class Watching:
    """A middleware that counts the requests it sees."""

    def __init__(self, app: ASGIApp, seen: list[str]) -> None:
        self.app = app
        self.seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.seen.append(scope["path"])
        await self.app(scope, receive, send)


def make_fronted() -> Starlette:
    app = App()
    app.state.seen = []
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)

    @app.post("/where")
    async def where(request: Request) -> dict[str, str]:
        return {"worker": request.app.state.worker_id}

    app.add_middleware(Watching, seen=app.state.seen)
    return app


@pytest.mark.usefixtures("hop")
async def test_middleware_runs_where_the_request_is_served_and_nowhere_else(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 2, make_fronted) as (here, there):
        reply = await here.request("/where", method="POST", cookie=owned_cookie(there.worker_id))

        assert reply.json() == {"worker": there.worker_id}
        assert (here.app.state.seen, there.app.state.seen) == ([], ["/where"])
        assert (here.router.statistics().forwarded, there.router.statistics().arrived) == (1, 1)


async def test_only_one_thing_stands_in_front() -> None:
    app = App()
    app.put_in_front(lambda inner: inner)
    with pytest.raises(RuntimeError, match="already"):
        app.put_in_front(lambda inner: inner)


async def test_what_stands_in_front_sees_the_root_path_of_fastapi() -> None:
    app = App()
    app.root_path = "/api"
    seen: list[str] = []

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["root_path"])

    async def unused(*_: object) -> None:
        raise AssertionError

    app.put_in_front(lambda _: front)
    await app({"type": "http", "path": "/api/x"}, unused, unused)  # type: ignore[arg-type]
    assert seen == ["/api"]
