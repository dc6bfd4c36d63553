"""What goes wrong between two workers, or at the client's end, and what each hop makes of it."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    aiohttp_hop,
    aiohttp_ways,
    owner_pool,
    websocket_hop,
    worker_socket_path,
)
from nemo_gym.session_routing.hop import ARRIVED_KEY, OWNED_KEY
from tests.owner_ends import BODY, HEAD, LAST, frame, take_request
from tests.session_workers import (
    Worker,
    fake_owner,
    make_app,
    open_descriptors,
    owned_cookie,
    running_workers,
)

pytestmark = pytest.mark.usefixtures("hop")

MEGABYTE = 2**20
IMPORTED_LATE = (aiohttp_ways, aiohttp_hop, owner_pool, websocket_hop)


class TestClientsOfOneConnection:
    @pytest.mark.promise("reaches-its-owner", "pipelined")
    async def test_pipelined_requests_of_several_sessions_are_answered_in_their_order(self, socket_dir: Path) -> None:
        async def slowly(request: Request) -> Response:
            await asyncio.sleep(float(request.query_params["s"]))
            return JSONResponse([request.query_params["n"], request.app.state.worker_id])

        async with running_workers(socket_dir, 3, lambda: make_app(Route("/slowly", slowly))) as workers:
            async with await workers[0].connect() as connection:
                asked = [(n, workers[n % 3].worker_id) for n in range(9)]
                for n, owner in asked:
                    target = f"/slowly?n={n}&s={(9 - n) * 0.004}"
                    connection.send_head("GET", target, [("host", "h"), ("cookie", owned_cookie(owner))])
                replies = [(await connection.reply()).json() for _ in asked]
        assert replies == [[str(n), owner] for n, owner in asked]

    @pytest.mark.promise("reaches-its-owner")
    async def test_pipelined_bodies_go_to_their_own_sessions(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir) as workers, await workers[0].connect() as connection:
            for n in range(6):
                body = b"%d" % n * (70_000 if n % 2 else 10)
                cookie = owned_cookie(workers[n % 2].worker_id)
                headers = [("host", "h"), ("cookie", cookie), ("content-length", str(len(body)))]
                connection.send_head("PUT", f"/{n}", headers)
                connection.writer.write(body)
            for n in range(6):
                seen = (await connection.reply()).json()
                assert (seen["path"], seen["worker"]) == (f"/{n}", workers[n % 2].worker_id)

    @pytest.mark.promise("half-closed")
    async def test_a_client_that_half_closes_after_its_request_fares_as_with_the_owner_itself(
        self, socket_dir: Path
    ) -> None:
        runs: list[str] = []

        async def run(request: Request) -> Response:
            runs.append(request.app.state.worker_id)
            return Response("done")

        async with running_workers(socket_dir, 2, lambda: make_app(Route("/run", run, methods=["POST"]))) as workers:
            here, there = workers
            for worker in (there, here):
                async with await worker.connect() as connection:
                    headers = [("host", "h"), ("cookie", owned_cookie(there.worker_id)), ("content-length", "2")]
                    connection.send_head("POST", "/run", headers)
                    connection.writer.write(b"{}")
                    connection.writer.write_eof()
                    rest = await asyncio.wait_for(connection.reader.read(), 5)
                    assert rest == b"" or rest.endswith(b"done")
            assert (await here.request("/run", method="POST", cookie=owned_cookie(there.worker_id))).body == b"done"
        assert set(runs) == {there.worker_id}
        assert len(runs) <= 3

    @pytest.mark.promise("back-pressure")
    async def test_what_was_uploaded_does_not_wait_for_the_garbage_collector(self, socket_dir: Path) -> None:
        mark = b"a word of the body"
        async with running_workers(socket_dir) as (here, there):
            cookie = owned_cookie(there.worker_id)
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    reply = await here.request("/", method="PUT", body=mark * 6_000, cookie=cookie)
                    assert reply.status == 200
                assert uncollected(mark) == 0
            finally:
                gc.enable()


def uncollected(mark: bytes) -> int:
    """Return how many bytes, in objects that have `mark` in them, only the garbage collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        referred = {id(it): it for garbage in gc.garbage for it in gc.get_referents(garbage)}
        return sum(len(it) for it in referred.values() if isinstance(it, bytes) and mark in it)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.promise("private-is-here")
async def test_the_owner_is_told_that_a_request_came_for_its_session(socket_dir: Path) -> None:
    async def why(request: Request) -> Response:
        return JSONResponse([ARRIVED_KEY in request.scope, OWNED_KEY in request.scope])

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/why", why))) as (here, there):
        for worker, told in ((here, [True, True]), (there, [False, False])):
            assert (await worker.request("/why", cookie=owned_cookie(there.worker_id))).json() == told


