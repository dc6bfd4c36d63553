"""Sessions of MCP clients on a server with several workers: they keep a token, and no cookie."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from nemo_gym.global_config import load_global_config
from nemo_gym.paths import EXTRA_ROOTS_ENV
from tests.e2e.mcp.episodes import Target, episode, token_payload
from tests.e2e.session_routing.processes import HERE, Folders, Servers, client_connections, deployed, until

SESSIONS = 200
FEW = 3
"""What may come and go while hundreds of requests leave nothing."""
TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
NAMES = ("counter", "jsonrpc_counter", "mcp_probe")
GONE = "The worker that held this session is no longer running; its state is lost. Start a new session."

Answer = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
async def exposed(folders: Folders) -> AsyncIterator[Servers]:
    """The counter on four workers and on two, and the probe of MCP calls on two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EXTRA_ROOTS_ENV, str(HERE.parent / "mcp" / "components"))
        config = load_global_config([HERE / "test_mcp_sessions.yaml"], working_dir=folders.work)
        async with deployed(config, folders.work) as servers:
            for name in NAMES:
                await servers.all_workers(name)
            yield servers


class TokenSession:
    """An episode whose client keeps the token only; each request goes over a connection of its own."""

    def __init__(self, url: str, number: int = 0) -> None:
        self.url = url
        self.number = number
        self.token = ""

    async def seed(self) -> None:
        async with one_connection() as client:
            async with client.post(f"{self.url}/seed_session", json={"initial_count": self.number}) as reply:
                assert reply.status == 200
                self.token = (await reply.json())["mcp"]["headers"][TOKEN_HEADER]

    @property
    def owner(self) -> str:
        owner: str = token_payload(self.token)["nemo_gym_worker"]
        return owner

    @property
    def target(self) -> Target:
        return Target(f"{self.url}/mcp", {TOKEN_HEADER: self.token})

    async def call(self, tool: str, **arguments: Any) -> Answer:
        return await post(self.target, call_of(tool, **arguments))

    async def count(self) -> int:
        return count_in(await self.call("get_counter_value"))

    async def play(self) -> None:
        for count in (1, 2):
            status, _, body = await self.call("increment_counter", count=count)
            assert (status, body["result"]["isError"]) == (200, False)


def call_of(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


async def post(target: Target, message: dict[str, Any]) -> Answer:
    """Post a JSON-RPC message and return the reply's status, headers and body."""
    headers = {"Accept": "application/json, text/event-stream", **target.headers}
    async with one_connection() as client, client.post(target.url, json=message, headers=headers) as reply:
        assert "set-cookie" not in reply.headers
        return reply.status, {name.lower(): value for name, value in reply.headers.items()}, await reply.json()


def count_in(reply: Answer) -> int:
    status, _, body = reply
    assert status == 200, body
    (content,) = body["result"]["content"]
    count: int = json.loads(content["text"])["count"]
    return count


def one_connection() -> aiohttp.ClientSession:
    limit = aiohttp.ClientTimeout(total=60)
    return aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(force_close=True), timeout=limit
    )


async def seeded(url: str, count: int) -> list[TokenSession]:
    sessions = [TokenSession(url, number) for number in range(count)]
    await asyncio.gather(*(session.seed() for session in sessions))
    return sessions


def hops_received(worker: psutil.Process, worker_id: str) -> int:
    """Return how many connections of other workers are open on a worker's private socket."""
    connections = worker.net_connections(kind="unix")
    return sum(isinstance(it.laddr, str) and it.laddr.endswith(worker_id) for it in connections) - 1


@pytest.mark.promise("mcp-token", "reaches-its-owner")
async def test_every_session_is_right_whichever_workers_accept_its_requests(exposed: Servers) -> None:
    workers = await exposed.all_workers("counter")
    sessions = await seeded(exposed.url("counter"), SESSIONS)
    owners = {session.owner for session in sessions}
    assert len(owners) > 1
    assert owners <= workers.keys()
    await asyncio.gather(*(session.play() for session in sessions))
    # The owners were reached from other workers: that is where the connections to them come from.
    assert min(hops_received(workers[owner], owner) for owner in owners) > 0
    counts = await asyncio.gather(*(session.count() for session in sessions))
    assert counts == [session.number + 3 for session in sessions]


@pytest.mark.promise("mcp-token")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_official_clients_all_at_once_find_their_sessions(exposed: Servers, mode: str) -> None:
    sessions = await seeded(exposed.url("counter"), 20)

    async def play(session: TokenSession) -> Any:
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(headers={TOKEN_HEADER: session.token}, limits=limits, timeout=60) as http:
            async with Client(streamable_http_client(f"{session.url}/mcp", http_client=http), mode=mode) as client:
                for count in (1, 2):
                    await client.call_tool("increment_counter", {"count": count})
                result = await client.call_tool("get_counter_value")
                return json.loads(result.content[0].text)["count"]  # type: ignore[union-attr]

    assert await asyncio.gather(*map(play, sessions)) == [session.number + 3 for session in sessions]


