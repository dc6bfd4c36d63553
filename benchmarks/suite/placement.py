"""Placement: how evenly sessions are spread over the workers, by what is accepted where and by how long each lasts.

Target 4. The number is the sessions of the most loaded worker over those of the least loaded one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.load import LoadGenerator
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import CPU, RIGHT, Measure, interleave
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, Server, gym_server, started
from nemo_gym.session_routing import SESSION_OWNER_KEY

WORKERS = 4
LIMIT = 1.25
EVENNESS = Column("evenness", "most / least loaded")
ONE_CLIENT = "sessions from one keep-alive connection"
MANY_CLIENTS = "sessions from a connection each"
UNEVEN = "live sessions of uneven length, over 32 connections"


async def run(run: Run) -> BenchmarkResult:
    """Measure the spread of sessions with and without placement."""
    starters = {
        "least_loaded": gym_server(COUNTER, WORKERS),
        "local": gym_server(COUNTER, WORKERS, session_placement="local"),
    }
    count = run.size(400, 40)
    held = {"sessions": count, "live": count, "hold": True}
    # The connections are not evened out here: they go to whoever accepts them.
    jobs: dict[str, dict[str, Any]] = {
        f"{count} {ONE_CLIENT}": {**held, "connections": 1},
        f"{count} {MANY_CLIENTS}": {**held, "connections": count},
        f"{count} {UNEVEN}": {"sessions": 4 * count, "live": count, "connections": 32, "increments": [1, 40]},
    }
    table = Table(f"Sessions on {WORKERS} workers", (EVENNESS, CPU, RIGHT))
    async with started(run, starters) as servers:
        measures = {
            f"{what}, {placement}": _measure(server, job)
            for what, job in jobs.items()
            for placement, server in servers.items()
        }
        await interleave(run.with_rounds(3), table, measures)
    checks = [
        Check(4, f"most / least loaded: {what}", table.spread(f"{what}, least_loaded", EVENNESS.key), LIMIT)
        for what in jobs
    ]
    return BenchmarkResult("placement", [table], checks)


def _measure(server: Server, job: Mapping[str, Any]) -> Measure:
    async def measure(number: int) -> dict[str, float]:
        whole = {"host": server.host, "port": server.port, "owner_key": SESSION_OWNER_KEY, "seed": number, **job}
        async with LoadGenerator("sessions", whole) as generator:
            before = server.cpu_seconds()
            result = await generator.go()
            if job.get("hold"):
                found = evenness(result["owners"], WORKERS)
                await generator.told()
                result = await generator.go()
            else:
                found = statistics.median(evenness(sample, WORKERS) for sample in result["live_samples"])
            used = server.cpu_seconds() - before
        requests = result["requests"] + (job["sessions"] if job.get("hold") else 0)
        return {
            EVENNESS.key: found,
            CPU.key: 1000 * used / requests,
            RIGHT.key: 100 * result["right"] / result["sessions"],
        }

    return measure


def evenness(sessions: Mapping[str, int], workers: int) -> float:
    """Return the sessions of the most loaded worker over those of the least loaded; one that has none counts as 1."""
    counts = list(sessions.values())
    least = min(counts) if len(counts) >= workers else 0
    return max(counts) / max(1, least)
