"""What a worker counts: in real applications, asked for on the way that anyone asks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from yarl import URL

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.server.base import ServerApp
from nemo_gym.server.fellows import Fellows, install_figures
from nemo_gym.server.figures import ServerFigures
from nemo_gym.server.middleware import SESSION_ID_KEY, ErrorReplyMiddleware, SessionIdMiddleware
from nemo_gym.server.recorder import FIGURES_PATHS, LoopLag, Recorder
from nemo_gym.server.worker_slots import WorkerSlots
from nemo_gym.session_routing import (
    LostReason,
    Placement,
    SessionCookieMiddleware,
    install_session_routing,
    lost_session_reply,
    worker_socket_path,
)
from nemo_gym.session_routing.private_socket import PrivateServer
from tests.support import serving

COOKIE, KEY = "sid", "a secret of these tests"
SESSIONS = Placement(
    session_key=SESSION_ID_KEY, first_path="/seed", last_path="/verify", ignored_paths=frozenset({"/apart"})
)


def application(cls: type[FastAPI] = ServerApp) -> FastAPI:
    app = cls()
    app.state.going_on = asyncio.Event()

    for path in ("/seed", "/add", "/verify", "/apart"):

        @app.post(path)
        async def answer(request: Request) -> str:
            return str(request.session[SESSION_ID_KEY])

    @app.post("/refuse/{status}")
    async def refuse(status: int) -> None:
        raise HTTPException(status)

    @app.post("/lose")
    async def lose() -> Any:
        return lost_session_reply(LostReason.SESSION_ENDED)

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("it failed")

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"more"
                await asyncio.sleep(0.001)

        return StreamingResponse(pieces())

    @app.post("/wait")
    async def wait() -> str:
        await app.state.going_on.wait()
        return "done"

    app.add_middleware(ErrorReplyMiddleware, server_name="counter")
    app.add_middleware(SessionIdMiddleware)
    app.add_middleware(SessionCookieMiddleware, secret_key=KEY, session_cookie=COOKIE)
    return app


def config(**settings: Any) -> BaseRunServerInstanceConfig:
    given = {"name": "counter", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", **settings}
    return BaseRunServerInstanceConfig.model_validate(given)


class Worker:
    """A worker that serves, and a client that may keep cookies."""

    def __init__(self, url: str, app: FastAPI, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.app = app
        self.client = client

    async def post(self, path: str, **kwargs: Any) -> int:
        async with self.client.post(self.url + path, **kwargs) as reply:
            await reply.read()
            return reply.status

    async def get(self, path: str) -> tuple[int, Any, Any]:
        async with self.client.get(self.url + path) as reply:
            return reply.status, reply.headers, await reply.json(content_type=None)

    async def figures(self) -> ServerFigures:
        status, _, document = await self.get("/workers")
        assert status == 200
        return ServerFigures.from_json(document)

    async def figures_when(self, is_so: Callable[[ServerFigures], bool]) -> ServerFigures:
        """Ask until it is so."""
        async with asyncio.timeout(30):
            while True:
                figures = await self.figures()
                if is_so(figures):
                    return figures


@asynccontextmanager
async def alone(app: FastAPI | None = None, placement: Placement = SESSIONS, **settings: Any) -> AsyncIterator[Worker]:
    """Serve one application as the only worker."""
    app = app or application()
    install_figures(app, Recorder(placement), config(**settings), "resources_servers", serves_socket=False)
    async with (
        serving(app) as url,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
    ):
        yield Worker(url, app, client)


@asynccontextmanager
async def together(
    folder: Path, count: int, *, is_routed: bool = True, cls: type[FastAPI] = ServerApp
) -> AsyncIterator[list[Worker]]:
    """Serve several workers of one server, each on a port of its own."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            aiohttp.ClientSession(
                cookie_jar=aiohttp.CookieJar(unsafe=True), connector=aiohttp.TCPConnector(force_close=True)
            )
        )
        workers = []
        for _ in range(count):
            app = application(cls)
            recorder = Recorder(SESSIONS if is_routed else None, folder)
            install_figures(app, recorder, config(), "resources_servers", serves_socket=not is_routed)
            if is_routed:
                install_session_routing(
                    app,
                    socket_dir=folder,
                    session_cookie=COOKIE,
                    secret_key=KEY,
                    hop_durations=recorder.hop_durations,
                    placement=SESSIONS,
                    any_worker_paths=FIGURES_PATHS,
                )
            url = await stack.enter_async_context(serving(app))
            workers.append(Worker(url, app, client))
        yield workers


def worker_sockets(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_socket()]