@pytest.mark.promise("gone-is-410", "jsonrpc-errors", "jsonrpc-only")
@pytest.mark.parametrize("name", ["counter", "jsonrpc_counter"])
async def test_a_killed_worker_takes_its_own_sessions_with_it_and_no_others(exposed: Servers, name: str) -> None:
    workers = await exposed.all_workers(name)
    sessions = await seeded(exposed.url(name), 60)
    await asyncio.gather(*(session.play() for session in sessions))
    victim = sessions[0].owner
    assert {session.owner for session in sessions} > {victim}
    workers[victim].kill()
    await until(lambda: not psutil.pid_exists(workers[victim].pid))
    replies = await asyncio.gather(*(session.call("get_counter_value") for session in sessions))
    for session, reply in zip(sessions, replies, strict=True):
        if session.owner != victim:
            assert count_in(reply) == session.number + 3
        elif name == "counter":
            assert_lost(reply, status=410)
        else:
            assert_lost(reply, status=200)


def assert_lost(reply: Answer, *, status: int) -> None:
    got, headers, body = reply
    assert got == status, body
    assert headers["x-nemo-gym-session-lost"] == "worker_gone"
    if status == 200:
        assert (body["jsonrpc"], body["id"], body["error"]["code"]) == ("2.0", 7, -32010)
        body = {"detail": body["error"]["message"], **body["error"]["data"]}
    assert body["detail"].startswith(GONE)
    assert (body["reason"], body["new_session_may_be_seeded"]) == ("worker_gone", True)


@pytest.mark.promise("nothing-left-behind")
async def test_bare_requests_leave_nothing_behind(exposed: Servers) -> None:
    """Neither sessions nor tasks nor descriptors, and no memory that grows with their number."""
    url = exposed.url("mcp_probe")
    session = TokenSession(url)
    await session.seed()
    answers = {"GET": 405, "HEAD": 405, "OPTIONS": 204, "DELETE": 204}
    held = {"Mcp-Session-Id": "0" * 32}
    variants = list(itertools.product(answers, ({}, session.target.headers), ({}, held), ("/mcp", "/mcp/")))

    async def send(client: aiohttp.ClientSession, method: str, token: Any, mcp_session: Any, path: str) -> None:
        async with client.request(method, url + path, headers={**token, **mcp_session}) as reply:
            assert reply.status == answers[method]
            assert reply.headers.keys().isdisjoint({"Set-Cookie", "Mcp-Session-Id"})
            assert await reply.read() == b""

    async def send_all(times: int) -> None:
        async with one_connection() as client:
            for _ in range(times):
                await asyncio.gather(*(send(client, *variant) for variant in variants))
        await until(lambda: sum(map(client_connections, workers.values())) == 0)

    workers = await exposed.all_workers("mcp_probe")
    await send_all(2)
    before = {worker_id: held_by(worker) for worker_id, worker in workers.items()}
    tasks = await tasks_of(exposed)
    await send_all(20)
    after = {worker_id: held_by(worker) for worker_id, worker in workers.items()}
    for worker_id, (descriptors, memory) in after.items():
        assert descriptors <= before[worker_id][0] + FEW
        assert memory - before[worker_id][1] < 8 * 2**20
    assert max(await tasks_of(exposed)) <= max(tasks) + FEW
    assert (await session.call("add", amount=1))[0] == 200


def held_by(worker: psutil.Process) -> tuple[int, int]:
    """Return a process's descriptors, without the connections kept open between workers, and its bytes of memory."""
    return worker.num_fds() - len(worker.net_connections(kind="unix")), worker.memory_info().rss


async def tasks_of(servers: Servers) -> list[int]:
    async with one_connection() as client:
        counts = []
        for _ in range(40):
            async with client.get(f"{servers.url('mcp_probe')}/worker") as reply:
                counts.append((await reply.json())["tasks"])
        return counts


@pytest.mark.promise("client-leaves")
async def test_a_client_that_leaves_in_the_middle_of_a_call_ends_it_on_its_owner(exposed: Servers) -> None:
    async with episode(exposed, "mcp_probe") as session, asyncio.timeout(60):
        workers = exposed.workers("mcp_probe").values()
        was_forwarded = False
        for attempt in itertools.count():
            label = f"call {attempt}"
            waiting = asyncio.create_task(post(session.target, call_of("wait", label=label, seconds=600)))
            await session.until_written(f"{label} began")
            # The connections of the requests before are on their way out.
            await until(lambda: sum(map(client_connections, workers)) == 1)
            was_forwarded = client_connections(session.owning_process) == 0
            waiting.cancel()
            await asyncio.wait({waiting})
            await session.until_written(f"{label} was cancelled")
            if was_forwarded:
                break
