"""What comes over a private socket: from another worker, or straight from a client of this machine and user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import psutil
import pytest

from nemo_gym.session_routing import SESSION_LOST_HEADER, frame_hop, worker_socket_path
from tests.owner_ends import BODY, HEAD, LAST, frame, frames_of, take_request
from tests.session_workers import Connection, Reply, Worker, fake_owner, owned_cookie, running_workers, signed_cookie

ORIGIN = ("x-nemo-gym-forwarded-client", '[["203.0.113.9",1],["gym.test",443],"https","","1.1",false,null]')
OWNED = (ORIGIN[0], ORIGIN[1].replace("false", "true"))
GONE = "a" * 32


async def ask_privately(worker: Worker, *headers: tuple[str, str], path: str = "/x") -> Reply:
    """Return the reply to one request sent to a worker's private socket."""
    async with Connection(*await asyncio.open_unix_connection(socket_of(worker))) as connection:
        connection.send_head("GET", path, list(headers))
        return await connection.reply()


@pytest.mark.promise("private-is-here")
@pytest.mark.parametrize("last", [False, True])
async def test_what_another_worker_forwards_is_served_here_whatever_its_cookie_says(
    pair: tuple[Worker, Worker], last: bool
) -> None:
    there = pair[1]
    before = there.router.statistics()
    cookie = owned_cookie(GONE)
    headers = [("host", "x"), ("cookie", cookie)]
    headers.insert(len(headers) if last else 0, ORIGIN)
    reply = await ask_privately(there, *headers)
    seen = reply.json()
    assert (seen["worker"], seen["headers"]) == (there.worker_id, [["host", "x"], ["cookie", cookie]])
    assert (seen["client"], seen["server"], seen["scheme"]) == (["203.0.113.9", 1], ["gym.test", 443], "https")
    assert not {"date", "server"} & {name for name, _ in reply.headers}
    after = there.router.statistics()
    assert (after.arrived, after.forwarded) == (before.arrived + 1, before.forwarded)


@pytest.mark.promise("private-is-here")
class TestSentForItsSession:
    """Of the two workers one has then misread the request, and to serve it might be with a fresh empty state."""

    async def test_it_is_served_by_the_worker_that_it_names(self, pair: tuple[Worker, Worker]) -> None:
        there = pair[1]
        reply = await ask_privately(there, OWNED, ("cookie", owned_cookie(there.worker_id)))
        assert reply.json()["worker"] == there.worker_id

    async def test_it_is_refused_where_it_names_another_or_none(
        self, pair: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture
    ) -> None:
        there = pair[1]
        before = there.router.statistics().served_here
        for cookies in ([], [owned_cookie(GONE)], [signed_cookie({"id": "a"})], ["sid=forged"]):
            reply = await ask_privately(there, OWNED, *(("cookie", cookie) for cookie in cookies))
            assert (reply.status, reply.all("set-cookie")) == (500, [])
            assert "nothing was run" in reply.json()["detail"]
        assert there.router.statistics().served_here == before
        assert "came as this worker's" in caplog.text

    async def test_it_is_refused_in_frames_too(self, pair: tuple[Worker, Worker]) -> None:
        reader, writer = await asyncio.open_unix_connection(socket_of(pair[1]))
        writer.write(frame(HEAD | LAST, REQUEST.replace(b"false", b"true")))
        assert (await read_frame(reader))[1].startswith(b"500\n")
        writer.close()


@pytest.mark.promise("private-header")
@pytest.mark.parametrize(
    "value",
    [
        "garbage", "[1]", "{}", "5", "", '[5,null,"http","","1.1",false,null]',
        '[null,null,"http","","1.1",false,7]', '[null,null,"http","","1.1",false,["a",""]]',
    ],
)  # fmt: skip
async def test_a_private_header_that_no_worker_wrote_is_a_bad_request(
    pair: tuple[Worker, Worker], value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await ask_privately(pair[1], (ORIGIN[0], value))).status == 400
    assert not caplog.records


