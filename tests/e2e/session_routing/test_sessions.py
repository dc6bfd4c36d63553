"""Sessions of foreign clients on servers with several workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from tests.e2e.session_routing.clients import Client, CounterSession, Reply, reward_of
from tests.e2e.session_routing.processes import Servers, is_over, until

SESSIONS = 200

T = TypeVar("T")


async def for_each(sessions: list[CounterSession], step: Callable[[CounterSession], Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*(step(session) for session in sessions))


@asynccontextmanager
async def seeded_sessions(url: str, count: int = SESSIONS) -> AsyncIterator[list[CounterSession]]:
    """Seed sessions, all at once, so that the kernel spreads them over the workers."""
    sessions = [CounterSession(url, number) for number in range(1, count + 1)]
    try:
        await for_each(sessions, CounterSession.seed)
        yield sessions
    finally:
        await for_each(sessions, CounterSession.close)


async def rewards_of_all(sessions: list[CounterSession]) -> list[float | None]:
    await for_each(sessions, CounterSession.play)
    return [reward_of(verdict) for verdict in await for_each(sessions, CounterSession.verify)]


@pytest.mark.promise("stamped", "reaches-its-owner")
@pytest.mark.parametrize(("name", "workers"), [("counter", 4), ("counter_on_eight", 8)])
async def test_every_session_is_right_whichever_workers_accept_its_requests(
    servers: Servers, name: str, workers: int
) -> None:
    assert len(await servers.all_workers(name)) == workers
    async with seeded_sessions(servers.url(name)) as sessions:
        owners = {session.owner for session in sessions}
        assert len(owners) > 1
        assert owners <= servers.workers(name).keys()
        assert await rewards_of_all(sessions) == [1.0] * SESSIONS
        assert {session.owner for session in sessions} == owners


@pytest.mark.promise("fault-shows")
async def test_without_routing_sessions_go_wrong(servers: Servers) -> None:
    async with seeded_sessions(servers.url("unrouted_counter")) as sessions:
        assert {session.owner for session in sessions} == {None}
        right = (await rewards_of_all(sessions)).count(1.0)
    assert right < SESSIONS


@pytest.mark.promise("gone-is-410", "typed-410")
async def test_a_killed_worker_takes_its_own_sessions_with_it_and_no_others(servers: Servers) -> None:
    workers = await servers.all_workers("counter")
    async with seeded_sessions(servers.url("counter")) as sessions:
        await for_each(sessions, CounterSession.play)
        owners = [session.owner for session in sessions]
        victim = owners[0]
        assert victim is not None
        assert set(owners) > {victim}
        workers[victim].kill()
        await until(lambda: is_over(workers[victim]))
        verdicts = await for_each(sessions, CounterSession.verify)
    for owner, verdict in zip(owners, verdicts, strict=True):
        if owner == victim:
            assert_lost(verdict)
        else:
            assert reward_of(verdict) == 1.0
    await assert_replaced(servers, "counter", workers.keys() - {victim})


def assert_lost(reply: Reply) -> None:
    assert reply.status == 410
    assert reply.headers["x-nemo-gym-session-lost"] == "worker_gone"
    body = reply.json()
    assert (body["reason"], body["new_session_may_be_seeded"]) == ("worker_gone", True)
    assert "Start a new session" in body["detail"]


async def assert_replaced(servers: Servers, name: str, survivors: set[str]) -> None:
    """The worker that took a dead one's place serves sessions as the others do."""
    (replacement,) = (await servers.all_workers(name)).keys() - survivors
    owners: set[str | None] = set()
    async with asyncio.timeout(20):
        while replacement not in owners:
            async with seeded_sessions(servers.url(name), 50) as sessions:
                owners |= {session.owner for session in sessions}
                assert await rewards_of_all(sessions) == [1.0] * len(sessions)


@pytest.mark.promise("agent-sessions")
async def test_an_agent_with_several_workers_remembers_its_sessions(servers: Servers) -> None:
    clients = [Client(servers.url("notebook_agent")) for _ in range(50)]

    async def read_out(number: int, client: Client) -> tuple[str | None, list[str], float]:
        first = await client.post("/run", responses_create_params={"input": f"{number}/first"})
        assert first.json()["reward"] == 1
        texts = []
        for page in range(3):
            reply = await client.post("/v1/responses", input=f"{number}/{page}")
            texts.append(reply.json()["output"][0]["content"][0]["text"])
        run = await client.post("/run", responses_create_params={"input": f"{number}/run"})
        return client.owner, texts, run.json()["reward"]

    try:
        results = await asyncio.gather(*(read_out(number, client) for number, client in enumerate(clients)))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    assert len({owner for owner, _, _ in results}) > 1
    for number, (_, texts, pages) in enumerate(results):
        so_far = [f"{number}/first"]
        for page, text in enumerate(texts):
            so_far.append(f"{number}/{page}")
            assert text == " ".join(so_far)
        assert pages == 5
