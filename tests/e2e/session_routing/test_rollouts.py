"""Whole rollouts against a counter server with several workers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.paths import PARENT_DIR
from tests.e2e.session_routing.processes import Folders, Servers, client_connections, private_connections, until
from tests.fake_backend import FakeBackend

EPISODES = 200
UNDER_WAY = 64


def counter_rows(count: int) -> list[dict[str, Any]]:
    """Return rows that the fake's policy solves: it adds 1 and 2 wherever the counter starts."""
    row = read_lines(PARENT_DIR / "resources_servers" / "example_session_state_mgmt" / "data" / "example.jsonl")[0]
    return [row | {"id": f"row-{n}", "initial_count": 10 * n, "expected_count": 10 * n + 3} for n in range(count)]


@pytest.mark.promise("reaches-its-owner")
@pytest.mark.parametrize("agent", ["legacy_agent", "agent_on_three"])
async def test_every_episode_is_right(servers: Servers, agent: str) -> None:
    rows = counter_rows(EPISODES)
    workers = await servers.all_workers("counter")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(servers.url(agent), connector=connector) as session:

        async def run(row: dict[str, Any]) -> Any:
            async with session.post("/run", json=row) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        results = await asyncio.gather(*(run(row) for row in rows))
    busy = [client_connections(worker) + private_connections(worker, name) > 0 for name, worker in workers.items()]
    assert sum(busy) > 1, "one worker did it all"
    assert [result["reward"] for result in results] == [1.0] * EPISODES
    assert [result["final_count"] for result in results] == [row["expected_count"] for row in rows]
    assert [result["id"] for result in results] == [row["id"] for row in rows]


@asynccontextmanager
async def gym(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nemo_gym.cli", *arguments, cwd=folder, stdout=-1, stderr=-1
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@asynccontextmanager
async def holding(backend: FakeBackend, *, after: int) -> AsyncIterator[None]:
    backend.hold(after=after)
    try:
        yield
    finally:
        backend.release()


@pytest.mark.promise("lost-is-run-again")
async def test_a_run_loses_no_episode_with_a_worker_that_is_killed(
    servers: Servers, folders: Folders, backend: FakeBackend
) -> None:
    write_lines(folders.work / "rows.jsonl", counter_rows(EPISODES))
    workers = await servers.all_workers("counter")
    # Four calls make an episode: with these, half of them end before the rest is kept waiting.
    async with (
        holding(backend, after=EPISODES * 4 // 2),
        gym(
            folders.work,
            *("eval", "run", "--no-serve", "--head-server", servers.deployment.head_url, "--agent", "agent", "--json"),
            *("--input", "rows.jsonl", "--output", "rollouts.jsonl", "--concurrency", str(UNDER_WAY)),
        ) as process,
    ):
        await until(lambda: process.returncode is not None or backend.held() == UNDER_WAY)
        # Who has accepted most connections has most sessions.
        max(workers.values(), key=client_connections).kill()
        backend.release()
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, stderr.decode()

    summary = json.loads(stdout)
    results = read_lines(folders.work / "rollouts.jsonl")
    assert sorted(result["_ng_task_index"] for result in results) == list(range(EPISODES))
    assert {result["reward"] for result in results} == {1.0}
    assert (summary["total"], summary["finished"], summary["failed"]) == (EPISODES, EPISODES, 0)
    assert summary["run_again"] == sum(result["_ng_attempt_index"] for result in results) > 0


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