@pytest.mark.promise("private-straight")
class TestStraightFromAClient:
    async def test_its_owner_serves_it_and_nothing_is_forwarded(self, pair: tuple[Worker, Worker]) -> None:
        there = pair[1]
        before = there.router.statistics()
        reply = await ask_privately(there, ("host", "x"), ("cookie", owned_cookie(there.worker_id)))
        after = there.router.statistics()
        assert reply.json()["worker"] == there.worker_id
        assert (after.served_here, after.arrived) == (before.served_here + 1, before.arrived)

    async def test_one_sent_to_the_wrong_worker_is_forwarded_once(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        forwarded, arrived = here.router.statistics().forwarded, there.router.statistics().arrived
        reply = await ask_privately(here, ("host", "x:1"), ("cookie", owned_cookie(there.worker_id)))
        seen = reply.json()
        assert (seen["worker"], seen["client"], seen["server"]) == (there.worker_id, ["127.0.0.1", 0], ["x", 1])
        assert here.router.statistics().forwarded == forwarded + 1
        assert there.router.statistics().arrived == arrived + 1

    async def test_a_lost_session_is_refused(self, pair: tuple[Worker, Worker]) -> None:
        reply = await ask_privately(pair[0], ("host", "x"), ("cookie", owned_cookie(GONE)))
        assert (reply.status, reply.all(SESSION_LOST_HEADER)) == (410, ["worker_gone"])

    async def test_a_forged_cookie_changes_nothing(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        forged = owned_cookie(there.worker_id, secret="guessed")
        assert (await ask_privately(here, ("host", "x"), ("cookie", forged))).json()["worker"] == here.worker_id

    @pytest.mark.parametrize(
        ("host", "server"),
        [
            ("127.0.0.1:8000", ["127.0.0.1", 8000]),
            ("gym.test", ["gym.test", 80]),
            ("[::1]:99", ["::1", 99]),
            ("gym.test:port", []),
            ("gym.test:99999", []),
            ("[broken", []),
            ("", []),
            ("\xff:1", []),
            (None, []),
        ],
    )
    async def test_looks_like_a_request_of_the_shared_port(
        self, pair: tuple[Worker, Worker], host: str | None, server: list[object]
    ) -> None:
        headers = [] if host is None else [("host", host)]
        seen = (await ask_privately(pair[0], *headers, ("x-latin", "\xe9\xff"), path="/a%2fb?c")).json()
        assert (seen["client"], seen["server"], seen["scheme"]) == (["127.0.0.1", 0], server, "http")
        assert seen["headers"] == [*(["host", host] for _ in headers), ["x-latin", "\xe9\xff"]]
        assert (seen["raw_path"], seen["query"], seen["root_path"]) == ("/a%2fb", "c", "")


REQUEST = b'[null,null,"http","","1.1",false,null]\nGET\n/%c3%a9\na=1\nhost\nx'


class TestFrames:
    @pytest.mark.promise("private-is-here")
    async def test_requests_follow_one_another_on_a_connection_however_they_are_cut(
        self, pair: tuple[Worker, Worker]
    ) -> None:
        here = pair[0]
        request = frame(HEAD, REQUEST) + frame(BODY, b"ab") + frame(BODY) + frame(BODY | LAST, b"c")
        reader, writer = await asyncio.open_unix_connection(socket_of(here))
        for size in (1, 7, 9, 1_000):
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            flags, head = await read_frame(reader)
            assert (flags, head.split(b"\n")[0]) == (HEAD, b"200")
            flags, body = await read_frame(reader)
            seen = json.loads(body)
            assert flags == BODY | LAST
            assert (seen["raw_path"], seen["path"], seen["query"], seen["body"]) == ("/%c3%a9", "/\xe9", "a=1", "YWJj")
            assert (seen["headers"], seen["client"], seen["worker"]) == ([["host", "x"]], [], here.worker_id)
        writer.close()

    async def test_nonsense_ends_its_connection_and_no_other(self, pair: tuple[Worker, Worker]) -> None:
        here = pair[0]
        for nonsense in (
            frame(HEAD, b""), frame(HEAD | LAST, b"[]\nGET\n/"), frame(HEAD | LAST, b"[]\nGET\n/\n"),
            frame(HEAD, b"no\nGET\n/\n"), frame(HEAD, REQUEST + b"\nname"), frame(HEAD, REQUEST) * 2,
            frame(HEAD, REQUEST) + frame(16), frame(HEAD, REQUEST) + frame(7, b"x"),
            frame(HEAD | LAST, REQUEST) + frame(BODY, b"x"), frame(HEAD)[:1] + b"\xff" * 8,
        ):  # fmt: skip
            reader, writer = await asyncio.open_unix_connection(socket_of(here))
            writer.write(nonsense)
            with contextlib.suppress(ConnectionResetError):
                rest = await asyncio.wait_for(reader.read(), 5)
                assert all(flags & (HEAD | BODY) for flags, _ in frames_of(rest))
            writer.close()
        assert (await here.request("/health")).status == 200

    @pytest.mark.promise("nothing-left-behind")
    async def test_a_connection_that_was_idle_for_long_is_closed_by_the_side_that_made_it(
        self, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frame_hop, "_IDLE_S", 0.01)
        ended = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (await take_request(reader, writer)).answer()
            assert await reader.read() == b""
            ended.set()
            writer.close()

        async with running_workers(socket_dir, 1, hop="frames") as (worker,), fake_owner(socket_dir, answer) as cookie:
            assert (await worker.request("/x", cookie=cookie)).body == b"ok"
            await asyncio.wait_for(ended.wait(), 5)


def socket_of(worker: Worker) -> Path:
    return worker_socket_path(worker.router.socket_dir, worker.worker_id)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    prefix = await reader.readexactly(9)
    return prefix[0], await reader.readexactly(int.from_bytes(prefix[1:]))


@pytest.mark.promise("gone-is-410")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_process_keeps_no_socket_of_the_hop(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    cookie = owned_cookie(there.worker_id)
    async with Connection(*await asyncio.open_unix_connection(socket_of(there))) as straight:
        assert (await here.request("/x", cookie=cookie)).json()["worker"] == there.worker_id
        child = os.fork()
        if not child:
            ends = repr(psutil.Process(os.getpid()).net_connections("unix"))
            os._exit(here.worker_id in ends or there.worker_id in ends)

        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        # Here all of them are as they were.
        straight.send_head("GET", "/x", [("host", "x")])
        assert (await straight.reply()).json()["worker"] == there.worker_id
        assert (await here.request("/x", cookie=cookie)).json()["worker"] == there.worker_id
