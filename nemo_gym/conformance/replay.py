"""Sends scripts to a running server: over connections that lead to different workers, sessions woven together."""

from __future__ import annotations

import asyncio
import binascii
import json
import random
import socket
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from yarl import URL

from nemo_gym.conformance.processes import holder_of
from nemo_gym.conformance.replies import Reply
from nemo_gym.conformance.scripts import Script, ScriptedRequest
from nemo_gym.server.client import cookie_header
from nemo_gym.server_utils import SESSION_ID_KEY
from nemo_gym.session_routing import SESSION_LOST_HEADER, SESSION_OWNER_KEY

INTERLEAVED: Final = 8
"""How many sessions are under way at once."""

_PER_WORKER: Final = 3
_UNKNOWN_CONNECTIONS: Final = 32
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.1
# A server keeps an idle connection for 75 s; this side closes first.
_IDLE_KEEP_ALIVE_S: Final = 60
_TIMEOUT: Final = aiohttp.ClientTimeout(total=600)


class Connection:
    """One kept-alive connection. Should it be closed in between, the next request opens it anew.

    Args:
        url: The server's address.
    """

    def __init__(self, url: str) -> None:
        self.worker = ""
        self._url = url
        self._socket: socket.socket | None = None
        connector = aiohttp.TCPConnector(
            limit=1, keepalive_timeout=_IDLE_KEEP_ALIVE_S, socket_factory=self._make_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=_TIMEOUT, read_bufsize=2**18
        )

    async def open(self) -> str | None:
        """Connect, and return the worker at the other end as the session that it starts names it, if it names one."""
        async with self._session.get(f"{self._url}/") as response:
            await response.read()
            cookies = {name: morsel.value for name, morsel in response.cookies.items()}
        return session_of(cookies).get(SESSION_OWNER_KEY)

    @property
    def client_port(self) -> int:
        """The port at this end."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    async def post(self, path: str, body: Any, cookies: Mapping[str, str]) -> Reply:
        """Send a request and return what became of it, also when the connection broke."""
        headers = {"Cookie": cookie_header(cookies)} if cookies else {}
        try:
            async with self._session.post(f"{self._url}{path}", json=body, headers=headers) as response:
                text = (await response.read()).decode("utf-8", "replace")
        except TimeoutError:
            return Reply(0, f"no reply within {_TIMEOUT.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reply(0, f"no reply: {type(error).__name__}: {error}")
        return Reply(
            response.status,
            text,
            {name: morsel.value for name, morsel in response.cookies.items()},
            response.status == HTTPStatus.GONE and SESSION_LOST_HEADER in response.headers,
        )

    async def close(self) -> None:
        """Close it."""
        await self._session.close()

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        self._socket = socket.socket(family, kind, protocol)
        return self._socket


class Connections:
    """Connections to a server, such that every worker has some; a context manager.

    The kernel gives a connection to any worker that is free, often to the same one, and a worker may still be
    starting, so they are opened until each worker has its share. A worker is known by the session that it starts, or
    else by the process that holds the connection. Where neither tells, there are just many connections.

    Args:
        url: The server's address.
        num_workers: How many workers it has.
        pid: The server's main process, where it runs on this machine.
    """

    def __init__(self, url: str, num_workers: int, pid: int | None = None) -> None:
        self.num_workers = num_workers
        self.routed = False
        self._url = url
        self._port = URL(url).port or 80
        self._pid = pid if num_workers > 1 else None
        self._workers_known = False
        self._by_worker: dict[str, list[Connection]] = {}
        self._random = random.Random(0)  # noqa: S311
        self._numbers = count()

    @property
    def workers_reached(self) -> int | None:
        """How many workers the connections lead to; None where that can't be told."""
        return len(self._by_worker) if self._workers_known else None

    async def __aenter__(self) -> Self:
        try:
            await self._open_enough()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def another(self, worker: str | None) -> Connection:
        """Return a connection that does not lead to `worker`, where there is one."""
        others = [name for name in self._by_worker if name != worker] or list(self._by_worker)
        return self._random.choice(self._by_worker[self._random.choice(others)])

    async def close(self) -> None:
        """Close all connections."""
        connections = [one for connections in self._by_worker.values() for one in connections]
        self._by_worker.clear()
        await asyncio.gather(*(one.close() for one in connections))

    async def _open_enough(self) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            before = self._count()
            await asyncio.gather(*(self._open_one() for _ in range(2 * self.num_workers + 2)))
            wanted = self.num_workers * _PER_WORKER if self._workers_known else _UNKNOWN_CONNECTIONS
            if self._count() >= wanted or time.monotonic() > give_up:
                return
            if self._count() == before:
                await asyncio.sleep(_PAUSE_S)

    def _count(self) -> int:
        return sum(map(len, self._by_worker.values()))

    async def _open_one(self) -> None:
        connection = Connection(self._url)
        kept = False
        try:
            owner = await connection.open()
            self.routed = self.routed or owner is not None
            if owner is None and self._pid is not None:
                owner = await asyncio.to_thread(holder_of, self._pid, self._port, connection.client_port)
            if owner is None and self._workers_known:
                return
            self._workers_known = owner is not None
            connection.worker = owner or f"unknown {next(self._numbers)}"
            others = self._by_worker.setdefault(connection.worker, [])
            if len(others) < _PER_WORKER:
                others.append(connection)
                kept = True
        finally:
            if not kept:
                await connection.close()


def session_of(cookies: Mapping[str, str]) -> dict[str, Any]:
    """Return the session that stands, signed but readable, in one of a server's cookies; empty where none does."""
    for value in cookies.values():
        try:
            session = json.loads(b64decode(value.partition(".")[0], validate=True))
        except (ValueError, binascii.Error):
            continue
        if isinstance(session, dict) and SESSION_ID_KEY in session:
            return session
    return {}


class _Session:
    """A session under way: its cookies travel as an agent lets them."""

    def __init__(self, connections: Connections) -> None:
        self.replies: list[Reply] = []
        self._connections = connections
        self._cookies: dict[str, str] = {}
        self._worker: str | None = None

    async def send(self, request: ScriptedRequest) -> None:
        connection = self._connections.another(self._worker)
        self._worker = connection.worker
        reply = await connection.post(request.path, request.body, self._cookies)
        self._cookies.update(reply.cookies)
        self.replies.append(reply)


async def replay(script: Script, connections: Connections) -> list[Reply]:
    """Run one session and return its replies."""
    return (await replay_interleaved([script], connections))[0]


async def replay_interleaved(scripts: Sequence[Script], connections: Connections) -> list[list[Reply]]:
    """Run sessions woven together, a few at a time, and return the replies of each.

    They go in step: all send their first request, then all their second. So between any two requests of one session
    there are requests of others. No request comes to the worker that its predecessor came to.
    """
    replies: list[list[Reply]] = []
    for start in range(0, len(scripts), INTERLEAVED):
        together = scripts[start : start + INTERLEAVED]
        sessions = [_Session(connections) for _ in together]
        for position in range(max(len(script.requests) for script in together)):
            await asyncio.gather(
                *(
                    session.send(script.requests[position])
                    for script, session in zip(together, sessions, strict=True)
                    if position < len(script.requests)
                )
            )
        replies += [session.replies for session in sessions]
    return replies