class TestOwnersEnd:
    @pytest.mark.promise("sent-once", "died-after-taking")
    async def test_a_kept_connection_that_ends_when_it_is_used_again_is_not_tried_twice(self, socket_dir: Path) -> None:
        asked = 0

        async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            end = await take_request(reader, writer)
            asked += 1
            end.answer(b"first")
            await take_request(reader, writer)
            asked += 1
            writer.close()

        async with running_workers(socket_dir, 1) as (worker,), fake_owner(socket_dir, answer_once) as cookie:
            assert (await worker.request("/x", cookie=cookie)).body == b"first"
            for method in ("GET", "POST"):
                reply = await worker.request("/x", method=method, cookie=cookie)
                assert (reply.status, "may have run" in reply.json()["detail"]) == (502, True)
                if method == "GET":
                    assert (await worker.request("/x", cookie=cookie)).body == b"first"
        assert asked == 4

    @pytest.mark.promise("sent-once")
    async def test_a_kept_connection_that_has_ended_is_not_used_again(self, socket_dir: Path) -> None:
        ended: asyncio.Queue[None] = asyncio.Queue()

        async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (await take_request(reader, writer)).answer()
            writer.close()
            await writer.wait_closed()
            ended.put_nowait(None)

        async with running_workers(socket_dir, 1) as (worker,), fake_owner(socket_dir, answer_and_close) as cookie:
            for _ in range(3):
                assert (await worker.request("/x", cookie=cookie)).body == b"ok"
                await ended.get()

    @pytest.mark.promise("no-reply-is-502")
    async def test_an_owner_that_answers_garbage_is_502(self, socket_dir: Path) -> None:
        garbage = b""

        async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await take_request(reader, writer)
            writer.write(garbage)
            await reader.read()
            writer.close()

        async with running_workers(socket_dir, 1) as (worker,), fake_owner(socket_dir, talk_nonsense) as cookie:
            for garbage in (
                b"what?\r\n\r\n", b"\xff" * 99, b"HTTP/9.9 -\r\n\r\n", frame(BODY, b"x"), frame(HEAD, b"two hundred"),
                frame(HEAD, b"200\nname"), frame(HEAD | LAST, b"200"), frame(HEAD)[:1] + b"\xff" * 8, frame(16, b"x"),
            ):  # fmt: skip
                reply = await worker.request("/x", cookie=cookie)
                assert (reply.status, reply.all(SESSION_LOST_HEADER)) == (502, []), garbage

    @pytest.mark.promise("broken-reply-shows")
    async def test_garbage_after_a_reply_began_breaks_it_off(self, socket_dir: Path) -> None:
        async def lose_the_thread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = await take_request(reader, writer)
            end.begin()
            end.go_on(b"abc")
            writer.write(b"lost the thread\r\n" * 9)
            await reader.read()
            writer.close()

        async with running_workers(socket_dir, 1) as (worker,), fake_owner(socket_dir, lose_the_thread) as cookie:
            reply = await worker.request("/x", cookie=cookie)
        assert reply.status == 502 or not reply.complete


class Unruly:
    """An application that does not keep to its part."""

    def __init__(self, *messages: Message) -> None:
        self.messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for message in self.messages:
            await send(message)


def start(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(piece: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}


async def outcome(worker: Worker, cookie: str) -> Any:
    """Return what a client sees of the reply to one request; None where the connection ends without one."""
    try:
        reply = await worker.request("/x", cookie=cookie)
    except asyncio.IncompleteReadError:
        return None
    headers = sorted(header for header in reply.headers if header[0] not in {"date", "server", "connection"})
    return reply.status, headers, reply.body, reply.complete


@pytest.mark.promise("reply-unchanged", "broken-reply-shows", "application-errors")
async def test_an_application_that_breaks_the_rules_fares_as_with_its_own_server(socket_dir: Path) -> None:
    length = b"content-length"
    behaviours: list[tuple[Message, ...]] = [
        (), (body(b"first"),), (start(),), (start(), body(b"x", more=True)), (start(), start()),
        (start((length, b"9")), body(b"short")), (start((length, b"1")), body(b"long")), (start(), body(b"")),
        (start((length, b"4")), body(b"done"), body(b"more")), (start(status=299), body(b"x")),
        (start((b"x-a", b"1"), (b"X-A", b"2"), (b"x-empty", b"")), body(b"a", more=True), body(b"b")),
    ]  # fmt: skip
    app = Unruly()
    async with running_workers(socket_dir, 2, lambda: make_app(Route("/x", app))) as (here, there):
        cookie = owned_cookie(there.worker_id)
        for app.messages in behaviours:
            direct, forwarded = await outcome(there, cookie), await outcome(here, cookie)
            assert forwarded == direct or direct is None, app.messages
            assert not (forwarded and forwarded[0] == 200 and direct is None and forwarded[3]), app.messages


@pytest.mark.promise("reply-unchanged")
@pytest.mark.parametrize("header", [(b"x-split", b"a\r\nx-smuggled: 1"), (b"x-line", b"a\nb"), (b"x\nname", b"a")])
async def test_a_line_break_in_a_reply_header_smuggles_nothing(socket_dir: Path, header: tuple[bytes, bytes]) -> None:
    app = Unruly(start(header), body(b"x"))
    async with running_workers(socket_dir, 2, lambda: make_app(Route("/x", app))) as (here, there):
        seen = await outcome(here, owned_cookie(there.worker_id))
    assert seen is None or seen[0] in {500, 502}


@pytest.mark.promise("client-leaves")
async def test_a_client_that_leaves_while_a_busy_owner_is_waited_for_leaves_nothing_behind(socket_dir: Path) -> None:
    path = worker_socket_path(socket_dir, "f" * 32)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as waiting:
        listening.bind(str(path))
        listening.listen(0)
        waiting.connect(str(path))
        async with running_workers(socket_dir, 1) as (worker,):
            before = open_descriptors()
            async with await worker.connect() as connection:
                connection.send_head("GET", "/x", [("host", "h"), ("cookie", owned_cookie("f" * 32))])
                while open_descriptors() < before + 3:  # noqa: ASYNC110, a descriptor has no event
                    await asyncio.sleep(0.01)
            while open_descriptors() > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_no_request_waits_until_a_way_to_its_owner_is_imported(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in IMPORTED_LATE:
        package, _, name = module.__name__.rpartition(".")
        # The package's own name for it is put back with the test's end.
        monkeypatch.setattr(f"{package}.{name}", module)
        monkeypatch.delitem(sys.modules, module.__name__)

    async with running_workers(socket_dir, 1):
        assert {module.__name__ for module in IMPORTED_LATE} <= set(sys.modules)
