"""Large bodies through the hop between two workers.

256 MB stand for any size: a hop that gathered bodies would need all of that, one that streams needs a few MB.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import psutil
import pytest

from tests.e2e.session_routing.clients import Client, accepted_by, connection_to
from tests.e2e.session_routing.processes import Servers

MEGABYTES = 256
MEGABYTE = bytes(range(256)) * 4096
MOST_GROWTH = 64 * 2**20
PAUSE = 0.5  # seconds in which one side does not read, while the other sends all that it may


@dataclass
class Hop:
    """A session of one worker, and a connection that another has accepted."""

    connection: aiohttp.ClientSession
    cookie: dict[str, str]
    receiver: int
    owner: int


@pytest.fixture
async def hop(probes: Servers) -> AsyncIterator[Hop]:
    workers = await probes.all_workers("probe")
    client = Client(probes.url("probe"))
    await client.post("/seed_session", number=1)
    assert client.owner is not None
    owner = workers.pop(client.owner)
    (receiver,) = workers.values()
    async with connection_to(probes.url("probe"), receiver.pid) as connection:
        yield Hop(connection, {"cookie": client.cookie}, receiver.pid, owner.pid)
        assert await accepted_by(connection) == receiver.pid, "the connection was changed"
    await client.close()


@asynccontextmanager
async def bounded_memory(*pids: int) -> AsyncIterator[None]:
    """Watch the processes' memory while the block runs."""
    processes = [psutil.Process(pid) for pid in pids]
    before = [process.memory_info().rss for process in processes]
    most = list(before)

    async def watch() -> None:
        while True:
            for index, process in enumerate(processes):
                most[index] = max(most[index], process.memory_info().rss)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
    growth = [peak - start for peak, start in zip(most, before, strict=True)]
    assert max(growth) < MOST_GROWTH, [f"{grown / 2**20:.0f} MB" for grown in growth]


def checksum_of_all() -> int:
    checksum = 0
    for _ in range(MEGABYTES):
        checksum = zlib.crc32(MEGABYTE, checksum)
    return checksum


@pytest.mark.promise("back-pressure")
async def test_a_large_upload_passes_in_bounded_memory(hop: Hop) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(MEGABYTES):
            yield MEGABYTE

    async with bounded_memory(hop.receiver, hop.owner):
        async with hop.connection.post(f"/upload?pause={PAUSE}", data=parts(), headers=hop.cookie) as response:
            reply = await response.json()
    assert reply == {"size": MEGABYTES * 2**20, "checksum": checksum_of_all(), "pid": hop.owner}


@pytest.mark.promise("back-pressure")
async def test_a_large_download_passes_in_bounded_memory(hop: Hop) -> None:
    size = checksum = 0
    async with bounded_memory(hop.receiver, hop.owner):
        async with hop.connection.get(f"/download?megabytes={MEGABYTES}", headers=hop.cookie) as response:
            assert response.headers["x-pid"] == str(hop.owner)
            await asyncio.sleep(PAUSE)
            async for part in response.content.iter_any():
                size += len(part)
                checksum = zlib.crc32(part, checksum)
    assert (size, checksum) == (MEGABYTES * 2**20, checksum_of_all())
