"""Workers that freeze, restart and stop; main processes that end in good order or are killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from nemo_gym.global_config import load_global_config
from tests.e2e.session_routing.clients import Client, Reply
from tests.e2e.session_routing.processes import (
    HERE,
    Folders,
    Servers,
    deployed,
    is_frozen,
    is_over,
    probe_deployed,
    until,
)

SESSIONS = 24


@asynccontextmanager
async def numbered(servers: Servers, name: str) -> AsyncIterator[list[Client]]:
    """Seed sessions, each with its place in the list as its number, on at least two workers."""
    clients: list[Client] = []
    try:
        async with asyncio.timeout(20):
            while len(clients) < SESSIONS or len({client.owner for client in clients}) < 2:
                new = [Client(servers.url(name)) for _ in range(8)]
                clients += new
                await asyncio.gather(*(client.post("/seed_session", number=clients.index(client)) for client in new))
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def test_a_deployment_is_ready_when_all_workers_serve(folders: Folders) -> None:
    config = load_global_config([HERE / "probe.yaml"], working_dir=folders.work)
    async with deployed(config, folders.work) as servers:
        workers = servers.workers("probe")
        assert len(workers) == servers.instance("probe").num_workers
        # Forked: none is the main process's own child.
        assert servers.main("probe").pid not in {worker.ppid() for worker in workers.values()}


def lost(reply: Reply) -> bool:
    """Tell whether a reply says that the session is lost, in full."""
    if reply.status != 410:
        return False
    assert reply.headers["x-nemo-gym-session-lost"] == reply.json()["reason"] == "worker_gone"
    return True


async def assert_new_sessions_are_right(servers: Servers, name: str, workers: set[str]) -> None:
    async with numbered(servers, name) as clients:
        assert {client.owner for client in clients} <= workers
        replies = await asyncio.gather(*(client.send("POST", "/add?amount=100") for client in clients))
        assert [reply.json()["number"] for reply in replies] == [100 + number for number in range(len(clients))]


@pytest.mark.promise("busy-is-not-gone")
async def test_a_frozen_worker_is_waited_for_until_it_is_replaced(probes: Servers) -> None:
    workers = await probes.all_workers("impatient_probe")
    async with numbered(probes, "impatient_probe") as clients:
        frozen = clients[0].owner
        assert frozen is not None
        workers[frozen].suspend()
        waiting = asyncio.create_task(clients[0].get("/number"))
        survivors = [(number, client) for number, client in enumerate(clients) if client.owner != frozen]
        for number, client in survivors:
            assert (await client.get("/number")).json()["number"] == number
        assert lost(await asyncio.wait_for(waiting, 30))
        assert not is_frozen(workers[frozen]), "given up before it was replaced"
        for number, client in survivors:
            assert (await client.get("/number")).json()["number"] == number
    await assert_new_sessions_are_right(probes, "impatient_probe", set(await probes.all_workers("impatient_probe")))


@pytest.mark.promise("reaches-its-owner", "gone-is-410")
async def test_a_rolling_restart_gives_no_wrong_answer(probes: Servers) -> None:
    before = await probes.all_workers("probe")
    async with numbered(probes, "probe") as clients:
        probes.main("probe").send_signal(signal.SIGHUP)
        asking = asyncio.gather(*(ask_until_lost(number, client) for number, client in enumerate(clients)))
        rights = await asyncio.wait_for(asking, 60)
    assert sum(rights) > 0
    await until(lambda: all(map(is_over, before.values())))
    after = await probes.all_workers("probe")
    assert not after.keys() & before.keys()
    await assert_new_sessions_are_right(probes, "probe", set(after))


async def ask_until_lost(number: int, client: Client) -> int:
    """Read the session's number until the session is lost; return how often the answer was right.

    A connection may meet a worker that is just closing; what it breaks off is no answer.
    """
    rights = 0
    while True:
        try:
            reply = await client.get("/number")
        except aiohttp.ClientConnectionError:
            continue
        if lost(reply):
            return rights
        assert (reply.status, reply.json().get("number")) == (200, number)
        rights += 1
        await asyncio.sleep(0.02)


@pytest.mark.promise("graceful-stop", "directory-private")
async def test_a_stop_finishes_the_requests_in_flight(folders: Folders) -> None:
    others = set(folders.sockets.iterdir())
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def add(client: Client) -> str:
        async with client.stream("POST", "/add_slowly?amount=100&seconds=1.5") as response:
            assert await response.content.readline() == b"begun\n"
            begun.put_nowait(None)
            result: bytes = await response.content.read()
            return result.decode()

    async with probe_deployed(folders, end="exited with code 0") as servers, numbered(servers, "probe") as clients:
        main = servers.main("probe")
        family = main.children(recursive=True)
        adding = asyncio.gather(*map(add, clients))
        for _ in clients:
            await begun.get()
        main.terminate()
        assert await adding == [f"{100 + number}\n" for number in range(len(clients))]
        await until(lambda: all(map(is_over, [main, *family])))
        assert set(folders.sockets.iterdir()) == others


@pytest.mark.promise("directory-swept")
async def test_a_killed_main_process_leaves_no_worker_and_a_folder_for_the_next_start(folders: Folders) -> None:
    others = set(folders.sockets.iterdir())
    async with probe_deployed(folders, end="SIGKILL") as servers:
        main = servers.main("probe")
        family = main.children(recursive=True)
        main.kill()
        await until(lambda: all(map(is_over, family)))
        (left,) = set(folders.sockets.iterdir()) - others
    async with probe_deployed(folders):
        (used,) = set(folders.sockets.iterdir()) - others
        assert used != left
    assert set(folders.sockets.iterdir()) == others