async def test_a_server_of_one_worker_answers_for_itself() -> None:
    async with alone() as worker:
        assert [await worker.post("/seed"), await worker.post("/add"), await worker.post("/refuse/404")] == [
            200,
            200,
            404,
        ]
        assert await worker.post("/fail") == 500
        figures = await worker.figures()
    (only,) = figures.workers
    assert (figures.server, figures.kind, figures.num_workers) == ("counter", "resources_servers", 1)
    assert figures.answered_by == only.worker_id
    assert (only.slot, only.responding, only.restarts, only.last_exit) == (0, True, 0, None)
    assert only.replies == {"2xx": 2, "4xx": 1, "5xx": 1}
    assert only.requests_handled == only.request_seconds.count == 4
    assert (only.sessions_open, only.sessions_created, only.sessions_ended) == (1, 1, 0)
    assert only.memory_bytes > 2**20
    assert only.cpu_s > 0
    assert abs(only.started_at - time.time()) < 600


async def test_a_session_is_counted_from_its_beginning_to_its_end() -> None:
    async with alone() as worker:
        await worker.post("/apart")
        assert (await worker.figures()).sessions_created == 0
        worker.client.cookie_jar.clear()
        for _ in range(2):
            await worker.post("/seed")
        assert (await worker.figures()).sessions_open == 1
        await worker.post("/verify")
        worker.client.cookie_jar.clear()
        await worker.post("/add")
        figures = await worker.figures()
    assert (figures.sessions_created, figures.sessions_ended, figures.sessions_open) == (2, 1, 1)


async def test_sessions_that_begin_anywhere_and_whose_ends_the_application_tells_are_counted() -> None:
    told: list[Callable[[str], None]] = []
    async with alone(placement=Placement(session_key=SESSION_ID_KEY, when_ended=told.append)) as worker:
        async with worker.client.post(f"{worker.url}/add") as reply:
            session_id = await reply.json()
        assert (await worker.figures()).sessions_open == 1
        for end in told:
            end(session_id)
        figures = await worker.figures()
    assert (figures.sessions_created, figures.sessions_ended, figures.sessions_open) == (1, 1, 0)


async def test_asking_for_figures_counts_nothing_and_begins_no_session() -> None:
    async with alone() as worker:
        for path in ("/workers", "/workers?only=self", "/health"):
            _, headers, _ = await worker.get(path)
            assert "set-cookie" not in headers or path == "/health"
        figures = await worker.figures()
        assert (figures.requests_handled, figures.sessions_created, figures.requests_in_flight) == (0, 0, 0)


async def test_a_query_of_any_bytes_is_answered() -> None:
    async with alone() as worker:
        async with worker.client.get(URL(f"{worker.url}/workers?%ff=1", encoded=True)) as reply:
            assert reply.status == 200


async def test_a_request_is_in_flight_until_its_reply_ends() -> None:
    async with alone() as worker:
        waiting = asyncio.create_task(worker.post("/wait"))
        await worker.figures_when(lambda figures: figures.requests_in_flight == 1)
        worker.app.state.going_on.set()
        await waiting
        figures = await worker.figures()
    assert (figures.requests_in_flight, figures.requests_handled) == (0, 1)


async def test_a_client_that_goes_away_leaves_no_request_in_flight() -> None:
    async with alone() as worker:
        waiting = asyncio.create_task(worker.post("/wait"))
        await worker.figures_when(lambda figures: figures.requests_in_flight == 1)
        waiting.cancel()
        worker.app.state.going_on.set()
        await worker.figures_when(lambda figures: figures.requests_in_flight == 0)


async def test_a_client_that_goes_away_before_the_reply_makes_no_server_error() -> None:
    async with alone() as worker:
        waiting = asyncio.create_task(worker.post("/wait"))
        await worker.figures_when(lambda figures: figures.requests_in_flight == 1)
        waiting.cancel()
        figures = await worker.figures_when(lambda figures: figures.requests_in_flight == 0)
    assert figures.replies == {"none": 1}


async def test_a_client_that_goes_away_in_the_middle_of_the_reply_has_not_got_it() -> None:
    async with alone() as worker:
        async with worker.client.get(worker.url + "/endless") as reply:
            await reply.content.readany()
        figures = await worker.figures_when(lambda figures: figures.requests_in_flight == 0)
    assert figures.replies == {"none": 1}


async def test_lost_sessions_are_counted_by_reason() -> None:
    async with alone() as worker:
        for _ in range(2):
            assert await worker.post("/lose") == 410
        assert await worker.post("/refuse/410") == 410
        figures = await worker.figures()
    assert figures.lost_replies == {"session_ended": 2}
    assert figures.replies == {"4xx": 3}


