"""New sessions begin at the least loaded worker, whoever accepts them."""

from __future__ import annotations

import asyncio
import base64
import heapq
import json
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from random import Random
from typing import Any

import aiohttp
import psutil
import pytest

from nemo_gym.global_config import load_global_config
from nemo_gym.session_routing.loads import SharedLoads
from tests.e2e.session_routing.clients import EMPTY_RESPONSE, Client, CounterSession, reward_of
from tests.e2e.session_routing.processes import HERE, Folders, Servers, deployed, until

SESSIONS = 400


@pytest.fixture(scope="module")
async def placing(folders: Folders) -> AsyncIterator[Servers]:
    config = load_global_config([HERE / "placement.yaml"], working_dir=folders.work)
    async with deployed(config, folders.work) as servers:
        for name in ("counter", "stopping_probe", "local_counter"):
            await servers.all_workers(name)
        yield servers


def loads(folders: Folders, worker: str) -> dict[str, int]:
    """What a worker and its fellows are loaded with, read as another worker would."""
    (socket,) = folders.sockets.glob(f"*/{worker}")
    with closing(SharedLoads(socket.parent / "loads", uuid.uuid4().hex)) as seen:
        seen.leave()
        return seen.snapshot()


def is_accepting(worker: psutil.Process) -> bool:
    """Whether a worker takes connections to the server's port."""
    return any(one.status == psutil.CONN_LISTEN for one in worker.net_connections(kind="tcp"))


def assert_counted(held: dict[str, int], owners: Iterable[str | None]) -> None:
    """Each worker holds the sessions that name it, but for the few that share a mark with another one."""
    named = Counter(owners)
    assert held.keys() >= named.keys()
    for worker, count in held.items():
        assert named[worker] - 3 <= count <= named[worker]


def ratio(counts: Iterable[int]) -> float:
    """The most to the least of four."""
    each = list(counts)
    assert len(each) == 4
    return max(each) / min(each)


@asynccontextmanager
async def sessions_of(servers: Servers, number: int = SESSIONS) -> AsyncIterator[list[CounterSession]]:
    """Sessions that are still to begin."""
    sessions = [CounterSession(servers.url("counter"), index) for index in range(1, number + 1)]
    try:
        yield sessions
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


async def assert_right(session: CounterSession) -> None:
    await session.play()
    assert reward_of(await session.verify()) == 1.0


@pytest.mark.promise("placement-even", "placement-counts")
async def test_sessions_of_one_kept_connection(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("counter")))
    connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=60)
    url = placing.url("counter")
    async with aiohttp.ClientSession(url, cookie_jar=aiohttp.DummyCookieJar(), connector=connector) as http:

        async def post(path: str, cookies: dict[str, str], **body: Any) -> tuple[dict[str, str], Any]:
            async with http.post(path, json=body, cookies=cookies) as reply:
                assert reply.status == 200
                return {name: morsel.value for name, morsel in reply.cookies.items()}, await reply.json()

        begun = [(await post("/seed_session", {}, initial_count=1))[0] for _ in range(SESSIONS)]
        held = loads(folders, worker)
        verdict = {"responses_create_params": {"input": "count"}, "response": EMPTY_RESPONSE, "expected_count": 1}
        verdicts = [await post("/verify", cookies, **verdict) for cookies in begun]

    assert [reply["reward"] for _, reply in verdicts] == [1.0] * SESSIONS
    assert SESSIONS - 3 <= sum(held.values()) <= SESSIONS
    assert ratio(held.values()) < 1.25
    assert set(loads(folders, worker).values()) == {0}


@pytest.mark.promise("placement-even", "placement-counts")
async def test_sessions_of_as_many_connections_at_once(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("counter")))
    async with sessions_of(placing) as sessions:
        await asyncio.gather(*(session.seed() for session in sessions))

        owners = Counter(session.owner for session in sessions)
        assert ratio(owners.values()) < 1.25
        assert_counted(loads(folders, worker), owners.elements())
        await asyncio.gather(*map(assert_right, sessions))
    assert set(loads(folders, worker).values()) == {0}


