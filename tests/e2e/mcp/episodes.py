"""A session as its owner sees it: seeded over plain HTTP, with the cookie that an MCP client does not have."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tests.e2e.session_routing.clients import Client, connection_to
from tests.e2e.session_routing.processes import Servers, until


@dataclass(frozen=True)
class Target:
    """Where an MCP client connects to, and what it sends along."""

    url: str
    headers: dict[str, str]


class Episode(Client):
    """A session of the probe.

    Args:
        servers: The deployment.
        name: The server.
    """

    def __init__(self, servers: Servers, name: str = "probe") -> None:
        super().__init__(servers.url(name))
        self._servers = servers
        self._name = name
        self.access: dict[str, Any] = {}

    async def seed(self) -> None:
        reply = await self.post("/seed_session")
        assert reply.status == 200
        self.access = reply.json()["mcp"]

    @property
    def target(self) -> Target:
        return Target(self._servers.url(self._name) + self.access["url_path"], self.access["headers"])

    @property
    def owning_process(self) -> psutil.Process:
        owner = self.owner
        assert owner is not None
        return self._servers.workers(self._name)[owner]

    async def diary(self) -> list[str]:
        """Return what the session's waits have written down."""
        reply = await self.get("/diary")
        assert reply.status == 200
        entries: list[str] = reply.json()
        return entries

    async def until_written(self, entry: str) -> None:
        async with asyncio.timeout(10):
            while entry not in await self.diary():  # noqa: ASYNC110 - another process tells nobody
                await asyncio.sleep(0.02)

    async def lose_owner(self) -> None:
        """Kill the worker that holds the session, and wait until the system has taken back all that it held."""
        process = self.owning_process
        process.kill()
        await until(lambda: not psutil.pid_exists(process.pid), 10)


@asynccontextmanager
async def episode(servers: Servers, name: str = "probe") -> AsyncIterator[Episode]:
    """Begin a session on a server whose workers are all there."""
    await servers.all_workers(name)
    begun = Episode(servers, name)
    try:
        await begun.seed()
        yield begun
    finally:
        await begun.close()


def token_payload(token: str) -> dict[str, Any]:
    """Return what a token says; anyone may read it, as it is signed and not encrypted."""
    data = token.removeprefix(".").split(".")[0]
    raw = base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))
    payload: dict[str, Any] = json.loads(zlib.decompress(raw) if token.startswith(".") else raw)
    return payload


async def forwarded_requests(servers: Servers, name: str) -> dict[int, int]:
    """Return how many requests each worker process of a server has forwarded to the owners of their sessions."""
    counts = {}
    for process in (await servers.all_workers(name)).values():
        async with connection_to(servers.url(name), process.pid) as connection, connection.get("/worker") as reply:
            counts[process.pid] = (await reply.json())["forwarded"]
    return counts
