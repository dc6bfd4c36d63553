"""Workers that are frozen, or dead with a process of theirs living on: who waits for them, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress

import psutil
import pytest

from nemo_gym.session_routing.loads_view import LoadsView
from tests.e2e.session_routing.clients import Client
from tests.e2e.session_routing.processes import Folders, Servers, is_over, probe_deployed, until, worker_ids_of

SEEDS = 200


@asynccontextmanager
async def clients_of(url: str, number: int) -> AsyncIterator[list[Client]]:
    clients = [Client(url) for _ in range(number)]
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


@pytest.fixture(scope="module")
async def probes(folders: Folders) -> AsyncIterator[Servers]:
    """A deployment of its own, for these tests leave many sessions behind."""
    async with probe_deployed(folders) as servers:
        yield servers


@pytest.fixture
def ending() -> Iterator[list[psutil.Process]]:
    """Processes that must not outlive the test."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def thawed() -> Iterator[list[psutil.Process]]:
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.mark.promise("placement-avoids-the-silent")
async def test_no_new_session_waits_for_a_frozen_worker(
    probes: Servers, folders: Folders, thawed: list[psutil.Process]
) -> None:
    workers = await probes.all_workers("probe")
    (frozen, process), *others = workers.items()
    (socket,) = folders.sockets.glob(f"*/{frozen}")
    thawed.append(process)
    process.suspend()
    with closing(LoadsView(socket.parent / "loads")) as view:
        await until(lambda: frozen not in [worker for _, worker in view.workers()])

        async with clients_of(probes.url("probe"), SEEDS) as clients, asyncio.timeout(40):
            replies = await asyncio.gather(*(client.post("/seed_session", number=1) for client in clients))

            assert [reply.status for reply in replies] == [200] * SEEDS
            assert {client.owner for client in clients} == {worker for worker, _ in others}
        process.resume()
        await until(lambda: frozen in [worker for _, worker in view.workers()])


@pytest.mark.promise("gone-is-410", "placement-forgets-the-dead")
async def test_a_dead_worker_is_gone_though_a_process_that_it_forked_lives(
    probes: Servers, ending: list[psutil.Process]
) -> None:
    workers = await probes.all_workers("probe")
    async with clients_of(probes.url("probe"), 40) as (client, *others), asyncio.timeout(60):
        assert (await client.post("/seed_session", number=3)).status == 200
        victim = client.owner
        assert victim is not None
        # The other worker has connections to it, from before the fork and after.
        await asyncio.gather(*(client.post("/add?amount=1") for _ in range(12)))
        child = psutil.Process((await client.post("/fork")).json()["pid"])
        ending.append(child)
        await asyncio.gather(*(client.post("/add?amount=1") for _ in range(12)))
        workers[victim].kill()
        await until(lambda: is_over(workers[victim]))

        lost = await asyncio.gather(*(client.post("/add?amount=1") for _ in range(12)))
        begun = await asyncio.gather(*(other.post("/seed_session", number=1) for other in others))

        assert [reply.status for reply in lost] == [410] * 12
        assert [reply.status for reply in begun] == [200] * len(others)
        assert victim not in {other.owner for other in others}
        replaced = await probes.all_workers("probe")
        assert victim not in replaced
        assert child.is_running()
        assert worker_ids_of(child) == set()