@pytest.mark.parametrize("cls", [ServerApp, FastAPI])
async def test_any_worker_answers_for_all(sockets: Path, cls: type[FastAPI]) -> None:
    requests = 12
    async with together(sockets, 3, cls=cls) as workers:
        assert await workers[0].post("/seed") == 200
        for number in range(requests):
            assert await workers[number % 3].post("/add") == 200
        # What is known of a hop is known when its reply has passed.
        figures = await workers[1].figures_when(lambda figures: figures.hop_seconds.count == figures.forwarded)
        others = [await worker.figures() for worker in workers]
    assert figures.requests_handled == sum(figures.replies.values()) == requests + 1
    assert sorted(worker.requests_handled for worker in figures.workers) == [0, 0, requests + 1]
    placed = sum(worker.placed_elsewhere for worker in figures.workers)
    assert sum(worker.forwarded_in for worker in figures.workers) == figures.forwarded == 2 * requests // 3 + placed
    assert (figures.sessions_open, figures.sessions_created) == (1, 1)
    assert {figures.answered_by for figures in others} == {worker.worker_id for worker in figures.workers}
    assert [worker.slot for worker in figures.workers] == [0, 1, 2]
    assert all(other.requests_handled == figures.requests_handled for other in others)


async def test_a_worker_that_is_gone_is_a_lost_session_of_whoever_looked_for_it(sockets: Path) -> None:
    async with together(sockets, 2) as (one, other):
        await one.post("/seed")
        (owner,) = [worker for worker in (await one.figures()).workers if worker.sessions_open]
        worker_socket_path(sockets, owner.worker_id).unlink()
        looking = other if owner.worker_id == one.app.state.session_routing.worker_id else one
        assert await looking.post("/add") == 410
        figures = await looking.figures()
    assert figures.lost_replies == {"worker_gone": 1}
    assert [worker.worker_id for worker in figures.workers] == [looking.app.state.session_routing.worker_id]


async def test_workers_without_routing_answer_for_all_and_their_sockets_for_nothing_else(sockets: Path) -> None:
    async with together(sockets, 2, is_routed=False) as workers:
        for worker in workers:
            await worker.post("/add")
        assert (await workers[0].figures()).requests_handled == 2
        for path in worker_sockets(sockets):
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(path))) as client,
                client.post("http://localhost/add") as reply,
            ):
                assert reply.status == 404
    assert worker_sockets(sockets) == []


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_a_fellow_that_does_not_answer_is_left_out(sockets: Path) -> None:
    fellows = Fellows(Recorder(None, sockets), server="s", kind="k", socket_dir=sockets, patience_s=0.05)
    async with await asyncio.start_unix_server(silent, sockets / ("f" * 32)), asyncio.timeout(30):
        (only,) = (await fellows.figures()).workers
    assert only.worker_id == fellows.worker_id


async def test_one_that_the_main_process_knows_and_that_does_not_answer_is_shown_so(sockets: Path) -> None:
    slots = WorkerSlots(sockets)
    slots.expect(2)
    for pid in (2**22 + 1, os.getpid()):
        slots.started(pid)
        slots.serves(pid)
    fellows = Fellows(Recorder(None, sockets), server="s", kind="k", socket_dir=sockets)
    figures = await fellows.figures()
    assert [(it.slot, it.responding, it.state) for it in figures.workers] == [
        (0, False, "serving"),
        (1, True, "serving"),
    ]
    assert figures.num_workers == 2


@pytest.mark.parametrize("path", ["/workers", "/metrics"])
@pytest.mark.parametrize(
    ("settings", "is_shown"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "expose_figures": True}, True),
        ({"expose_figures": False}, False),
    ],
)
async def test_the_figures_are_shown_on_loopback_or_as_configured(
    path: str, settings: dict[str, Any], is_shown: bool
) -> None:
    async with alone(**settings) as worker:
        async with worker.client.get(worker.url + path) as reply:
            assert reply.status == (200 if is_shown else 404)


async def test_the_private_socket_shows_what_the_shared_port_hides(sockets: Path) -> None:
    app = application()
    install_figures(
        app, Recorder(SESSIONS, sockets), config(expose_figures=False), "resources_servers", serves_socket=False
    )
    private = PrivateServer(app, sockets / ("a" * 32), state={}, grace=1)
    await private.start()
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(sockets / ("a" * 32)))) as client,
            client.get("http://localhost/workers") as reply,
        ):
            assert reply.status == 200
    finally:
        await private.stop()


async def test_a_route_of_the_applications_own_stays() -> None:
    app = application()

    @app.get("/metrics")
    async def metrics() -> str:
        return "mine"

    @app.post("/workers")
    async def workers() -> str:
        return "a tool"

    async with alone(app) as worker:
        assert (await worker.get("/metrics"))[2] == "mine"
        assert await worker.post("/workers") == 200
        assert (await worker.figures()).requests_handled == 1


async def test_a_blocked_event_loop_is_seen_for_some_seconds() -> None:
    lag = LoopLag()
    assert lag.worst() == 0.0
    lag.start()
    time.sleep(0.3)  # noqa: ASYNC251 - it blocks the event loop, and the next look was due after 0.25 s
    assert lag.worst() >= 0.04
    await asyncio.sleep(0.001)  # until the loop has had its turn: what was due before runs before
    assert lag.worst() >= 0.04
    lag.stop()