class RawConnection:
    """A connection whose requests go out at once, without a client's own work for each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.cookie = ""

    def send(self, path: str, **body: Any) -> None:
        content = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncookie: {self.cookie}\r\ncontent-length: {len(content)}\r\n"
        self.writer.write(f"{head}content-type: application/json\r\n\r\n{content}".encode())

    async def reply(self) -> Any:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        self.cookie = headers.get("set-cookie", self.cookie).partition(";")[0]
        return json.loads(await self.reader.readexactly(int(headers["content-length"])))


@pytest.mark.promise("placement-even")
async def test_bursts_over_connections_that_stand(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("counter")))
    port = int(placing.url("counter").rpartition(":")[2])
    verdict = {"responses_create_params": {"input": "count"}, "response": EMPTY_RESPONSE, "expected_count": 1}
    ratios = []
    async with AsyncExitStack() as stack:
        connections = [RawConnection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(SESSIONS)]
        for connection in connections:
            stack.callback(connection.writer.close)
        for _ in range(4):
            for connection in connections:
                connection.cookie = "none=1"
                connection.send("/seed_session", initial_count=1)
            for connection in connections:
                await connection.reply()
            ratios.append(ratio(Counter(owner_of(connection.cookie) for connection in connections).values()))
            for connection in connections:
                connection.send("/verify", **verdict)
            assert {(await connection.reply())["reward"] for connection in connections} == {1.0}
    assert max(ratios) < 1.25
    assert set(loads(folders, worker).values()) == {0}


@pytest.mark.promise("placement-even", "placement-counts")
async def test_sessions_of_uneven_length(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("counter")))
    random = Random(6)
    under_way: list[tuple[float, int, CounterSession]] = []
    ratios = []
    now = 0.0
    async with sessions_of(placing, 600) as sessions:
        for session in sessions:
            if len(under_way) == 240:
                now, _, ending = heapq.heappop(under_way)
                assert reward_of(await ending.verify()) is not None
                ratios.append(ratio(loads(folders, worker).values()))
            await session.seed()
            length = random.choice([1, 2, 5, 10, 30, 100]) * random.uniform(0.8, 1.2)
            heapq.heappush(under_way, (now + length, session.number, session))
        for _, _, session in under_way:
            await session.verify()

    assert max(ratios) < 1.25
    assert set(loads(folders, worker).values()) == {0}


@pytest.mark.promise("placement-counts")
async def test_what_begins_no_session_counts_for_none(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("counter")))
    async with sessions_of(placing, 40) as sessions:
        for session in sessions[:20]:
            assert (await session.post("/seed_session", initial_count="none")).status == 422
        for session in sessions[20:]:
            assert (await session.post("/missing")).status == 404
    assert set(loads(folders, worker).values()) == {0}


@pytest.mark.promise("placement-forgets-the-dead", "placement-never-costs-a-session")
async def test_a_killed_worker_counts_no_longer(placing: Servers, folders: Folders) -> None:
    workers = await placing.all_workers("counter")
    async with sessions_of(placing, 120) as sessions:
        first, later = sessions[:60], sessions[60:]
        await asyncio.gather(*(session.seed() for session in first))
        victim = first[0].owner
        assert victim is not None
        workers[victim].kill()
        survivors = workers.keys() - {victim}
        # Its threads end one by one, and its lock with the last of them.
        await until(lambda: victim not in loads(folders, next(iter(survivors))))

        # Before, while and after another one takes its place.
        for session in later:
            await session.seed()
        now = await placing.all_workers("counter")
        held = loads(folders, next(iter(survivors)))

        assert held.keys() == now.keys()
        assert_counted(held, [session.owner for session in sessions if session.owner != victim])
        for session in sessions:
            if session.owner != victim:
                await assert_right(session)


@pytest.mark.promise("placement-never-costs-a-session")
async def test_replacing_all_workers_leaves_no_count_behind(placing: Servers, folders: Folders) -> None:
    before = await placing.all_workers("counter")
    async with sessions_of(placing, 40) as sessions:
        await asyncio.gather(*(session.seed() for session in sessions))
        placing.main("counter").send_signal(signal.SIGHUP)
        await until(lambda: not before.keys() & placing.workers("counter").keys())
        now = await placing.all_workers("counter")
        assert loads(folders, next(iter(now))) == dict.fromkeys(now, 0)
    async with sessions_of(placing, 80) as sessions:
        await asyncio.gather(*(session.seed() for session in sessions))
        assert ratio(Counter(session.owner for session in sessions).values()) < 1.5
        await asyncio.gather(*map(assert_right, sessions))


@pytest.mark.promise("placement-never-costs-a-session")
async def test_a_worker_that_is_still_finishing_takes_no_new_sessions(placing: Servers, folders: Folders) -> None:
    workers = await placing.all_workers("stopping_probe")
    url = placing.url("stopping_probe")
    async with AsyncExitStack() as stack:

        def new_client() -> Client:
            client = Client(url)
            stack.push_async_callback(client.close)
            return client

        last = new_client()
        await last.post("/seed_session", number=5)
        stopping = last.owner
        assert stopping is not None
        async with last.stream("POST", "/add_slowly?amount=2&seconds=4") as reply:
            assert await reply.content.readline() == b"begun\n"
            workers[stopping].terminate()
            await until(lambda: stopping not in loads(folders, stopping))
            # A connection that it takes in its last moment is closed unread.
            await until(lambda: not is_accepting(workers[stopping]))
            clients = [new_client() for _ in range(30)]
            for client in clients:
                assert (await client.post("/seed_session", number=1)).status == 200
            assert stopping in placing.workers("stopping_probe")
            assert await reply.content.readline() == b"7\n"
    assert stopping not in {client.owner for client in clients}


@pytest.mark.promise("placement-never-costs-a-session")
async def test_after_a_worker_was_taken_away_sessions_begin_at_the_others(placing: Servers, folders: Folders) -> None:
    await placing.all_workers("counter")
    main = placing.main("counter")
    main.send_signal(signal.SIGTTOU)
    await until(lambda: len(placing.workers("counter")) == 3)
    async with sessions_of(placing, 60) as sessions:
        await asyncio.gather(*(session.seed() for session in sessions))
        assert {session.owner for session in sessions} == placing.workers("counter").keys()
        main.send_signal(signal.SIGTTIN)
        await placing.all_workers("counter")
        await asyncio.gather(*map(assert_right, sessions))


@pytest.mark.promise("placement-stays")
async def test_local_placement_shares_no_loads(placing: Servers, folders: Folders) -> None:
    worker = next(iter(await placing.all_workers("local_counter")))
    (socket,) = folders.sockets.glob(f"*/{worker}")
    assert not (socket.parent / "loads").exists()
    connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=60)
    url = placing.url("local_counter")
    owners = set()
    async with aiohttp.ClientSession(url, cookie_jar=aiohttp.DummyCookieJar(), connector=connector) as http:
        for _ in range(50):
            async with http.post("/seed_session", json={"initial_count": 1}) as reply:
                await reply.read()
                owners |= {morsel.value.partition(".")[0] for morsel in reply.cookies.values()}
    assert len({owner_in(cookie) for cookie in owners}) == 1


def owner_of(cookie: str) -> str:
    return owner_in(cookie.partition("=")[2].partition(".")[0])


def owner_in(payload: str) -> str:
    owner: str = json.loads(base64.b64decode(payload))["nemo_gym_worker"]
    return owner
