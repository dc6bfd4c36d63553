"""Server-sent events: when the first one comes, and how long each is under way, by the hop and directly.

Target 5. One stream at a time; each event carries the time at which it was sent, by a clock that all processes share.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.load import LoadGenerator
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import Measure, interleave
from benchmarks.harness.run import Run
from benchmarks.harness.servers import PROBE, Server, gym_server, started

DIRECT, HOP, AIOHTTP, HAPROXY = "direct", "hop", "hop by aiohttp", "HAProxy"
INTERVAL_MS = 2.0
FIRST = Column("first_ms", "first event, ms", 3)
COLUMNS = (
    FIRST,
    Column("under_way_ms", "event under way, ms", 3),
    Column("gap_ms", "gap, ms", 3),
    Column("longest_gap_ms", "longest gap, ms", 1),
    Column("cpu_ms", "server CPU, ms/stream", 3),
)


async def run(run: Run) -> BenchmarkResult:
    """Measure streams of events."""
    ours = "2 workers"
    starters = {
        ours: gym_server(PROBE, 2),
        AIOHTTP: gym_server(PROBE, 2, session_hop="aiohttp"),
        HAPROXY: haproxy_before(PROBE, 2),
    }
    ways = {DIRECT: (ours, "direct"), HOP: (ours, "hop"), AIOHTTP: (AIOHTTP, "hop"), HAPROXY: (HAPROXY, "any")}
    table = Table(f"Streams of 5 events, one every {INTERVAL_MS:g} ms", COLUMNS)
    async with started(run, starters) as servers:
        measures = {
            name: _measure(servers[server], way, run.size(100, 10))
            for name, (server, way) in ways.items()
            if server in servers
        }
        await interleave(run, table, measures)
    delay = table.difference(HOP, DIRECT, FIRST.key)
    return BenchmarkResult("events", [table], [Check(5, "first event by the hop, after direct", delay, 0.5, unit="ms")])


def _measure(server: Server, way: str, streams: int) -> Measure:
    async def measure(number: int) -> dict[str, float]:
        job: dict[str, Any] = {
            "host": server.host,
            "port": server.port,
            "workers": server.accepting,
            "way": way,
            "streams": streams,
            "warm_up": streams // 10,
            "events": 5,
            "interval_ms": INTERVAL_MS,
        }
        async with LoadGenerator("events", job) as generator:
            before = server.cpu_seconds()
            result = await generator.go()
            used = server.cpu_seconds() - before
        return {
            **{column.key: result[column.key] for column in COLUMNS if column.key in result},
            "cpu_ms": 1000 * used / result["requests"],
        }

    return measure
