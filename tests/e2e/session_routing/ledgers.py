"""A deployment of ledgers, whose sessions end, and clients of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from nemo_gym.global_config import load_global_config
from tests.e2e.session_routing.clients import EMPTY_RESPONSE
from tests.e2e.session_routing.processes import HERE, Folders, Servers, deployed

VERIFY = {"responses_create_params": {"input": "go"}, "response": EMPTY_RESPONSE}

T = TypeVar("T")


@dataclass
class Ledgers:
    """The running servers and their record of ends."""

    servers: Servers
    record: Path

    def ends(self) -> Counter[tuple[str, str]]:
        """Return how often each session ended for which reason."""
        return Counter((session_id, reason) for session_id, reason, _ in self._lines())

    def ends_by_process(self, pid: int) -> int:
        return sum(int(line[2]) == pid for line in self._lines())

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self.record.read_text().splitlines()] if self.record.exists() else []


@asynccontextmanager
async def ledgers_deployed(folders: Folders, record: Path) -> AsyncIterator[Ledgers]:
    config = load_global_config([HERE / "ending.yaml"], [f"record={record}"], working_dir=folders.work)
    async with deployed(config, folders.work) as servers:
        for name in ("ledger", "idle_ledger"):
            await servers.all_workers(name)
        yield Ledgers(servers, record)


@dataclass
class Session:
    """One session of a client that makes a new connection for each request.

    Args:
        url: The server.
        name: What it names the session by in the body: an id of its own, or nothing until the server has made one.
        keeps_cookies: Whether it names the session by the cookie.
    """

    url: str
    name: str | None = None
    keeps_cookies: bool = False
    session_id: str = ""
    pid: int = 0
    _cookies: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        if self.name is not None:
            body["resources_session_id"] = self.name
        async with (
            aiohttp.ClientSession(self.url, cookie_jar=aiohttp.DummyCookieJar()) as http,
            http.post(path, json=body, cookies=self._cookies) as reply,
        ):
            if self.keeps_cookies:
                self._cookies |= {name: morsel.value for name, morsel in reply.cookies.items()}
            return reply.status, await reply.json()

    async def seed(self, number: int = 0) -> int:
        status, reply = await self.post("/seed_session", number=number)
        if status == 200:
            self.session_id, self.pid = reply["session_id"], reply["pid"]
            if self.name is None and not self.keeps_cookies:
                self.name = reply["resources_session_id"]
        return status

    async def add(self, amount: int) -> Any:
        status, reply = await self.post("/add", amount=amount)
        return reply["number"] if status == 200 else reply.get("reason", status)

    async def verify(self) -> Any:
        status, reply = await self.post("/verify", **VERIFY)
        return reply["reward"] if status == 200 else reply.get("reason", status)

    async def close(self) -> tuple[int, Any]:
        return await self.post("/close_session")


async def for_all(sessions: list[Session], step: Callable[[Session], Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*(step(session) for session in sessions)))


async def seeded(url: str, number: int, **options: Any) -> list[Session]:
    """Seed sessions, all at once, so that the kernel spreads them over the workers; their numbers are 1, 2, 3, ..."""
    sessions = [Session(url, **options) for _ in range(number)]
    statuses = await asyncio.gather(*(session.seed(index) for index, session in enumerate(sessions, 1)))
    assert statuses == [200] * number
    return sessions
