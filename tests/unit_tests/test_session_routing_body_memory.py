"""Large bodies, whose pieces pass from worker to worker through memory that both have open."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
import resource
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from tests.session_workers import Worker, make_app, open_descriptors, owned_cookie, running_workers

BODY = random.Random(0).randbytes(5_000_000)
PIECES = (1_000, 65_536, 65_537, 262_143, 262_144, 262_145, 900_000)
DIGEST = hashlib.sha256(BODY).hexdigest()
MAPPED = "memfd:nemo-gym-body"


async def digest(request: Request) -> Response:
    found = hashlib.sha256()
    async for piece in request.stream():
        found.update(piece)
    return JSONResponse([found.hexdigest(), mappings()])


async def pieces_of_all_sizes(_: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        position, number = 0, 0
        while position < len(BODY):
            size = PIECES[number % len(PIECES)]
            yield BODY[position : position + size]
            position, number = position + size, number + 1

    return StreamingResponse(pieces())


def app() -> Starlette:
    return make_app(Route("/digest", digest, methods=["POST"]), Route("/pieces", pieces_of_all_sizes))


def mappings() -> int:
    """Return how many times this process has such memory mapped."""
    return Path("/proc/self/maps").read_text().count(MAPPED)


async def transfer(here: Worker, there: Worker) -> list[int]:
    """Send large bodies to another worker, one after another on one connection, and have such replies."""
    mapped = []
    cookie = owned_cookie(there.worker_id)
    async with await here.connect() as connection:
        for _ in range(2):
            headers = [("host", "h"), ("cookie", cookie), ("content-length", str(len(BODY)))]
            connection.send_head("POST", "/digest", headers)
            connection.writer.write(BODY)
            found, count = (await connection.reply()).json()
            assert found == DIGEST
            mapped.append(count)
            connection.send_head("GET", "/pieces", [("host", "h"), ("cookie", cookie)])
            assert (await connection.reply()).body == BODY
    return mapped


@pytest.mark.promise("request-unchanged", "back-pressure")
async def test_large_bodies_arrive_whole_through_memory_that_goes_with_the_connection(socket_dir: Path) -> None:
    gc.collect()
    before = mappings()
    async with running_workers(socket_dir, 2, app) as (here, there):
        # Both ends are in this process, and each direction has memory of its own.
        assert await transfer(here, there) == [before + 2, before + 4]
    assert mappings() == before


@pytest.mark.promise("request-unchanged")
@pytest.mark.parametrize("refused", ["memfd_create", "open"])
async def test_large_bodies_arrive_whole_where_no_memory_can_be_shared(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    really = getattr(os, refused)

    def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
        if refused == "open" and "/fd/" not in str(name):
            return really(name, *args, **kwargs)
        raise PermissionError(f"{name} is refused")

    monkeypatch.setattr(os, refused, refuse)
    gc.collect()
    before, descriptors = mappings(), open_descriptors()
    async with running_workers(socket_dir, 2, app) as (here, there):
        for count in await transfer(here, there):
            # What was made before it was refused to the other end stays unused.
            assert count - before <= 2
    assert mappings() == before
    assert open_descriptors() == descriptors


@pytest.mark.promise("back-pressure")
async def test_an_upload_goes_on_while_nobody_takes_the_reply(socket_dir: Path) -> None:
    received = asyncio.Event()

    async def both_ways(scope: Scope, receive: Receive, send: Send) -> None:
        async def take() -> None:
            async for _ in Request(scope, receive).stream():
                pass
            received.set()

        taking = asyncio.create_task(take())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"40000000")]})
        for start in range(0, 8 * len(BODY), 250_000):
            piece = BODY[start % len(BODY) :][:250_000]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
        await taking

    def duplex() -> Starlette:
        return make_app(Mount("/both", both_ways))

    async with running_workers(socket_dir, 2, duplex) as (here, there), await here.connect() as connection:
        headers = [("host", "h"), ("cookie", owned_cookie(there.worker_id)), ("content-length", str(4 * len(BODY)))]
        connection.send_head("POST", "/both/", headers)
        connection.reading.pause_reading()
        for _ in range(4):
            connection.writer.write(BODY)
            await connection.writer.drain()
        await received.wait()
        connection.reading.resume_reading()
        assert (await connection.reply()).body == 8 * BODY


SIZES = tuple(size + more for size in (0, 65_536, 262_144, 1_048_576, 2_500_000, 4_000_000) for more in (0, 1, 17))


class Chance(random.Random):
    """What happens by chance in an exchange: how much, in which pieces, and how slowly."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.slowness = self.choice((0, 0, 5, 20))

    async def pieces(self, body: bytes) -> AsyncIterator[bytes]:
        position = 0
        while position < len(body):
            size = self.choice(PIECES)
            yield body[position : position + size]
            position += size
            await self.dawdle()

    async def dawdle(self) -> None:
        for _ in range(self.choice((0, 0, 0, 1, self.slowness))):
            await asyncio.sleep(0)

    def some_bytes(self) -> bytes:
        size = self.choice(SIZES)
        start = self.randrange(len(BODY) - size)
        return BODY[start : start + size]


