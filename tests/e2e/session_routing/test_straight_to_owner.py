"""Our own client and servers with several workers: straight to the owner, in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from omegaconf import OmegaConf

from nemo_gym.global_config import load_global_config
from nemo_gym.server.client import ServerClient, close_client, get_response_json, raise_for_status
from tests.e2e.session_routing.clients import Client
from tests.e2e.session_routing.processes import (
    HERE,
    Folders,
    Servers,
    client_connections,
    deployed,
    is_frozen,
    is_over,
    private_connections,
    until,
)

SESSIONS = 60
MANY_SESSIONS = 400
AT_ONCE = 16


def client_of(servers: Servers, name: str, **options: Any) -> ServerClient:
    address = urlsplit(servers.url(name))
    inner = {"entrypoint": "app.py", "host": address.hostname, "port": address.port}
    return ServerClient.from_config(OmegaConf.create({name: {"resources_servers": {"it": inner}}}), **options)


@pytest.fixture(autouse=True)
async def closed_client() -> AsyncIterator[None]:
    yield
    await close_client()


class Session:
    """A session of the probe or the counter, called by our own client."""

    def __init__(self, client: ServerClient, server: str) -> None:
        self._client, self._server = client, server
        self.cookies: dict[str, str] = {}

    async def post(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        reply = await self._client.post(self._server, path, cookies=self.cookies, **kwargs)
        self.cookies.update({name: morsel.value for name, morsel in reply.cookies.items()})
        return reply.status, await get_response_json(reply)

    @property
    def owner(self) -> str:
        ((_, value),) = self.cookies.items()
        owner: str = json.loads(base64.b64decode(value.partition(".")[0]))["nemo_gym_worker"]
        return owner


@asynccontextmanager
async def sessions_of(servers: Servers, name: str, count: int, seed: dict[str, Any], **options: Any) -> Any:
    """Begin sessions by connections that are closed again, so that later ones can be told from them."""
    client = client_of(servers, name, **options)
    sessions = [Session(client, name) for _ in range(count)]
    replies = await asyncio.gather(*(session.post("/seed_session", json=seed) for session in sessions))
    assert {status for status, _ in replies} == {200}
    await close_client()
    workers = await servers.all_workers(name)
    await until(lambda: connections_to(workers) == 0)
    yield sessions, workers


def connections_to(workers: dict[str, psutil.Process]) -> int:
    return sum(map(client_connections, workers.values()))


@pytest.fixture
def thawed() -> Iterator[list[psutil.Process]]:
    frozen: list[psutil.Process] = []
    yield frozen
    for worker in frozen:
        worker.resume()


@pytest.mark.promise("straight-to-owner", "reaches-its-owner")
async def test_requests_of_sessions_use_no_connection_of_the_shared_port(servers: Servers) -> None:
    async with sessions_of(servers, "counter", SESSIONS, {"initial_count": 10}) as (sessions, workers):
        assert len({session.owner for session in sessions}) > 1
        counts = [
            await asyncio.gather(*(session.post("/increment_counter", json={"count": 2}) for session in sessions))
            for _ in range(3)
        ]
        assert connections_to(workers) == 0
        final = await asyncio.gather(*(session.post("/get_counter_value", json={}) for session in sessions))
    assert {status for replies in counts for status, _ in replies} == {200}
    assert final == [(200, {"count": 16})] * SESSIONS


@pytest.fixture(scope="module")
async def placing(folders: Folders) -> AsyncIterator[Servers]:
    config = load_global_config([HERE / "placement.yaml"], working_dir=folders.work)
    async with deployed(config, folders.work) as servers:
        for name in ("placing_probe", "local_counter"):
            await servers.all_workers(name)
        yield servers


async def routing_of(folders: Folders, worker: str) -> dict[str, int]:
    """What a worker's router has done so far."""
    (path,) = folders.sockets.glob(f"*/{worker}")
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.get("http://localhost/routing") as reply,
    ):
        done: dict[str, int] = await reply.json()
        return done


@pytest.mark.promise("straight-begins", "placement-even")
@pytest.mark.parametrize("at_once", [1, AT_ONCE])
async def test_sessions_begin_evenly_and_none_is_passed_on(placing: Servers, folders: Folders, at_once: int) -> None:
    workers = await placing.all_workers("placing_probe")
    client = client_of(placing, "placing_probe")
    before = {worker: await routing_of(folders, worker) for worker in workers}
    sessions = [Session(client, "placing_probe") for _ in range(MANY_SESSIONS)]
    turn = asyncio.Semaphore(at_once)

    async def begin(session: Session) -> None:
        async with turn:
            assert (await session.post("/seed_session", json={"number": 3}))[0] == 200

    await asyncio.gather(*map(begin, sessions))
    assert connections_to(workers) == 0
    begun = Counter(session.owner for session in sessions)
    assert begun.keys() == workers.keys()
    assert max(begun.values()) < 1.25 * min(begun.values())
    for worker in workers:
        done = await routing_of(folders, worker)
        assert done["forwarded"] == before[worker]["forwarded"]
        assert done["sessions_held"] - before[worker]["sessions_held"] > 0
    answers = await asyncio.gather(*(session.post("/add?amount=1") for session in sessions[:SESSIONS]))
    assert [(status, reply["number"]) for status, reply in answers] == [(200, 4)] * SESSIONS


