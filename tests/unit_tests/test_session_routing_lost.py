"""A session is declared lost only when it is, in words and in fields; a busy owner is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    create_socket_dir,
    remove_socket_dir,
    worker_socket_path,
)
from tests.owner_ends import take_request
from tests.session_workers import (
    COOKIE,
    Reply,
    Worker,
    fake_owner,
    leave_stale_socket,
    make_app,
    open_descriptors,
    owned_cookie,
    running_workers,
)

pytestmark = pytest.mark.usefixtures("hop")


@pytest.fixture(scope="module")
def socket_dir() -> Iterator[Path]:
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


@pytest.fixture
def tmp_socket_dir() -> Iterator[Path]:
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


@pytest.fixture(scope="module")
async def worker(socket_dir: Path, hop: str) -> AsyncIterator[Worker]:
    async with running_workers(socket_dir, 1, limit=120) as (worker,):
        yield worker


@pytest.fixture
def gone() -> str:
    """The id of a worker that is lost, or made to be."""
    return uuid.uuid4().hex


def assert_gone(reply: Reply, *, may_have_run: bool = False) -> None:
    assert reply.status == 410
    assert reply.all(SESSION_LOST_HEADER) == ["worker_gone"]
    assert reply.all("set-cookie") == []
    body = reply.json()
    assert body["reason"] == "worker_gone"
    assert body["new_session_may_be_seeded"] is True
    assert body["may_have_run"] is may_have_run
    assert ("may have run" in body["detail"]) is may_have_run
    for words in ("no longer running", "state is lost", "Start a new session"):
        assert words in body["detail"]


@pytest.mark.promise("gone-is-410")
class TestGone:
    async def test_a_worker_that_never_was_or_left_no_socket(self, worker: Worker, gone: str) -> None:
        before = worker.router.statistics().lost
        assert_gone(await worker.request("/count", method="POST", cookie=owned_cookie(gone)))
        assert worker.router.statistics().lost == before + 1

    async def test_a_worker_that_was_shut_down(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir) as (first, second):
            cookie = (await second.request("/seed", method="POST")).cookie
            assert (await first.request("/count", method="POST", cookie=cookie)).status == 200
            await second.stop()
            for _ in range(2):
                assert_gone(await first.request("/count", method="POST", cookie=cookie))
            assert first.router.statistics().open_pools == 0

    @pytest.mark.promise("typed-410")
    async def test_a_worker_that_was_killed_and_left_its_socket(
        self, socket_dir: Path, worker: Worker, gone: str
    ) -> None:
        leave_stale_socket(socket_dir, gone)
        assert_gone(await worker.request("/count", method="POST", body=b"x" * 99_999, cookie=owned_cookie(gone)))

    @pytest.mark.promise("own-sockets-only")
    @pytest.mark.parametrize("kind", ["file", "fifo", "directory", "link to a live socket", "dangling link"])
    async def test_what_is_no_socket_of_ours_is_not_touched(
        self, socket_dir: Path, worker: Worker, kind: str, gone: str
    ) -> None:
        path = worker_socket_path(socket_dir, gone)
        if kind == "file":
            path.write_text("x")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(worker.worker_id if kind == "link to a live socket" else "nowhere")
        assert_gone(await worker.request("/count", method="POST", cookie=owned_cookie(gone)))
        assert worker.router.statistics().arrived == 0

    @pytest.mark.promise("typed-410")
    async def test_a_lost_head_request_has_the_header(self, worker: Worker, gone: str) -> None:
        reply = await worker.request("/x", method="HEAD", cookie=owned_cookie(gone))
        assert (reply.status, reply.all(SESSION_LOST_HEADER)) == (410, ["worker_gone"])

    async def test_the_rest_of_the_sessions_go_on(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir, 3) as (first, second, third):
            cookies = [(await worker.request("/seed", method="POST")).cookie for worker in (first, second, third)]
            await third.stop()
            replies = [await first.request("/count", method="POST", cookie=cookie) for cookie in cookies]
            assert [reply.status for reply in replies] == [200, 200, 410]


class TestDiesAfterItTookTheRequest:
    @pytest.mark.promise("died-after-taking", "typed-410")
    async def test_without_a_reply(self, socket_dir: Path, worker: Worker, gone: str) -> None:
        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await take_request(reader, writer)
            worker_socket_path(socket_dir, gone).unlink()
            writer.close()

        for method in ("GET", "POST"):
            async with fake_owner(socket_dir, die, gone) as cookie:
                reply = await worker.request("/x", method=method, cookie=cookie)
                assert_gone(reply, may_have_run=True)

    @pytest.mark.promise("broken-reply-shows")
    async def test_in_the_middle_of_its_reply(self, socket_dir: Path, worker: Worker) -> None:
        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = await take_request(reader, writer)
            end.begin()
            end.go_on(b"abc")
            await writer.drain()
            writer.close()

        async with fake_owner(socket_dir, die) as cookie:
            reply = await worker.request("/x", cookie=cookie)
        assert (reply.status, reply.body, reply.complete) == (200, b"abc", False)


@pytest.mark.promise("no-reply-is-502", "sent-once")
async def test_an_owner_that_runs_but_closes_the_connection_is_not_gone_and_not_asked_again(
    socket_dir: Path, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        if await reader.read(1):
            asked += 1
        writer.close()

    async with fake_owner(socket_dir, hang_up) as cookie:
        reply = await worker.request("/x", cookie=cookie)
    assert (reply.status, asked) == (502, 1)
    assert reply.all(SESSION_LOST_HEADER) == []
    assert "may have run" in reply.json()["detail"]
    assert "gave no reply" in caplog.text


class TestBusy:
    @pytest.mark.promise("busy-is-not-gone")
    async def test_a_full_backlog_is_waited_for(self, socket_dir: Path, worker: Worker, gone: str) -> None:
        async with full_backlog(worker_socket_path(socket_dir, gone)) as (listening, waiting):
            client = asyncio.create_task(worker.request("/x", cookie=owned_cookie(gone)))
            done, _ = await asyncio.wait([client], timeout=0.3)
            assert not done
            for sock in waiting:
                sock.close()
            async with await asyncio.start_unix_server(answer_if_asked, sock=listening):
                reply = await client
        assert (reply.status, reply.body) == (200, b"ok")

    @pytest.mark.promise("busy-is-not-gone")
    async def test_a_full_backlog_of_a_worker_that_then_dies_is_gone(
        self, socket_dir: Path, worker: Worker, gone: str
    ) -> None:
        async with full_backlog(worker_socket_path(socket_dir, gone)) as (listening, _):
            client = asyncio.create_task(worker.request("/x", cookie=owned_cookie(gone)))
            await asyncio.wait([client], timeout=0.1)
            listening.close()
            assert_gone(await client)

    @pytest.mark.promise("busy-is-not-gone")
    async def test_a_frozen_owner_is_waited_for_until_it_is_replaced(
        self, socket_dir: Path, worker: Worker, gone: str
    ) -> None:
        with listening_socket(worker_socket_path(socket_dir, gone)) as frozen:
            client = asyncio.create_task(worker.request("/x", cookie=owned_cookie(gone)))
            done, _ = await asyncio.wait([client], timeout=0.3)
            assert not done
            frozen.close()
            assert_gone(await client, may_have_run=True)

    @pytest.mark.promise("busy-is-not-gone", "client-leaves")
    async def test_a_frozen_owner_is_waited_for_no_longer_than_the_client_does(
        self, socket_dir: Path, worker: Worker, gone: str
    ) -> None:
        with listening_socket(worker_socket_path(socket_dir, gone)) as frozen:
            async with await worker.connect() as connection:
                connection.send_head("GET", "/x", [("cookie", owned_cookie(gone))])
                accepted, _ = await asyncio.get_running_loop().sock_accept(frozen)
            with accepted:
                accepted.setblocking(False)
                while await asyncio.get_running_loop().sock_recv(accepted, 65_536):
                    pass

    @pytest.mark.promise("no-descriptors-is-503")
    async def test_no_descriptors_left_is_said_as_503(
        self, socket_dir: Path, worker: Worker, caplog: pytest.LogCaptureFixture, gone: str
    ) -> None:
        with listening_socket(worker_socket_path(socket_dir, gone)):
            async with await worker.connect() as connection:
                connection.send_head("GET", "/health", [("host", "h")])
                await connection.reply()
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                try:
                    connection.send_head("GET", "/x", [("cookie", owned_cookie(gone))])
                    reply = await connection.reply()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert reply.status == 503
        assert reply.all(SESSION_LOST_HEADER) == []
        assert "file descriptors" in reply.json()["detail"]
        assert [record.levelno for record in caplog.records if "Too many open files" in record.message] == [
            logging.ERROR
        ]


async def answer_if_asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        (await take_request(reader, writer)).answer(b"ok")
    writer.close()


class listening_socket:  # noqa: N801
    """A Unix socket that listens, and that nobody accepts from."""

    def __init__(self, path: Path, backlog: int = 10) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen(backlog)
        self.socket.setblocking(False)

    def __enter__(self) -> socket.socket:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@asynccontextmanager
async def full_backlog(path: Path) -> AsyncIterator[tuple[socket.socket, list[socket.socket]]]:
    waiting: list[socket.socket] = []
    with listening_socket(path, 0) as listening:
        try:
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(path))
        except BlockingIOError:
            pass
        try:
            yield listening, waiting
        finally:
            for sock in waiting:
                sock.close()


@pytest.mark.promise("nothing-left-behind")
async def test_many_dead_owners_leave_nothing_behind(tmp_socket_dir: Path) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def keep_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            (await take_request(reader, writer)).answer(b"ok")
            await reader.read()
        writer.close()

    async with running_workers(tmp_socket_dir, 1) as (worker,):
        descriptors = open_descriptors()
        for number in range(60):
            worker_id = f"{number:032x}"
            async with fake_owner(tmp_socket_dir, keep_open, worker_id) as cookie:
                assert (await worker.request("/x", cookie=cookie)).body == b"ok"
            if number % 2:
                worker_socket_path(tmp_socket_dir, worker_id).unlink(missing_ok=True)
            assert worker.router.statistics().open_pools == 1
        assert open_descriptors() <= descriptors + 6
        writers[-1].close()
        await writers[-1].wait_closed()
        assert (await worker.request("/x", cookie=cookie)).status == 410
        assert worker.router.statistics().open_pools == 0


@pytest.mark.promise("nothing-left-behind")
async def test_thousands_of_dead_owners_leave_nothing_behind(tmp_socket_dir: Path) -> None:
    async with running_workers(tmp_socket_dir, 1) as (worker,), await worker.connect() as connection:
        connection.send_head("GET", "/health", [("host", "h")])
        await connection.reply()
        descriptors = open_descriptors()
        for number in range(2_000):
            connection.send_head("GET", "/x", [("host", "h"), ("cookie", owned_cookie(f"{number:032x}"))])
            assert (await connection.reply()).status == 410
        assert worker.router.statistics().open_pools == 0
        assert open_descriptors() == descriptors


@pytest.mark.promise("graceful-stop")
async def test_a_worker_that_stops_finishes_the_requests_that_others_forwarded_to_it(socket_dir: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        begun.set()
        await go_on.wait()
        return Response("finished")

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/slow", slow))) as (here, there):
        cookie = owned_cookie(there.worker_id)
        in_flight = asyncio.create_task(here.request("/slow", cookie=cookie))
        await begun.wait()
        stopping = asyncio.create_task(there.stop())
        while (await here.request("/x", cookie=cookie)).status != 410:  # noqa: ASYNC110, a socket has no event
            await asyncio.sleep(0.01)
        go_on.set()
        assert (await in_flight).body == b"finished"
        await stopping


@pytest.mark.promise("graceful-stop")
async def test_a_worker_stops_although_a_forwarded_request_does_not(socket_dir: Path) -> None:
    begun = asyncio.Event()

    async def endless(_: Request) -> Response:
        begun.set()
        await asyncio.Event().wait()
        return Response()

    options: dict[str, Any] = {"grace": 1}
    async with running_workers(socket_dir, 2, lambda: make_app(Route("/endless", endless)), **options) as (here, there):
        in_flight = asyncio.create_task(here.request("/endless", cookie=owned_cookie(there.worker_id)))
        await begun.wait()
        await asyncio.wait_for(there.stop(), 5)
        reply = await in_flight
    assert reply.status in {410, 500}


async def test_an_owner_is_found_again_by_the_cookie_it_set_and_by_nothing_else(worker: Worker) -> None:
    seeded = await worker.request("/seed", method="POST")
    assert seeded.cookie.startswith(f"{COOKIE}=")
    assert (await worker.request("/count", method="POST", cookie=seeded.cookie)).json()["count"] == 1
    assert (await worker.request("/count", method="POST")).json()["count"] == 1
