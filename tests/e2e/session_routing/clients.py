"""Foreign clients: they know HTTP and cookies, and nothing of the framework."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

EMPTY_RESPONSE = {"id": "resp_1", "created_at": 0, "model": "none", "object": "response", "output": []}


@dataclass(frozen=True)
class Reply:
    """A reply that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One session's client: a cookie jar of its own, and a new connection for every request.

    The kernel gives each connection to any of the server's workers, so the requests of a session arrive everywhere.
    """

    def __init__(self, url: str) -> None:
        self._jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address and not of a name
        self._session = aiohttp.ClientSession(
            url, cookie_jar=self._jar, connector=aiohttp.TCPConnector(force_close=True)
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, method: str, path: str, **kwargs: Any) -> Reply:
        async with self.stream(method, path, **kwargs) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    def stream(self, method: str, path: str, **kwargs: Any) -> Any:
        return self._session.request(method, path, **kwargs)

    async def post(self, path: str, **body: Any) -> Reply:
        return await self.send("POST", path, json=body)

    async def get(self, path: str) -> Reply:
        return await self.send("GET", path)

    @property
    def cookie(self) -> str:
        """The session cookie as a `Cookie` header."""
        (cookie,) = self._jar
        return f"{cookie.key}={cookie.value}"

    @property
    def owner(self) -> str | None:
        """The worker that the session cookie names; anyone may read it, as it is signed and not encrypted."""
        (cookie,) = self._jar
        owner: str | None = json.loads(base64.b64decode(cookie.value.partition(".")[0])).get("nemo_gym_worker")
        return owner


class CounterSession(Client):
    """An episode of the counter environment.

    Args:
        url: The server.
        number: Where the counter starts; it sets sessions apart.
    """

    def __init__(self, url: str, number: int) -> None:
        super().__init__(url)
        self.number = number

    async def seed(self) -> None:
        assert (await self.post("/seed_session", initial_count=self.number)).status == 200

    async def play(self) -> list[Reply]:
        """Add 1 and then the session's own number."""
        return [await self.post("/increment_counter", count=count) for count in (1, self.number)]

    async def verify(self) -> Reply:
        return await self.post(
            "/verify",
            responses_create_params={"input": "count"},
            response=EMPTY_RESPONSE,
            expected_count=2 * self.number + 1,
        )


def reward_of(reply: Reply) -> float | None:
    """The reward of a verdict; None where there is none."""
    reward: float | None = reply.json()["reward"] if reply.status == 200 else None
    return reward


@asynccontextmanager
async def connection_to(url: str, pid: int) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client whose only connection was accepted by the worker process `pid`; it keeps no cookies."""
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(20):
            while True:
                # Several at once, or one idle worker may get them all.
                tries = [await stack.enter_async_context(_one_connection(url)) for _ in range(8)]
                pids = await asyncio.gather(*map(accepted_by, tries))
                if pid in pids:
                    break
        yield tries[pids.index(pid)]


def _one_connection(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url, cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60)
    )


async def accepted_by(connection: aiohttp.ClientSession) -> int:
    """Return the process at the other end: a request without a session is answered where it arrives."""
    async with connection.get("/worker") as response:
        pid: int = (await response.json())["pid"]
        return pid