async def by_chance(scope: Scope, receive: Receive, send: Send) -> None:
    """Take a body and send another one at the same time, then the digest of the first; or fail in the middle."""
    seed, fails = scope["query_string"].split(b"&")
    taking, sending = Chance(f"{seed!r} taken"), Chance(f"{seed!r} sent")

    async def take() -> str:
        found = hashlib.sha256()
        async for piece in Request(scope, receive).stream():
            found.update(piece)
            await taking.dawdle()
        return found.hexdigest()

    async with asyncio.TaskGroup() as tasks:
        taken = tasks.create_task(take())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for piece in sending.pieces(sending.some_bytes()):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if fails == b"1":
            taken.cancel()
            return
    await send({"type": "http.response.body", "body": taken.result().encode()})


async def exchange_by_chance(here: Worker, cookie: str, seed: str) -> None:
    """Have a few exchanges on one connection, the last of which may be broken off by either side."""
    chance = Chance(seed)
    async with await here.connect() as connection:
        for number in range(5):
            name, end = f"{seed}.{number}", chance.choice((*["whole"] * 8, "client leaves", "application fails"))
            sent = chance.some_bytes()
            headers = [("host", "h"), ("cookie", cookie), ("content-length", str(len(sent)))]
            connection.send_head("POST", f"/by-chance/?{name}&{end == 'application fails':d}", headers)
            leaves_at = chance.randrange(len(sent) + 1) if end == "client leaves" else None
            replying = asyncio.create_task(connection.reply())
            try:
                async for piece in chance.pieces(sent[:leaves_at]):
                    connection.writer.write(piece)
                    await connection.writer.drain()
            except ConnectionError:
                assert end == "application fails"
            if leaves_at is not None:
                replying.cancel()
                return
            try:
                reply = await replying
            except (ConnectionError, asyncio.IncompleteReadError):
                assert end == "application fails"
                return
            whole = Chance(f"{name.encode()!r} sent").some_bytes() + hashlib.sha256(sent).hexdigest().encode()
            assert reply.complete == (end == "whole")
            assert reply.body == whole if reply.complete else whole.startswith(reply.body)
            if not reply.complete:
                return


@pytest.mark.promise("request-unchanged", "back-pressure")
async def test_bodies_arrive_byte_for_byte_or_are_seen_to_be_broken_off(socket_dir: Path) -> None:
    gc.collect()
    before, descriptors = mappings(), open_descriptors()

    def chancy() -> Starlette:
        return make_app(Mount("/by-chance", by_chance))

    async with running_workers(socket_dir, 2, chancy, limit=30) as (here, there):
        cookie = owned_cookie(there.worker_id)
        for turn in range(2):
            await asyncio.gather(*(exchange_by_chance(here, cookie, f"{turn}.{number}") for number in range(6)))
    assert mappings() == before
    assert open_descriptors() == descriptors


@pytest.mark.promise("request-unchanged")
async def test_descriptors_are_left_to_connections_where_they_are_few(socket_dir: Path) -> None:
    gc.collect()
    before, limits = mappings(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        for _ in range(64):
            stack.callback(os.close, os.dup(0))
        few = 2 * open_descriptors()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, limits[1]), limits[1]))
        async with running_workers(socket_dir, 2, app) as (here, there):
            assert await transfer(here, there) == [before, before]
