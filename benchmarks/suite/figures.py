"""What the figures cost: the counter sequence with and without them, and what it costs to ask for them.

Target 10. The same server with `figures: false` counts nothing and answers neither `/workers` nor `/metrics`. The two
are measured one right after the other, each as often first as the other, and the ratio is taken round by round, since
the difference is smaller than what a shared machine varies by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import aiohttp

from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import CPU, P50, P99, RATE, RIGHT, Load, Measure, interleave, measures_of
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, Server, gym_server, started

FIGURES: Final = "ours, {}"
WITHOUT: Final = "ours, {}, figures: false"
SLICES: Final = 3
SIZES: Final = {"1 worker": 1, "4 workers": 4}
VERSUS_WITHOUT: Final = Column("versus_without", "CPU / without figures", 3)
PER_ANSWER: Final = Column("ms_per_answer", "server CPU, ms/answer", 2)


async def run(run: Run) -> BenchmarkResult:
    """Measure the figures."""
    starters = {}
    for size, workers in SIZES.items():
        starters[FIGURES.format(size)] = gym_server(COUNTER, workers)
        starters[WITHOUT.format(size)] = gym_server(COUNTER, workers, figures=False)
    job = {"connections": 16, "live": 32, "sessions": run.size(1500 // SLICES, 50), "warm_up": run.size(150, 10)}
    table = Table("Counter sequence (seed, 2 increments, verify)", (CPU, VERSUS_WITHOUT, RATE, P50, P99, RIGHT))
    asked = Table("One answer for all workers", (PER_ANSWER,))
    async with started(run, starters) as servers:
        # Many short slices: from one second to the next the machine's pace changes by more than what is looked for.
        slices = run if run.quick else replace(run, rounds=SLICES * run.rounds)
        for size in SIZES:
            pair = {name: Load(name, job=job) for name in (FIGURES.format(size), WITHOUT.format(size))}
            await interleave(slices, table, measures_of(servers, pair))
        asking = {
            f"GET {path}, {size}": _asking(servers[FIGURES.format(size)], path, run.size(200, 3))
            for size in SIZES
            for path in ("/workers", "/metrics")
            if FIGURES.format(size) in servers
        }
        await interleave(run.with_rounds(3), asked, asking)
    checks = []
    for size in SIZES:
        ratio = table.ratio(FIGURES.format(size), WITHOUT.format(size), CPU.key)
        checks.append(Check(10, f"CPU per request, {size}: with figures / without", ratio, 1.03))
        pair_of_size = (FIGURES.format(size), WITHOUT.format(size))
        table.add_ratios(WITHOUT.format(size), CPU.key, VERSUS_WITHOUT.key, pair_of_size)
    return BenchmarkResult("figures", [table, asked], checks)


def _asking(server: Server, path: str, times: int) -> Measure:
    async def measure(number: int) -> dict[str, float]:
        async with aiohttp.ClientSession(f"http://{server.host}:{server.port}", raise_for_status=True) as client:
            await _ask(client, path)
            before = server.cpu_seconds()
            for _ in range(times):
                await _ask(client, path)
            return {PER_ANSWER.key: 1000 * (server.cpu_seconds() - before) / times}

    return measure


async def _ask(client: aiohttp.ClientSession, path: str) -> Any:
    async with client.get(path) as reply:
        return await reply.read()
