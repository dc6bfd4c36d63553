"""Where new sessions begin, seen from outside: real workers, real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from base64 import b64decode
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_gym.session_routing import SESSION_LOST_HEADER, BodyIdField, Placement, worker_socket_path
from nemo_gym.session_routing.loads import SharedLoads
from tests.owner_ends import take_request
from tests.session_workers import (
    SECRET,
    TOKEN_HEADER,
    Reply,
    TokenSerializer,
    Worker,
    fake_owner,
    leave_stale_socket,
    make_app,
    owned_cookie,
    running_workers,
    signed_cookie,
    token_of,
)

PLACEMENT = Placement(session_key="id", first_path="/seed", last_path="/end", ignored_paths={"/sum"})


async def end(_: Request) -> Response:
    return JSONResponse({})


async def refuse(request: Request) -> Response:
    request.session["id"] = uuid.uuid4().hex
    return JSONResponse({}, status_code=422)


async def echo(request: Request) -> Response:
    request.session["id"] = uuid.uuid4().hex
    return JSONResponse({"body": (await request.body()).decode(), "worker": request.app.state.worker_id})


async def slow(request: Request) -> Response:
    request.session["id"] = uuid.uuid4().hex
    request.app.state.begun.release()
    await request.app.state.may_go_on.wait()
    return JSONResponse({"worker": request.app.state.worker_id})


async def deaf(request: Request) -> Response:
    """Go on for a while after the client has left, as what runs in a thread does."""
    request.app.state.begun.release()
    await request.body()
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.app.state.left.release()
    await request.app.state.may_end.wait()
    request.app.state.ended.release()
    return JSONResponse({})


def counting_app() -> Starlette:
    paths = {"/end": end, "/sum": end, "/refuse": refuse, "/echo": echo, "/mcp": echo, "/slow": slow, "/deaf": deaf}
    app = make_app()
    app.router.routes[0:0] = [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]
    app.state.begun = asyncio.Semaphore(0)
    app.state.left, app.state.ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
    app.state.may_go_on, app.state.may_end = asyncio.Event(), asyncio.Event()
    return app


def placed(socket_dir: Path, number: int = 4, **install: Any) -> Any:
    return running_workers(socket_dir, number, counting_app, **{"placement": PLACEMENT, **install})


def owner_in(reply: Reply) -> str:
    payload = reply.cookie.partition("=")[2].partition(".")[0]
    owner: str = json.loads(b64decode(payload))["nemo_gym_worker"]
    return owner


def held(workers: list[Worker]) -> list[int]:
    return [worker.router.statistics().sessions_held for worker in workers]


def assert_counted(workers: list[Worker], owners: Counter[str]) -> None:
    """Each worker holds the sessions that name it, but for one that may share a mark with another."""
    for worker, count in zip(workers, held(workers), strict=True):
        assert owners[worker.worker_id] - 1 <= count <= owners[worker.worker_id]


async def only_held_by(workers: list[Worker], replies: list[Reply]) -> None:
    """End the sessions that other workers hold."""
    stay = {worker.worker_id for worker in workers}
    for reply in replies:
        if owner_in(reply) not in stay:
            await workers[0].request("/end", method="POST", cookie=reply.cookie)


async def seeds(worker: Worker, number: int) -> list[Reply]:
    return [await worker.request("/seed", method="POST") for _ in range(number)]


@pytest.mark.promise("placement-even")
async def test_sessions_that_one_worker_accepts_begin_at_all(socket_dir: Path) -> None:
    async with placed(socket_dir) as workers:
        replies = await seeds(workers[0], 40)

        owners = Counter(owner_in(reply) for reply in replies)
        assert max(owners.values()) <= 1.25 * min(owners.values())
        assert set(owners) == {worker.worker_id for worker in workers}
        assert_counted(workers, owners)
        assert workers[0].router.statistics().placed_elsewhere == 40 - owners[workers[0].worker_id]


@pytest.mark.promise("placement-even")
async def test_a_session_that_begins_elsewhere_is_its_owners(socket_dir: Path) -> None:
    async with placed(socket_dir) as workers:
        for reply in await seeds(workers[0], 8):
            assert owner_in(reply) == reply.json()["worker"]
            for count, worker in enumerate(workers, 1):
                counted = await worker.request("/count", method="POST", cookie=reply.cookie)
                assert counted.json() == {"count": count, "worker": reply.json()["worker"]}


@pytest.mark.promise("placement-even")
async def test_slow_beginnings_are_spread_before_they_are_over(socket_dir: Path) -> None:
    async with placed(socket_dir) as workers:
        requests = [asyncio.create_task(workers[0].request("/slow", method="POST")) for _ in range(24)]
        for worker in workers:
            for _ in range(5):
                await worker.app.state.begun.acquire()
        assert held(workers) == [0, 0, 0, 0]
        for worker in workers:
            worker.app.state.may_go_on.set()

        owners = Counter(owner_in(reply) for reply in await asyncio.gather(*requests))

        assert_counted(workers, owners)


@pytest.mark.promise("placement-counts")
async def test_a_session_counts_from_its_beginning_to_its_end(socket_dir: Path) -> None:
    async with placed(socket_dir, 2) as workers:
        replies = await seeds(workers[0], 6)
        assert sum(held(workers)) == 6
        for worker, reply in zip([*workers, *workers], replies, strict=False):
            for _ in range(2):
                assert (await worker.request("/end", method="POST", cookie=reply.cookie)).status == 200
        assert sum(held(workers)) == 2
        # The same session begins anew.
        await workers[0].request("/seed", method="POST", cookie=replies[0].cookie)
        assert sum(held(workers)) == 3


@pytest.mark.promise("placement-counts")
async def test_a_request_whose_client_has_left_counts_until_its_handler_ends(socket_dir: Path) -> None:
    async with placed(socket_dir, 2) as (here, there):
        await only_held_by([here], await seeds(here, 20))
        observer = SharedLoads(socket_dir / "loads", uuid.uuid4().hex)
        observer.leave()
        async with await here.connect() as client:
            client.send_head("POST", "/deaf", [("host", "workers.test")])
            await there.app.state.begun.acquire()
        await there.app.state.left.acquire()
        later = asyncio.create_task(here.request("/slow", method="POST"))
        await there.app.state.begun.acquire()
        seen = [observer.snapshot()[there.worker_id]]
        there.app.state.may_end.set()
        await there.app.state.ended.acquire()
        await there.request("/health")
        seen.append(observer.snapshot()[there.worker_id])
        there.app.state.may_go_on.set()
        await later
        observer.close()

    assert seen == [2, 1]


@pytest.mark.promise("placement-counts")
async def test_what_begins_no_session_counts_for_none(socket_dir: Path) -> None:
    async with placed(socket_dir, 2) as workers:
        for path in ("/refuse", "/sum", "/health"):
            for _ in range(5):
                await workers[0].request(path, method="POST")
        await workers[0].request("/seed")

        assert held(workers) == [0, 0]
        # Neither here nor on the way.
        assert [owner_in(reply) for reply in await seeds(workers[0], 1)] == [workers[0].worker_id]


@pytest.mark.promise("placement-counts")
async def test_the_application_may_count_the_ends_itself(socket_dir: Path) -> None:
    callbacks: list[Any] = []
    placement = Placement(session_key="id", first_path="/seed", last_path="/end", when_ended=callbacks.append)
    async with placed(socket_dir, 1, placement=placement) as (worker,):
        (reply,) = await seeds(worker, 1)
        await worker.request("/end", method="POST", cookie=reply.cookie)
        assert held([worker]) == [1]

        session = json.loads(b64decode(reply.cookie.partition("=")[2].partition(".")[0]))
        for callback in callbacks:
            callback(session["id"])

        assert held([worker]) == [0]


@pytest.mark.promise("placement-stays")
async def test_what_has_a_session_or_begins_none_stays(socket_dir: Path) -> None:
    install = {"mcp_token_header": TOKEN_HEADER, "mcp_token_serializer": TokenSerializer("token secret", salt="mcp")}
    body_ids = BodyIdField("session", TokenSerializer(SECRET, salt="body"))
    async with placed(socket_dir, 2, body_ids=body_ids, **install) as (here, there):
        await only_held_by([here], await seeds(here, 20))
        before = here.router.statistics().forwarded

        stays: list[dict[str, Any]] = [
            {"target": "/echo", "cookie": owned_cookie(here.worker_id)},
            {"target": "/echo", "cookie": signed_cookie({"id": "of a single worker"})},
            {"target": "/echo", "headers": [token_of(here.worker_id)]},
            {"target": "/echo", "body": b'{"session": "of the caller"}'},
            {"target": "/sum"},
            {"target": "/mcp"},
            {"target": "/mcp/", "headers": [token_of("not a worker")]},
        ]
        for request in stays:
            await here.request(method="POST", **request)
        for method in ("GET", "PUT", "DELETE"):
            await here.request("/seen", method=method)

        assert here.router.statistics().forwarded == before
        assert (await here.request("/echo", method="POST", cookie="sid=forged")).json()["worker"] == there.worker_id


@pytest.mark.promise("placement-stays")
async def test_a_request_is_placed_once(socket_dir: Path) -> None:
    async with placed(socket_dir, 3) as (here, there, third):
        await only_held_by([here, third], await seeds(here, 30))
        before = there.router.statistics().arrived

        (reply,) = await seeds(here, 1)

        assert owner_in(reply) == there.worker_id
        assert there.router.statistics().arrived == before + 1
        assert there.router.statistics().forwarded == 0


@pytest.mark.promise("placement-never-costs-a-session")
@pytest.mark.parametrize("size", [0, 10, 60_000, 500_000])
@pytest.mark.parametrize("leaves_socket", [True, False])
async def test_a_session_begins_here_where_the_chosen_worker_is_gone(
    socket_dir: Path, size: int, leaves_socket: bool
) -> None:
    async with placed(socket_dir, 1) as (here,):
        # One whose lock outlives it, and whose last beat is not long ago for hours.
        ghost_id = uuid.uuid4().hex
        ghost = SharedLoads(socket_dir / "loads", ghost_id, clock=lambda: time.monotonic() + 10_000)
        if leaves_socket:
            leave_stale_socket(socket_dir, ghost_id)
        body = b"x" * size
        replies = [await here.request("/echo", method="POST", body=body) for _ in range(5)]

        assert [reply.status for reply in replies] == [200] * 5
        assert {reply.json()["body"] for reply in replies} == {body.decode()}
        assert {owner_in(reply) for reply in replies} == {here.worker_id}
        assert sorted(ghost.snapshot().values()) == [0, 5]
        statistics = here.router.statistics()
        assert (statistics.served_here, statistics.forwarded, statistics.placed_elsewhere) == (5, 0, 0)
        ghost.close()


@pytest.mark.promise("died-after-taking", "typed-410")
async def test_a_worker_that_dies_before_it_has_begun_a_session_held_none(socket_dir: Path) -> None:
    chosen = uuid.uuid4().hex

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take_request(reader, writer)
        worker_socket_path(socket_dir, chosen).unlink()
        writer.close()

    async with placed(socket_dir, 1) as (here,):
        loads = SharedLoads(socket_dir / "loads", chosen)
        async with fake_owner(socket_dir, die, chosen):
            replies = await seeds(here, 6)
        loads.close()
        statistics = here.router.statistics()

    (reply,) = (reply for reply in replies if reply.status != 200)
    assert reply.status == 410
    assert reply.all(SESSION_LOST_HEADER) == ["worker_gone"]
    said = reply.json()
    assert (said["reason"], said["may_have_run"], said["new_session_may_be_seeded"]) == ("worker_gone", True, True)
    assert said["detail"].startswith("The worker on which this session was to begin is no longer running. Start a new")
    assert (statistics.lost, statistics.forwarded, statistics.placed_elsewhere) == (1, 1, 1)


@pytest.mark.promise("placement-counts")
@pytest.mark.parametrize("begun", [False, True])
async def test_a_forward_counts_from_its_beginning(socket_dir: Path, begun: bool) -> None:
    async with placed(socket_dir, 2) as (here, there):
        await only_held_by([here], await seeds(here, 8))
        cookie = owned_cookie(there.worker_id) if begun else None
        before = here.router.statistics()
        client = asyncio.create_task(here.request("/slow", method="POST", cookie=cookie))
        await there.app.state.begun.acquire()
        after = here.router.statistics()
        there.app.state.may_go_on.set()
        assert (await client).status == 200

    counted = (after.forwarded, after.placed_elsewhere, after.served_here)
    assert counted == (before.forwarded + 1, before.placed_elsewhere + (not begun), before.served_here)


@pytest.mark.promise("placement-never-costs-a-session")
async def test_a_worker_that_stops_gets_no_more_sessions(socket_dir: Path) -> None:
    async with placed(socket_dir, 3) as (here, stopping, third):
        await seeds(here, 9)
        await stopping.stop()

        owners = {owner_in(reply) for reply in await seeds(here, 9)}

        assert owners == {here.worker_id, third.worker_id}


@pytest.mark.promise("placement-never-costs-a-session")
async def test_a_worker_that_is_finishing_is_not_chosen(socket_dir: Path) -> None:
    async with placed(socket_dir, 2) as (here, stopping):
        requests = [asyncio.create_task(here.request("/slow", method="POST")) for _ in range(4)]
        await stopping.app.state.begun.acquire()
        observer = SharedLoads(socket_dir / "loads", uuid.uuid4().hex)
        observer.leave()

        stop = asyncio.create_task(stopping.stop())
        while stopping.worker_id in observer.snapshot():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)

        assert not stop.done()
        assert {owner_in(reply) for reply in await seeds(here, 9)} == {here.worker_id}
        for worker in (here, stopping):
            worker.app.state.may_go_on.set()
        assert {reply.status for reply in await asyncio.gather(*requests)} == {200}
        await stop
        observer.close()


@pytest.mark.promise("placement-never-costs-a-session")
async def test_without_a_file_of_loads_sessions_stay_and_the_log_says_so_once(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (socket_dir / "loads").mkdir()
    with caplog.at_level(logging.WARNING):
        async with placed(socket_dir, 2) as (here, _):
            replies = await seeds(here, 10)

    assert {owner_in(reply) for reply in replies} == {here.worker_id}
    told = [record.getMessage() for record in caplog.records if "stay where they arrive" in record.getMessage()]
    assert len(told) == 2
    assert "Is a directory" in told[0]


@pytest.mark.parametrize("shares_loads", [True, False])
async def test_a_session_without_an_end_is_forgotten_in_time(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, shares_loads: bool
) -> None:
    monkeypatch.setattr("nemo_gym.session_routing.held_sessions.FORGET_S", 0.001)
    if not shares_loads:
        (socket_dir / "loads").mkdir()
    async with placed(socket_dir, 1) as (worker,):
        await seeds(worker, 1)
        async with asyncio.timeout(60):
            while held([worker]) != [0]:  # noqa: ASYNC110 - time tells nobody
                await asyncio.sleep(0.001)

        assert worker.router.sessions is not None
        assert worker.router.sessions.begun == 1


@pytest.mark.promise("placement-stays")
async def test_without_placement_sessions_stay(socket_dir: Path) -> None:
    async with placed(socket_dir, 2, placement=None) as (here, there):
        replies = await seeds(here, 10)

        assert {owner_in(reply) for reply in replies} == {here.worker_id}
        assert not (socket_dir / "loads").exists()
        assert there.router.statistics().sessions_held == 0