@pytest.mark.promise("straight-begins-else-by-the-port")
async def test_with_local_placement_sessions_begin_by_the_port(placing: Servers) -> None:
    workers = await placing.all_workers("local_counter")
    session = Session(client_of(placing, "local_counter"), "local_counter")
    assert (await session.post("/seed_session", json={"initial_count": 1}))[0] == 200
    assert connections_to(workers) == 1
    assert await session.post("/get_counter_value", json={}) == (200, {"count": 1})


@pytest.mark.promise("straight-to-owner", "agent-sessions")
async def test_an_agent_calls_itself_by_its_own_socket(servers: Servers) -> None:
    workers = await servers.all_workers("notebook_agent")
    client = Client(servers.url("notebook_agent"))
    try:
        reply = await client.post("/run", responses_create_params={"input": "one two"})
    finally:
        await client.close()
    assert reply.json()["reward"] == 2.0
    port = urlsplit(servers.url("notebook_agent")).port
    calls = [one for worker in workers.values() for one in worker.net_connections("tcp") if one.raddr]
    assert [one for one in calls if one.raddr.port == port] == []


@pytest.mark.promise("straight-only-a-way")
async def test_switched_off_they_do(servers: Servers) -> None:
    async with sessions_of(servers, "counter", 8, {"initial_count": 1}, straight_to_owner=False) as (sessions, workers):
        replies = await asyncio.gather(*(session.post("/get_counter_value", json={}) for session in sessions))
        assert connections_to(workers) > 0
    assert replies == [(200, {"count": 1})] * 8


@pytest.mark.promise("straight-only-a-way", "bad-input")
async def test_wrong_forged_and_foreign_names_open_no_session(servers: Servers) -> None:
    async with sessions_of(servers, "counter", 2, {"initial_count": 5}) as ((mine, other), workers):
        ((name, value),) = mine.cookies.items()
        payload, date, signature = value.split(".")
        foreign = client_of(servers, "counter_on_eight")
        reply = await foreign.post("counter_on_eight", "/seed_session", json={"initial_count": 7})
        await raise_for_status(reply)
        ((_, of_eight),) = ((key, morsel.value) for key, morsel in reply.cookies.items())
        for cookie in (
            f"{payload}.{date}.{signature[::-1]}",
            f"{other.cookies[name].partition('.')[0]}.{date}.{signature}",
            of_eight,
            of_eight.partition(".")[0] + f".{date}.{signature}",
            base64.b64encode(json.dumps({"nemo_gym_worker": "../counter"}).encode()).decode() + f".{date}.{signature}",
            value[:20],
        ):
            thief = Session(client_of(servers, "counter"), "counter")
            thief.cookies[name] = cookie
            status, answer = await thief.post("/get_counter_value", json={})
            assert (status, answer.get("count")) != (200, 5), cookie
        assert await mine.post("/get_counter_value", json={}) == (200, {"count": 5})
        assert workers.keys() == (await servers.all_workers("counter")).keys()


@pytest.mark.promise("straight-fails-as-by-the-port", "busy-is-not-gone")
async def test_a_frozen_owner_is_waited_for(probes: Servers, thawed: list[psutil.Process]) -> None:
    async with sessions_of(probes, "probe", 16, {"number": 40}) as (sessions, workers):
        session = sessions[0]
        owner = workers[session.owner]
        others = [one for one in sessions if one.owner != session.owner]
        assert others
        owner.suspend()
        thawed.append(owner)
        await until(lambda: is_frozen(owner))
        waiting = asyncio.create_task(session.post("/add?amount=2"))
        for other in others:
            assert (await other.post("/add?amount=1"))[0] == 200
        assert not waiting.done()
        owner.resume()
        assert await waiting == (200, {"number": 42, "pid": owner.pid})
        assert connections_to(workers) == 0


@pytest.mark.promise("straight-fails-as-by-the-port", "died-after-taking", "gone-is-410")
async def test_an_owner_that_is_killed_in_mid_call_is_410(probes: Servers) -> None:
    async with sessions_of(probes, "probe", 1, {"number": 40}) as ((session,), workers):
        owner = workers[session.owner]
        before = private_connections(owner, session.owner)
        dying = [session.post("/upload?pause=600", data=b"x" * size) for size in (10, 20_000_000)]
        answers = asyncio.gather(*dying)
        await until(lambda: private_connections(owner, session.owner) == before + 2)
        assert connections_to(workers) == 0
        owner.kill()
        for status, answer in await answers:
            assert (status, answer["reason"], answer["may_have_run"]) == (410, "worker_gone", True)
        await until(lambda: is_over(owner))
        status, answer = await session.post("/add?amount=1")
        assert (status, answer["reason"], answer["may_have_run"]) == (410, "worker_gone", False)
    await probes.all_workers("probe")
