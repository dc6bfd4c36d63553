"""Whole rollouts in real sandboxes, 64 at a time: repaired through the tools, repaired wrongly, and losing a worker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.paths import PARENT_DIR
from tests.e2e.session_routing.processes import Servers, until
from tests.e2e.session_routing.test_rollouts import gym, read_lines, write_lines
from tests.e2e.swe_rebench.ground import Ground, are_over, below, guards_of, processes_in

UNDER_WAY = 64
ROWS = PARENT_DIR / "resources_servers" / "swe_rebench" / "data" / "example.jsonl"

# What is told wrongly in a row, so that the changes made are wrong; and what the verdict has to say.
WRONG = {
    "launch": ("`${1:-8080}`.", "`${1:-8081}`.", "TestDefaultPort"),
    "money": ("`int(amount * 100 + 0.5)`", "`int(amount * 100) + 2`", "money::whole"),
    "pages": ("by `if not entries:`", "by `if entries is not None:`", "test_all_pages_are_read"),
    "palette": ("`printf ", "`: ", "palette::there are three colours"),
    "pantry": ("by `amounts.get(name, 0)`", "by `amounts.get(name, 2)`", "one kind - once"),
    "relay": ("`enabled/90-legacy.conf`", "`enabled/10-defaults.conf`", "settings > defaults > have no colours"),
    "report": ("replace `if quiet:`", "replace `if silent:`", "test_lines_are_printed"),
    "scales": ("to `scales/temperature.py`", "to `scales/tempreature.py`", "test_the_module_has_the_right_name"),
    "tally": ("by `range(first, last + 1)`", "by `range(first, last + `", "test_both_ends_count"),
    "wording": ('return "-".join', 'return "_".join', "test_a_slug_has_dashes_for_all_else"),
}


def name_of(row: dict[str, Any]) -> str:
    return str(row["instance_id"]).removeprefix("example__").removesuffix("-1")


def told_wrongly(row: dict[str, Any]) -> dict[str, Any]:
    right, wrong, _ = WRONG[name_of(row)]
    (message,) = row["responses_create_params"]["input"]
    assert right in message["content"]
    content = message["content"].replace(right, wrong)
    params = {**row["responses_create_params"], "input": [{**message, "content": content}]}
    return {**row, "responses_create_params": params}


@asynccontextmanager
async def rollouts_of(
    servers: Servers, ground: Ground, rows: list[dict[str, Any]], repeats: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    write_lines(ground.work / "rows.jsonl", rows)
    (ground.work / "rollouts.jsonl").unlink(missing_ok=True)
    async with gym(
        ground.work,
        *("eval", "run", "--no-serve", "--head-server", servers.deployment.head_url, "--agent", "coding_agent"),
        *("--input", "rows.jsonl", "--output", "rollouts.jsonl", "--overwrite", "--json"),
        *("--num-repeats", str(repeats), "--concurrency", str(UNDER_WAY)),
    ) as process:
        yield process


async def results_of(process: asyncio.subprocess.Process, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    stdout, stderr = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout), read_lines(folder / "rollouts.jsonl")


async def all_under_way(process: asyncio.subprocess.Process, ground: Ground) -> set[str]:
    """Wait until so many sessions have made their first change, and return their sandboxes."""
    await until(lambda: process.returncode is not None or ground.waiting() == UNDER_WAY, 120)
    sandboxes = ground.sandbox_ids()
    assert (process.returncode, len(sandboxes)) == (None, UNDER_WAY)
    return sandboxes


def assert_all_solved(
    summary: dict[str, Any], results: list[dict[str, Any]], rows: list[dict[str, Any]], repeats: int
) -> None:
    assert (summary["finished"], summary["failed"]) == (len(rows) * repeats, 0)
    assert Counter(map(name_of, results)) == {name_of(row): repeats for row in rows}
    assert [(name_of(result), result["reason"]) for result in results if result["reward"] != 1.0] == []
    assert all(result["resolved"] and result["patch_applied"] and result["model_patch"] for result in results)


async def assert_nothing_left(
    servers: Servers, ground: Ground, sandboxes: set[str], processes: list[psutil.Process]
) -> None:
    """Wait for the end of every folder, of the processes that were seen and of others; all workers are there again."""
    with suppress(TimeoutError):
        await until(lambda: not ground.sandbox_ids(), 20)
    left = ground.sandbox_ids()
    assert [(sandbox, sandbox in sandboxes, processes_in({sandbox})) for sandbox in left] == []
    await until(lambda: are_over(processes), 20)
    assert processes_in(sandboxes) == []
    workers = await servers.all_workers("swe_rebench")
    await until(lambda: not below(workers.values()), 20)


async def test_every_task_is_solved_by_changes_made_through_the_tools(servers: Servers, ground: Ground) -> None:
    rows = read_lines(ROWS)
    repeats = -(-UNDER_WAY // len(rows))
    workers = await servers.all_workers("swe_rebench")
    with ground.gate_closed():
        async with rollouts_of(servers, ground, rows, repeats) as process:
            sandboxes = await all_under_way(process, ground)
            processes = below(workers.values())
            assert sum(len(guards_of(worker)) for worker in workers.values()) == UNDER_WAY
            assert sum(bool(guards_of(worker)) for worker in workers.values()) > 1, "one worker has all"
            ground.open_gate()
            summary, results = await results_of(process, ground.work)
    assert_all_solved(summary, results, rows, repeats)
    assert summary["run_again"] == 0
    await assert_nothing_left(servers, ground, sandboxes, processes)


async def test_wrong_changes_are_told_as_such(servers: Servers, ground: Ground) -> None:
    rows = read_lines(ROWS)
    repeats = -(-UNDER_WAY // len(rows))
    async with rollouts_of(servers, ground, [told_wrongly(row) for row in rows], repeats) as process:
        summary, results = await results_of(process, ground.work)
    assert (summary["finished"], summary["failed"], summary["run_again"]) == (len(rows) * repeats, 0, 0)
    assert {(result["reward"], result["evaluation_completed"]) for result in results} == {(0.0, True)}
    for result in results:
        *_, expected = WRONG[name_of(result)]
        assert expected in result["reason"], (name_of(result), result["reason"])
    await until(lambda: ground.sandbox_ids() == set(), 20)


@pytest.mark.promise("lost-is-run-again")
async def test_a_killed_workers_sessions_are_run_again_and_leave_no_sandbox(servers: Servers, ground: Ground) -> None:
    rows = read_lines(ROWS)[:8]
    repeats = UNDER_WAY // len(rows)
    workers = await servers.all_workers("swe_rebench")
    with ground.gate_closed():
        async with rollouts_of(servers, ground, rows, repeats) as process:
            sandboxes = await all_under_way(process, ground)
            processes = below(workers.values())
            victim = max(workers.values(), key=lambda worker: len(guards_of(worker)))
            lost, orphans = len(guards_of(victim)), below([victim])
            victim.kill()
            await until(lambda: len(ground.sandbox_ids()) == UNDER_WAY - lost, 20)
            await until(lambda: are_over(orphans), 20)
            ground.open_gate()
            summary, results = await results_of(process, ground.work)
    assert_all_solved(summary, results, rows, repeats)
    assert summary["run_again"] == sum(result["_ng_attempt_index"] for result in results) == lost > 0
    await assert_nothing_left(servers, ground, sandboxes, processes)


@pytest.mark.promise("lost-is-run-again")
async def test_a_worker_killed_while_it_judges_loses_no_rollout(servers: Servers, ground: Ground) -> None:
    rows = read_lines(ROWS)[:8]
    repeats = 4
    workers = await servers.all_workers("swe_rebench")
    results_file = ground.work / "rollouts.jsonl"
    async with rollouts_of(servers, ground, rows, repeats) as process:
        await until(lambda: process.returncode is not None or lines_in(results_file) >= len(rows))
        processes, sandboxes = below(workers.values()), ground.sandbox_ids()
        max(workers.values(), key=lambda worker: len(guards_of(worker))).kill()
        summary, results = await results_of(process, ground.work)
    assert_all_solved(summary, results, rows, repeats)
    assert summary["run_again"] == sum(result["_ng_attempt_index"] for result in results) > 0
    await assert_nothing_left(servers, ground, sandboxes, processes)


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0
