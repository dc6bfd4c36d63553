"""Large bodies, whose pieces pass from worker to worker through memory that both have open."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
from collections.abc import AsyncIterator
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
