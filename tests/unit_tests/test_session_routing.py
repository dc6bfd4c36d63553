"""The decision: here, there, or refused; and what installing the router does to an application."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import itsdangerous
import pytest
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message

from nemo_gym.session_routing import SESSION_OWNER_KEY, install_session_routing
from tests.session_workers import (
    COOKIE,
    SECRET,
    make_app,
    owned_cookie,
    running_worker,
    running_workers,
    signed_cookie,
)

pytestmark = pytest.mark.usefixtures("hop")


def session_of(cookie: str) -> dict[str, Any]:
    value = itsdangerous.TimestampSigner(SECRET).unsign(cookie.partition("=")[2])
    session: dict[str, Any] = json.loads(base64.b64decode(value))
    return session


@pytest.mark.promise("stamped")
async def test_a_new_session_is_served_here_and_stamped_with_this_worker(socket_dir: Path) -> None:
    async with running_workers(socket_dir) as (first, second):
        reply = await first.request("/seed", method="POST")
        assert session_of(reply.cookie)[SESSION_OWNER_KEY] == first.worker_id
        assert first.router.statistics().served_here == 1
        assert second.router.statistics().served_here == 0


@pytest.mark.promise("reaches-its-owner")
async def test_every_request_of_many_sessions_reaches_its_owner_from_any_worker(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 3) as workers:

        async def episode(number: int) -> tuple[list[int], set[str]]:
            seeded = await workers[number % 3].request("/seed", method="POST")
            counts, owners = [], {seeded.json()["worker"]}
            for step in range(3):
                reply = await workers[(number + step) % 3].request("/count", method="POST", cookie=seeded.cookie)
                counts.append(reply.json()["count"])
                owners.add(reply.json()["worker"])
            return counts, owners

        episodes = await asyncio.gather(*(episode(number) for number in range(30)))
        assert all(counts == [1, 2, 3] and len(owners) == 1 for counts, owners in episodes)
        assert all(worker.router.statistics().forwarded == 20 for worker in workers)


@pytest.mark.promise("one-set-cookie")
async def test_a_forwarded_reply_carries_only_the_owners_cookie(socket_dir: Path) -> None:
    async with running_workers(socket_dir) as (first, second):
        cookie = (await first.request("/seed", method="POST")).cookie
        again = await second.request("/seed", method="POST", cookie=cookie)
        assert len(again.all("set-cookie")) == 1
        assert session_of(again.cookie)[SESSION_OWNER_KEY] == first.worker_id


@pytest.mark.promise("one-set-cookie")
async def test_a_request_that_writes_no_session_sets_no_cookie(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 1) as (worker,):
        assert (await worker.request("/health")).all("set-cookie") == []
        assert (await worker.request("/anything")).all("set-cookie") == []


@pytest.mark.promise("one-set-cookie")
async def test_a_session_that_is_only_read_is_not_signed_again(socket_dir: Path) -> None:
    async with running_workers(socket_dir, 1) as (worker,):
        cookie = (await worker.request("/seed", method="POST")).cookie
        assert (await worker.request("/count", method="POST", cookie=cookie)).all("set-cookie") == []


@pytest.mark.promise("adopted")
async def test_a_session_that_nobody_stamped_is_adopted(socket_dir: Path) -> None:
    async with running_workers(socket_dir) as (first, second):
        unowned = signed_cookie({"id": "from a single worker"})
        adopted = await second.request("/count", method="POST", cookie=unowned)
        assert session_of(adopted.cookie) == {"id": "from a single worker", SESSION_OWNER_KEY: second.worker_id}
        followed = await first.request("/count", method="POST", cookie=adopted.cookie)
        assert followed.json() == {"count": 2, "worker": second.worker_id}


@pytest.mark.promise("stamped")
async def test_what_another_middleware_writes_into_the_session_is_stamped_too(socket_dir: Path) -> None:
    class WritesAtReply:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def write(message: Message) -> None:
                if message["type"] == "http.response.start":
                    scope["session"]["session_id"] = "late"
                await send(message)

            await self.app(scope, receive, write if scope["type"] == "http" else send)

    app = Starlette(routes=[Route("/", lambda _: JSONResponse({}))])
    app.add_middleware(WritesAtReply)
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    async with running_worker(app, socket_dir) as worker:
        session = session_of((await worker.request("/")).cookie)
    assert session == {"session_id": "late", SESSION_OWNER_KEY: worker.worker_id}


@pytest.mark.promise("one-worker-unchanged")
async def test_without_an_install_there_is_no_middleware_no_socket_and_no_extra_key() -> None:
    app = make_app()
    app.state.worker_id = None
    with TestClient(app) as client:
        client.post("/seed")
        assert SESSION_OWNER_KEY not in session_of(f"{COOKIE}={client.cookies[COOKIE]}")
    assert [str(middleware.cls) for middleware in app.user_middleware] == [str(SessionMiddleware)]


class TestInstall:
    def test_wants_the_session_middleware_first(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="add SessionMiddleware before"):
            install_session_routing(Starlette(), socket_dir=tmp_path, session_cookie=COOKIE, secret_key=SECRET)

    @pytest.mark.promise("mismatch-refused")
    @pytest.mark.parametrize(
        "wrong",
        [{"session_cookie": "other"}, {"secret_key": "other"}, {"max_age": 5}, {"secret_key": ["other", SECRET]}],
    )
    def test_refuses_options_that_differ_from_the_session_middlewares(self, tmp_path: Path, wrong: Any) -> None:
        options = {"session_cookie": COOKIE, "secret_key": SECRET, **wrong}
        with pytest.raises(ValueError, match=f"the same {next(iter(wrong))}"):
            install_session_routing(make_app(), socket_dir=tmp_path, **options)

    @pytest.mark.parametrize("secret", ["", [], ["a", ""]])
    def test_refuses_an_empty_secret(self, tmp_path: Path, secret: Any) -> None:
        with pytest.raises(ValueError, match="secret"):
            install_session_routing(make_app(), socket_dir=tmp_path, session_cookie=COOKIE, secret_key=secret)

    @pytest.mark.promise("id-per-process")
    def test_gives_each_worker_its_own_id(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"socket_dir": tmp_path, "session_cookie": COOKIE, "secret_key": SECRET}
        assert install_session_routing(make_app(), **options) != install_session_routing(make_app(), **options)


@pytest.mark.promise("application-errors")
async def test_errors_of_the_application_are_answered_by_its_own_error_handler_wherever_received(
    socket_dir: Path,
) -> None:
    async def fail(_: Request) -> Response:
        raise LookupError("no such thing")

    async def explain(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=418)

    def app() -> Starlette:
        return make_app(Route("/fail", fail), exception_handlers={LookupError: explain})

    async with running_workers(socket_dir, 2, app) as (first, second):
        for worker in (first, second):
            reply = await worker.request("/fail", cookie=owned_cookie(first.worker_id))
            assert (reply.status, reply.json()) == (418, {"detail": "no such thing"})
