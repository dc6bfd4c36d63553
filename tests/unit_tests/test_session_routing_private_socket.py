"""What comes over a private socket: from another worker, or straight from a client of this machine and user."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from nemo_gym.session_routing import SESSION_LOST_HEADER, frame_hop, worker_socket_path
from tests.owner_ends import BODY, HEAD, LAST, frame, frames_of, take_request
from tests.session_workers import Connection, Reply, Worker, fake_owner, owned_cookie, running_workers

ORIGIN = ("x-nemo-gym-forwarded-client", '[["203.0.113.9",1],["gym.test",443],"https","","1.1"]')
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


REQUEST = b'[null,null,"http","","1.1"]\nGET\n/%c3%a9\na=1\nhost\nx'


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
