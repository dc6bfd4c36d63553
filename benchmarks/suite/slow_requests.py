"""A thousand slow requests open at once: do others stay quick, and what does each cost in memory?"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.load import LoadGenerator
from benchmarks.harness.processes import total_memory_mb
from benchmarks.harness.results import BenchmarkResult, Column, Table
from benchmarks.harness.rounds import CPU, P50, P99, RIGHT, Load, Measure, interleave, measure_load
from benchmarks.harness.run import Run
from benchmarks.harness.servers import PROBE, Server, gym_server, started

WORKERS: Final = 4
SETTLE_S: Final = 1.0
QUIET: Final = Column("quiet_p50_ms", "p50 without, ms")
QUIET_P99: Final = Column("quiet_p99_ms", "p99 without, ms")
PER_REQUEST: Final = Column("kb_per_request", "KB per open request", 1)
SLOW_RIGHT: Final = Column("slow_right", "slow ones right, %", 1)


async def run(run: Run) -> BenchmarkResult:
    """Measure short requests beside many open ones."""
    count = run.size(1000, 60)
    starters = {
        f"ours, {WORKERS} workers": gym_server(PROBE, WORKERS),
        f"HAProxy before {WORKERS} of ours": haproxy_before(PROBE, WORKERS),
    }
    columns = (P50, QUIET, P99, QUIET_P99, CPU, PER_REQUEST, RIGHT, SLOW_RIGHT)
    table = Table(f"Short requests beside {count} slow ones", columns)
    async with started(run, starters) as servers:
        measures = {name: _measure(run, name, server, count) for name, server in servers.items()}
        await interleave(run.with_rounds(2), table, measures)
    return BenchmarkResult("slow_requests", [table])


def _measure(run: Run, name: str, server: Server, count: int) -> Measure:
    short = Load("", job={"connections": 16, "live": 32, "sessions": run.size(400, 40), "warm_up": run.size(100, 10)})
    slow: dict[str, Any] = {"host": server.host, "port": server.port, "requests": count, "slow_s": run.size(8, 4)}

    async def measure(number: int) -> dict[str, float]:
        quiet = await measure_load(server, short, number)
        async with LoadGenerator("hold", slow) as generator:
            before = total_memory_mb(server.workers)
            await generator.go()
            opened = time.perf_counter()
            await asyncio.sleep(SETTLE_S)
            held = total_memory_mb(server.workers) - before
            values = await measure_load(server, short, number)
            if time.perf_counter() - opened > slow["slow_s"]:
                run.notice(f"{name}: the slow requests were answered before all the short ones: too slow a machine")
            result = await generator.told()
        return {
            **values,
            QUIET.key: quiet[P50.key],
            QUIET_P99.key: quiet[P99.key],
            PER_REQUEST.key: 1024 * held / count,
            SLOW_RIGHT.key: 100 * result["right"] / result["requests"],
        }

    return measure
