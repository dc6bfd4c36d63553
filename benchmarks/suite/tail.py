"""The tail: how much longer the slowest answers take than the middle one, under 16 connections that are always busy.

Target 9. The load generator and the servers share the machine, so the tail holds the generator's own waits too; the
bare counter shows how much that is.
"""

from __future__ import annotations

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.results import BenchmarkResult, Check, Table
from benchmarks.harness.rounds import CPU, P50, P99, RATE, RIGHT, TAIL, Load, interleave, measures_of
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, UNROUTED, bare_counter, gym_server, started

OURS_4 = "ours, 4 workers"


async def run(run: Run) -> BenchmarkResult:
    """Measure latencies over longer runs than the counter benchmark's."""
    starters = {
        "bare FastAPI, 1 worker": bare_counter(1),
        "bare FastAPI, 4 workers, no routing (wrong)": bare_counter(4),
        "ours, 1 worker": gym_server(COUNTER, 1),
        OURS_4: gym_server(COUNTER, 4),
        "ours, 4 workers, no routing (wrong)": gym_server(UNROUTED, 4),
        "HAProxy before 4 of ours": haproxy_before(COUNTER, 4),
    }
    job = {"connections": 16, "live": 32, "sessions": run.size(1500, 100), "warm_up": run.size(300, 20)}
    table = Table("Latency under 16 busy connections", (P50, P99, TAIL, RATE, CPU, RIGHT))
    async with started(run, starters) as servers:
        await interleave(run, table, measures_of(servers, {name: Load(name, job=job) for name in starters}))
    check = Check(9, "p99 / p50, 4 workers, 16 connections", table.spread(OURS_4, TAIL.key), 3.0)
    return BenchmarkResult("tail", [table], [check])
