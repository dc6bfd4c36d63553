"""Calls of our own client straight to the worker that owns a session, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from nemo_gym.server import owner_calls
from nemo_gym.server.client import ServerClient, close_client, get_response_json
from nemo_gym.server.socket_records import recorded_socket_dir
from nemo_gym.session_routing import SESSION_OWNER_KEY, create_socket_dir, remove_socket_dir, worker_socket_path
from tests.session_workers import (
    METHODS,
    SECRET,
    Worker,
    count,
    leave_stale_socket,
    owned_cookie,
    running_workers,
    seed,
    seen,
    serving,
)

pytestmark = pytest.mark.usefixtures("closed_client", "private_state")

COOKIE = "Counter___counter"
GONE = "a" * 32
FAKE = "f" * 32


async def large(request: Request) -> Response:
    body = await request.body()
    return Response(body, headers={"x-long": "h" * 30_000, "x-worker": request.app.state.worker_id})


async def away(request: Request) -> Response:
    return RedirectResponse(request.query_params["to"], 307)


async def slow(request: Request) -> Response:
    request.app.state.begun.set()
    await request.app.state.go_on.wait()
    return await count(request)


def counter_app() -> Starlette:
    app = Starlette(
        routes=[
            Route("/seed", seed, methods=["POST"]),
            Route("/count", count, methods=["POST"]),
            Route("/large", large, methods=["POST"]),
            Route("/away", away, methods=["POST"]),
            Route("/slow", slow, methods=["POST"]),
            Route("/{path:path}", seen, methods=METHODS),
        ]
    )
    app.state.counts = {}
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    return app


def client_for(port: int, **options: Any) -> ServerClient:
    config = {"counter": {"resources_servers": {"x": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}}
    return ServerClient.from_config(OmegaConf.create(config), **options)


class Pair:
    """Two workers: the shared port is that of `here`, so that whatever goes by it is seen there."""

    def __init__(self, here: Worker, there: Worker) -> None:
        self.here, self.there = here, there
        self.client = client_for(here.port)
        self.by_the_port = client_for(here.port, straight_to_owner=False)
        for worker in (here, there):
            worker.app.state.begun, worker.app.state.go_on = asyncio.Event(), asyncio.Event()
        self._before = self._taken()

    def taken_by_the_port(self) -> int:
        return self._taken() - self._before

    def _taken(self) -> int:
        statistics = self.here.router.statistics()
        return statistics.served_here + statistics.forwarded + statistics.lost

    async def session_there(self) -> dict[str, str]:
        """Begin a session at `there` and return its cookie."""
        reply = await client_for(self.there.port).post("counter", "/seed")
        return {name: morsel.value for name, morsel in reply.cookies.items()}


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[tuple[Worker, Worker]]:
    folder = create_socket_dir()
    async with running_workers(folder, 2, counter_app, limit=120, session_cookie=COOKIE) as (here, there):
        yield here, there
    remove_socket_dir(folder)


@pytest.fixture
async def pair(workers: tuple[Worker, Worker], private_state: None) -> AsyncIterator[Pair]:
    here, there = workers
    with recorded_socket_dir("127.0.0.1", here.port, here.router.socket_dir):
        yield Pair(here, there)


@pytest.fixture
def fake(workers: tuple[Worker, Worker]) -> Iterator[Path]:
    """Where the socket of a worker stands that a test makes up; its id is `FAKE`."""
    path = worker_socket_path(workers[0].router.socket_dir, FAKE)
    yield path
    path.unlink(missing_ok=True)


def value_of(cookie: str) -> str:
    return cookie.partition("=")[2]


def named(worker_id: str) -> dict[str, str]:
    """Return a genuine cookie that names a worker."""
    return {COOKIE: value_of(owned_cookie(worker_id, name=COOKIE))}


def forged(session: object) -> str:
    return base64.b64encode(json.dumps(session).encode()).decode() + ".date.signature"


async def reply_of(response: aiohttp.ClientResponse) -> tuple[int, Any]:
    return response.status, await get_response_json(response)


@pytest.mark.promise("straight-to-owner")
class TestStraight:
    async def test_requests_of_a_session_do_not_meet_the_port(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        replies = [await reply_of(await pair.client.post("counter", "/count", cookies=cookies)) for _ in range(3)]
        assert replies == [(200, {"count": n, "worker": pair.there.worker_id}) for n in (1, 2, 3)]
        assert pair.taken_by_the_port() == 0

    async def test_request_and_reply_look_as_by_the_port(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        call: dict[str, Any] = {
            "server_name": "counter",
            "url_path": "/seen/a%2Fb?q=%C3%A9&r=1",
            "json": {"a": [1]},
            "headers": {"X-Own": "1"},
            "cookies": cookies,
        }
        straight, by_the_port = await pair.client.post(**call), await pair.by_the_port.post(**call)
        assert type(straight) is aiohttp.ClientResponse
        assert (straight.url, straight.method, straight.ok) == (by_the_port.url, "POST", True)
        assert straight.request_info.headers == by_the_port.request_info.headers
        ours, theirs = await get_response_json(straight), await get_response_json(by_the_port)
        assert (ours.pop("client")[0], theirs.pop("client")[0]) == ("127.0.0.1", "127.0.0.1")
        assert ours == theirs

    @pytest.mark.parametrize("form", ["text", "morsels", "jar", "header", "header and cookies"])
    async def test_a_cookie_is_read_in_every_form(self, pair: Pair, form: str) -> None:
        value = (await pair.session_there())[COOKIE]
        jar: SimpleCookie = SimpleCookie()
        jar.load(f"{COOKIE}={value}; other=1")
        given: dict[str, dict[str, Any]] = {
            "text": {"cookies": {"first": "1", COOKIE: value, "last": "2"}},
            "morsels": {"cookies": dict(jar.items())},
            "jar": {"cookies": jar},
            "header": {"headers": {"cOOkie": f"x=1; {COOKIE}={value}; y=2"}},
            "header and cookies": {"headers": {"Cookie": f"{COOKIE}={value}"}, "cookies": {"other": "1"}},
        }
        assert await reply_of(await pair.client.post("counter", "/count", **given[form])) == (
            200,
            {"count": 1, "worker": pair.there.worker_id},
        )
        assert pair.taken_by_the_port() == 0

    @pytest.mark.parametrize("size", [0, 40_000, 8_000_000])
    async def test_bodies_of_any_size_and_long_headers_pass(self, pair: Pair, size: int) -> None:
        reply = await pair.client.post("counter", "/large", data=b"x" * size, cookies=await pair.session_there())
        assert await reply.read() == b"x" * size
        assert (len(reply.headers["x-long"]), reply.headers["x-worker"]) == (30_000, pair.there.worker_id)
        assert pair.taken_by_the_port() == 0

    async def test_a_redirect_to_another_server_goes_there(self, pair: Pair) -> None:
        async with serving(counter_app()) as (server, port):
            reply = await pair.client.post(
                "counter", f"/away?to=http://127.0.0.1:{port}/else", cookies=await pair.session_there(), json={}
            )
            assert (reply.url.port, reply.status) == (port, 500)  # it has no worker id to tell
            await server.shutdown()

    async def test_connections_are_kept_and_closed_with_the_client(self, pair: Pair, fake: Path) -> None:
        connections = ended = 0
        over = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections, ended
            connections += 1
            while await reader.read(65_536):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            writer.close()
            over.set()

        async with await asyncio.start_unix_server(answer, fake):
            for _ in range(5):
                assert await (await pair.client.get("counter", "/x", cookies=named(FAKE))).read() == b"ok"
            assert (connections, over.is_set()) == (1, False)
            await close_client()
            await over.wait()

    async def test_an_owner_that_stops_finishes_what_it_has_and_is_lost_then(
        self, socket_dir: Path, private_state: None
    ) -> None:
        async with running_workers(socket_dir, 2, counter_app, session_cookie=COOKIE) as (here, there):
            pair, state = Pair(here, there), there.app.state
            with recorded_socket_dir("127.0.0.1", here.port, socket_dir):
                cookies = await pair.session_there()
                call = asyncio.create_task(pair.client.post("counter", "/slow", cookies=cookies))
                await state.begun.wait()
                stop = asyncio.create_task(there.stop())
                await asyncio.sleep(0)
                state.go_on.set()
                assert await reply_of(await call) == (200, {"count": 1, "worker": there.worker_id})
                await stop
                status, reply = await reply_of(await pair.client.post("counter", "/count", cookies=cookies))
                assert (status, reply["reason"], reply["may_have_run"]) == (410, "worker_gone", False)


@pytest.mark.promise("straight-only-a-way")
class TestOnlyAWay:
    @pytest.mark.parametrize(
        "value",
        {
            "none": "",
            "garbled": "%%%.x.y",
            "no base64": "é",
            "no JSON": base64.b64encode(b"\xff\x00").decode() + ".x.y",
            "no mapping": forged([SESSION_OWNER_KEY]),
            "nested": forged({"a": {SESSION_OWNER_KEY: GONE}}),
            "deep": base64.b64encode(b"[" * 2000).decode() + ".x.y",
            "a path": forged({SESSION_OWNER_KEY: "../../../../tmp/other"}),
            "a number": forged({SESSION_OWNER_KEY: 7}),
            "gone": forged({SESSION_OWNER_KEY: GONE}),
            "huge": "A" * 50_000 + ".x.y",
            "quoted": '"' + forged({SESSION_OWNER_KEY: GONE}) + '"',
        }.values(),
        ids=lambda value: value[:12],
    )
    async def test_what_names_no_worker_is_served_as_by_the_port(self, pair: Pair, value: str) -> None:
        for client in (pair.client, pair.by_the_port):
            headers = {"Cookie": f"{COOKIE}={value}"}
            reply = await client.post("counter", "/count", headers=headers)
            assert (reply.status, (await get_response_json(reply))["worker"]) == (200, pair.here.worker_id)
        assert pair.taken_by_the_port() == 2

    async def test_a_forged_cookie_of_a_running_worker_is_no_session_there_either(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        session = json.loads(base64.b64decode(cookies[COOKIE].partition(".")[0]))
        for value in (forged(session), cookies[COOKIE][:-1] + "!"):
            status, reply = await reply_of(await pair.client.post("counter", "/count", cookies={COOKIE: value}))
            assert (status, reply["worker"]) == (200, pair.there.worker_id)
        assert await reply_of(await pair.client.post("counter", "/count", cookies=cookies)) == (
            200,
            {"count": 1, "worker": pair.there.worker_id},
        )

    async def test_of_two_cookies_the_worker_reads_the_one_it_always_reads(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        theirs = f"{COOKIE}={cookies[COOKIE]}"
        ours = f"{COOKIE}={named(pair.here.worker_id)[COOKIE]}"
        for doubled in (f"{ours}; {theirs}", f"{theirs}; {ours}", f"Other___counter={named(GONE)[COOKIE]}; {theirs}"):
            reply = [
                await reply_of(await client.post("counter", "/seen", headers={"Cookie": doubled}))
                for client in (pair.client, pair.by_the_port)
            ]
            assert reply[0][1]["worker"] == reply[1][1]["worker"]

    async def test_the_private_header_and_the_mcp_path_go_by_the_port(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        origin = {"X-Nemo-Gym-Forwarded-Client": '[["1.2.3.4",1],null,"https","","1.1",false]'}
        _, reply = await reply_of(await pair.client.post("counter", "/seen", cookies=cookies, headers=origin))
        assert (reply["client"][0], reply["scheme"]) == ("127.0.0.1", "http")
        await pair.client.post("counter", "/mcp/x", cookies=cookies)
        assert pair.taken_by_the_port() == 2

    async def test_it_can_be_switched_off(self, pair: Pair) -> None:
        assert (await pair.by_the_port.post("counter", "/count", cookies=await pair.session_there())).status == 200
        assert pair.taken_by_the_port() == 1

    async def test_without_a_record_the_port_is_called_and_the_next_look_is_later(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(owner_calls, "_FIRST_PAUSE_S", 3600.0)
        cookies, client = named(pair.here.worker_id), client_for(pair.there.port)
        before = pair.there.router.statistics().forwarded
        await client.post("counter", "/count", cookies=cookies)
        with recorded_socket_dir("127.0.0.1", pair.there.port, pair.there.router.socket_dir):
            await client.post("counter", "/count", cookies=cookies)
            assert pair.there.router.statistics().forwarded == before + 2
            await client_for(pair.there.port).post("counter", "/count", cookies=cookies)
            assert pair.there.router.statistics().forwarded == before + 2

    async def test_a_server_that_was_started_anew_is_found_again(
        self, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(owner_calls, "_FIRST_PAUSE_S", 0.0)
        cookies, client = await pair.session_there(), client_for(pair.here.port)
        with recorded_socket_dir("127.0.0.1", pair.here.port, tmp_path):
            await client.post("counter", "/count", cookies=cookies)
        with recorded_socket_dir("127.0.0.1", pair.here.port, pair.there.router.socket_dir):
            for _ in range(3):
                await client.post("counter", "/count", cookies=cookies)
        assert pair.taken_by_the_port() == 2  # with the old directory, and when it was found to be old


def leave_behind(what: str, path: Path, running: Path) -> None:
    if what == "stale socket":
        leave_stale_socket(path.parent, path.name)
    elif what == "file":
        path.write_text("")
    elif what == "link":
        path.symlink_to(running)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65_536)
    writer.close()


@pytest.mark.promise("straight-fails-as-by-the-port", "sent-once")
class TestTrouble:
    @pytest.mark.parametrize("left", ["nothing", "stale socket", "file", "link"])
    async def test_where_nothing_was_sent_the_port_says_410(self, pair: Pair, fake: Path, left: str) -> None:
        leave_behind(left, fake, worker_socket_path(fake.parent, pair.there.worker_id))
        status, reply = await reply_of(await pair.client.post("counter", "/count", json={}, cookies=named(FAKE)))
        assert (status, reply["reason"], reply["may_have_run"]) == (410, "worker_gone", False)
        assert pair.taken_by_the_port() > 0

    @pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "PUT"])
    @pytest.mark.parametrize("size", [10, 5_000_000])
    async def test_an_owner_that_dies_with_a_request_is_410_and_the_request_is_not_repeated(
        self, pair: Pair, fake: Path, method: str, size: int
    ) -> None:
        received: list[bytes] = []

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.readuntil(b"\r\n\r\n"))
            server.close()
            writer.transport.abort()

        server = await asyncio.start_unix_server(die, fake)
        data = b"x" * size if method != "HEAD" else None
        reply = await pair.client.request("counter", "/count?n=1", method, data=data, cookies=named(FAKE))
        assert (reply.status, reply.reason, reply.headers["x-nemo-gym-session-lost"]) == (410, "Gone", "worker_gone")
        assert (reply.method, reply.url.path_qs, len(received)) == (method, "/count?n=1", 1)
        body = await reply.read()
        assert method == "HEAD" or json.loads(body)["may_have_run"] is True
        assert pair.taken_by_the_port() == 0

    @pytest.mark.parametrize("method", ["POST", "GET"])
    async def test_an_owner_that_hangs_up_and_runs_on_is_502(self, pair: Pair, fake: Path, method: str) -> None:
        async with await asyncio.start_unix_server(hang_up, fake):
            straight = await reply_of(await pair.client.request("counter", "/count", method, cookies=named(FAKE)))
            by_the_port = await reply_of(await pair.by_the_port.request("counter", "/x", method, cookies=named(FAKE)))
        assert straight == by_the_port
        assert straight[0] == 502

    async def test_a_reply_that_breaks_off_never_looks_complete(self, pair: Pair, fake: Path) -> None:
        async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            writer.close()

        async with await asyncio.start_unix_server(break_off, fake):
            reply = await pair.client.post("counter", "/count", cookies=named(FAKE))
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()

    async def test_a_full_backlog_is_left_to_the_port(self, pair: Pair, fake: Path) -> None:
        waiting: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(fake))
            listening.listen(0)
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                try:
                    waiting[-1].connect(str(fake))
                except BlockingIOError:
                    break
            status, reply = await reply_of(
                await pair.client.post("counter", "/count", cookies={COOKIE: forged({SESSION_OWNER_KEY: FAKE})})
            )
            assert (status, reply["worker"]) == (200, pair.here.worker_id)
        for one in waiting:
            one.close()

    async def test_without_descriptors_the_port_is_asked(self, pair: Pair) -> None:
        cookies = await pair.session_there()
        # Leaves an idle connection, here and at the router.
        assert (await (await pair.by_the_port.post("counter", "/count", cookies=cookies)).read()) != b""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            reply = await pair.client.post("counter", "/count", cookies=cookies)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await reply_of(reply) == (200, {"count": 2, "worker": pair.there.worker_id})
        assert pair.taken_by_the_port() == 2

    async def test_a_time_limit_of_the_caller_holds(self, pair: Pair) -> None:
        with pytest.raises(TimeoutError):
            await pair.client.post(
                "counter", "/slow", cookies=await pair.session_there(), timeout=aiohttp.ClientTimeout(total=0.05)
            )
        pair.there.app.state.go_on.set()
        assert pair.taken_by_the_port() == 0

    async def test_closing_the_client_in_mid_call_raises_as_by_the_port(self, pair: Pair) -> None:
        call = asyncio.create_task(pair.client.post("counter", "/slow", cookies=await pair.session_there()))
        await pair.there.app.state.begun.wait()
        await close_client()
        with pytest.raises(aiohttp.ClientConnectionError):
            await call
        pair.there.app.state.go_on.set()
