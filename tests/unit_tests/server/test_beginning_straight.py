"""New sessions of our own client that begin straight at a worker, over real sockets.

The server's port is one that nobody listens on, unless a test says otherwise: what goes by it fails.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_gym.server import owner_calls
from nemo_gym.server.client import ServerClient, get_response_json
from nemo_gym.server.socket_records import recorded_socket_dir
from nemo_gym.session_routing import SESSION_OWNER_KEY, Placement, loads_view
from nemo_gym.session_routing.loads import SharedLoads
from tests.session_workers import METHODS, SECRET, Worker, leave_stale_socket, running_workers, seen

pytestmark = pytest.mark.usefixtures("closed_client", "private_state")

COOKIE = "Counter___counter"
FAKE = "f" * 32


async def seed(request: Request) -> Response:
    request.session["id"] = uuid.uuid4().hex
    request.app.state.begun.release()
    await request.app.state.may_go_on.wait()
    return JSONResponse({"body": (await request.body()).decode()})


def app() -> Starlette:
    app = Starlette(
        routes=[Route("/seed", seed, methods=["POST"]), Route("/{path:path}", seen, methods=METHODS)],
    )
    app.state.begun = asyncio.Semaphore(0)
    app.state.may_go_on = asyncio.Event()
    app.state.may_go_on.set()
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    return app


def client_for(port: int, **options: Any) -> ServerClient:
    config = {"counter": {"resources_servers": {"x": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}}
    return ServerClient.from_config(OmegaConf.create(config), **options)


def placed(socket_dir: Path, number: int) -> Any:
    return running_workers(
        socket_dir, number, app, session_cookie=COOKIE, placement=Placement(session_key="id", ignored_paths={"/seen"})
    )


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port that refuses connections."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@asynccontextmanager
async def calling(socket_dir: Path, port: int, workers: int = 2, **options: Any) -> AsyncIterator[Any]:
    async with placed(socket_dir, workers) as running:
        with recorded_socket_dir("127.0.0.1", port, socket_dir):
            yield client_for(port, **options), running


async def begun_at(client: ServerClient, **options: Any) -> str:
    """Begin a session and return its owner."""
    reply = await client.post("counter", "/seed", connect_patience=0, **options)
    await reply.read()
    assert reply.status == 200
    (morsel,) = reply.cookies.values()
    owner: str = json.loads(base64.b64decode(morsel.value.partition(".")[0]))[SESSION_OWNER_KEY]
    return owner


def routed(workers: list[Worker]) -> list[tuple[int, int]]:
    return [(it.served_here, it.forwarded) for it in (worker.router.statistics() for worker in workers)]


@pytest.mark.promise("straight-begins")
class TestStraight:
    async def test_sessions_begin_evenly_without_the_port_and_without_forwards(
        self, socket_dir: Path, nobody: int
    ) -> None:
        async with calling(socket_dir, nobody, 4) as (client, workers):
            owners = Counter([await begun_at(client) for _ in range(8)])
            owners.update(await asyncio.gather(*(begun_at(client) for _ in range(32))))
            assert sorted(owners.values()) == [10, 10, 10, 10]
            assert routed(workers) == [(10, 0)] * 4

    async def test_a_burst_is_spread_while_none_of_it_is_answered(self, socket_dir: Path, nobody: int) -> None:
        async with calling(socket_dir, nobody, 4) as (client, workers):
            for worker in workers:
                worker.app.state.may_go_on.clear()
            calls = [asyncio.create_task(begun_at(client)) for _ in range(20)]
            for worker in workers:
                for _ in range(5):
                    await worker.app.state.begun.acquire()
            assert routed(workers) == [(5, 0)] * 4
            for worker in workers:
                worker.app.state.may_go_on.set()
            await asyncio.gather(*calls)

    async def test_a_request_looks_as_by_the_port(self, socket_dir: Path) -> None:
        async with placed(socket_dir, 1) as (worker,):
            with recorded_socket_dir("127.0.0.1", worker.port, socket_dir):
                call: dict[str, Any] = {"server_name": "counter", "url_path": "/see?q=%C3%A9", "json": {"a": 1}}
                replies = []
                for straight in (True, False):
                    reply = await client_for(worker.port, straight_to_owner=straight).post(**call)
                    saw = await get_response_json(reply)
                    assert saw.pop("client")[0] == "127.0.0.1"
                    replies.append((reply.url, reply.request_info.headers, saw))
        assert replies[0] == replies[1]

    async def test_from_the_reply_on_the_session_is_its_owners(self, socket_dir: Path, nobody: int) -> None:
        async with calling(socket_dir, nobody) as (client, workers):
            reply = await client.post("counter", "/seed")
            again = await client.post("counter", "/see", cookies=reply.cookies)
            assert (await get_response_json(again))["worker"] in {worker.worker_id for worker in workers}
            assert sorted(routed(workers)) == [(0, 0), (2, 0)]

    async def test_a_stopping_worker_gets_no_sessions(self, socket_dir: Path, nobody: int) -> None:
        async with calling(socket_dir, nobody, 3) as (client, workers):
            assert {await begun_at(client) for _ in range(3)} == {worker.worker_id for worker in workers}
            await workers[0].stop()
            owners = {await begun_at(client) for _ in range(6)}
            assert owners == {worker.worker_id for worker in workers[1:]}


@pytest.mark.promise("straight-begins-else-by-the-port")
class TestByThePort:
    async def test_what_begins_no_session_goes_by_the_port(self, socket_dir: Path, nobody: int) -> None:
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/health", {}),
            ("GET", "/seed", {}),
            ("PUT", "/seed", {}),
            ("POST", "/aggregate_metrics", {}),
            ("POST", "/aggregate_metrics?a=1", {}),
            ("POST", "/mcp", {}),
            ("POST", "/mcp/x", {}),
            ("POST", "/seed", {"headers": {"X-Nemo-Gym-Forwarded-Client": "[]"}}),
            ("POST", "/seed", {"cookies": {COOKIE: "names-nobody"}}),
        ]
        async with calling(socket_dir, nobody) as (client, workers):
            for method, path, options in calls:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await client.request("counter", path, method, connect_patience=0, **options)
            assert routed(workers) == [(0, 0)] * 2

    async def test_it_can_be_switched_off(self, socket_dir: Path, nobody: int) -> None:
        async with calling(socket_dir, nobody, straight_to_owner=False) as (client, _):
            with pytest.raises(aiohttp.ClientConnectorError):
                await begun_at(client)

    async def test_where_sessions_are_not_placed(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir, 2, app, session_cookie=COOKIE) as workers:
            with recorded_socket_dir("127.0.0.1", workers[0].port, socket_dir):
                client = client_for(workers[0].port)
                assert {await begun_at(client) for _ in range(4)} == {workers[0].worker_id}

    async def test_a_server_that_is_started_anew_is_found_again(
        self, socket_dir: Path, tmp_path: Path, nobody: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(owner_calls, "_FIRST_PAUSE_S", 0.0)
        client = client_for(nobody)
        with recorded_socket_dir("127.0.0.1", nobody, tmp_path), pytest.raises(aiohttp.ClientConnectorError):
            await begun_at(client)
        async with placed(socket_dir, 1) as (worker,):
            with recorded_socket_dir("127.0.0.1", nobody, socket_dir):
                assert await begun_at(client) == worker.worker_id


def hours_ahead() -> float:
    """The clock of a worker that need not beat for these tests."""
    return time.monotonic() + 10_000


@contextmanager
def counted(socket_dir: Path) -> Iterator[None]:
    """A worker that runs, as its lock says, and holds nothing; its id is `FAKE`."""
    held = SharedLoads(socket_dir / "loads", FAKE, clock=hours_ahead)
    try:
        yield
    finally:
        held.close()


@asynccontextmanager
async def beside_a_fake(socket_dir: Path) -> AsyncIterator[tuple[ServerClient, Worker]]:
    """A real worker that holds sessions and has the port; whoever counts with the loads prefers the fake one."""
    async with placed(socket_dir, 1) as (worker,):
        by_the_port = client_for(worker.port, straight_to_owner=False)
        for _ in range(3):
            await begun_at(by_the_port)
        with counted(socket_dir), recorded_socket_dir("127.0.0.1", worker.port, socket_dir):
            yield client_for(worker.port), worker


class TestTrouble:
    @pytest.mark.promise("straight-begins-else-by-the-port")
    @pytest.mark.parametrize("left", ["nothing", "stale socket", "file"])
    async def test_where_the_chosen_worker_is_gone_the_port_takes_the_session(
        self, socket_dir: Path, left: str
    ) -> None:
        async with beside_a_fake(socket_dir) as (client, worker):
            if left == "stale socket":
                leave_stale_socket(socket_dir, FAKE)
            elif left == "file":
                (socket_dir / FAKE).write_text("")
            for size in (10, 300_000):
                assert await begun_at(client, data=b"x" * size) == worker.worker_id

    @pytest.mark.promise("straight-begins-else-by-the-port")
    async def test_a_worker_that_was_not_reached_is_not_asked_again_at_once(
        self, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loads_view, "LOOK_S", 3600.0)
        asked = asyncio.Event()

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            writer.close()

        async with beside_a_fake(socket_dir) as (client, worker):
            assert await begun_at(client) == worker.worker_id
            async with await asyncio.start_unix_server(note, socket_dir / FAKE):
                assert {await begun_at(client) for _ in range(3)} == {worker.worker_id}
            assert not asked.is_set()

    @pytest.mark.promise("straight-begins-else-by-the-port", "sent-once")
    @pytest.mark.parametrize("size", [10, 5_000_000])
    async def test_a_worker_that_dies_with_it_is_410_and_it_is_not_sent_again(
        self, socket_dir: Path, size: int
    ) -> None:
        received: list[bytes] = []

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.readuntil(b"\r\n\r\n"))
            server.close()
            writer.transport.abort()

        async with beside_a_fake(socket_dir) as (client, worker):
            server = await asyncio.start_unix_server(die, socket_dir / FAKE)
            reply = await client.post("counter", "/seed", data=b"x" * size)
            answer = await get_response_json(reply)
            assert (reply.status, answer["reason"], answer["may_have_run"]) == (410, "worker_gone", True)
            assert (len(received), worker.router.statistics().served_here) == (1, 3)

    @pytest.mark.promise("straight-begins-else-by-the-port", "sent-once")
    async def test_a_worker_that_hangs_up_and_runs_on_is_502(self, socket_dir: Path) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(65_536)
            writer.close()

        async with beside_a_fake(socket_dir) as (client, worker):
            async with await asyncio.start_unix_server(hang_up, socket_dir / FAKE):
                assert (await client.post("counter", "/seed")).status == 502
            assert worker.router.statistics().served_here == 3
