"""Servers to compare: one that cannot be started, or not be compared, is left out with a notice."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, Server, started
from benchmarks.load.wire import open_connections


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, 1, True, Console(file=io.StringIO(), width=200))


@asynccontextmanager
async def sound(run: Run) -> AsyncIterator[Server]:
    yield Server("127.0.0.1", 1, [], [])


@asynccontextmanager
async def gone(run: Run) -> AsyncIterator[Server]:
    raise psutil.NoSuchProcess(77)
    yield


async def test_a_missing_haproxy_is_a_notice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(shutil, "which", nowhere)
    async with started(run, {"HAProxy": haproxy_before(COUNTER, 4), "ours": sound}) as servers:
        assert list(servers) == ["ours"]
    assert run.notices == ["HAProxy: haproxy is not installed (Debian and Ubuntu: apt install haproxy); left out"]


async def test_a_server_whose_process_ends_while_it_starts_is_a_notice(run: Run) -> None:
    async with started(run, {"gone": gone, "ours": sound}) as servers:
        assert list(servers) == ["ours"]
    (notice,) = run.notices
    assert notice.startswith("gone: ")
    assert "77" in notice


async def test_connections_that_no_worker_but_one_takes_are_refused() -> None:
    handlers: list[asyncio.Task[Any] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        while await reader.readline():
            if await reader.readline() and await reader.readline() == b"\r\n":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        idle = os.getppid()
        with pytest.raises(ConnectionError, match=r"of 2 each, workers have taken \[0, 2\]"):
            await open_connections("127.0.0.1", port, 4, [os.getpid(), idle], patience_s=0.1)
        while unfinished := [one for one in handlers if one is not None and not one.done()]:
            await asyncio.wait(unfinished)
