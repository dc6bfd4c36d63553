"""Bodies of 1 KB, 100 KB and 10 MB, up and down: to the owner directly, by the hop, and through HAProxy.

Target 5. Four connections at once. The peak is the growth of a worker's resident memory over the whole benchmark,
per request in flight, for the worker of the two that needed more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.load import LoadGenerator
from benchmarks.harness.processes import forget_peak_memory, peak_memory_mb, resident_mb
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import Measure, interleave
from benchmarks.harness.run import Run
from benchmarks.harness.servers import PROBE, Server, ServerStarter, gym_server, started
from benchmarks.harness.statistics import Spread

IN_FLIGHT: Final = 4
KB: Final = 1000
MB: Final = 1000 * KB
SIZES: Final = {"1 KB": KB, "100 KB": 100 * KB, "10 MB": 10 * MB}
DIRECT, HOP, AIOHTTP = "direct", "hop", "hop by aiohttp"
HAPROXY, HAPROXY_2 = "HAProxy", "HAProxy, 2 threads"
STRAIGHT, CLIENT_DIRECT = "ServerClient, 2 workers", "ServerClient, 1 worker"

RATE: Final = Column("mb_per_s", "MB/s", 1)
CPU: Final = Column("cpu_ms", "server CPU, ms/request", 3)
VERSUS_DIRECT: Final = Column("versus_direct", "MB/s / direct")
PEAK: Final = Column("peak_mb", "peak MB per request in flight", 1)


async def run(run: Run) -> BenchmarkResult:
    """Measure transfers."""
    # A server of its own for each way, so that each way's memory is seen.
    starters: dict[str, ServerStarter] = {
        DIRECT: gym_server(PROBE, 2),
        HOP: gym_server(PROBE, 2),
        AIOHTTP: gym_server(PROBE, 2, session_hop="aiohttp"),
        HAPROXY: haproxy_before(PROBE, 2),
        HAPROXY_2: haproxy_before(PROBE, 2, threads=2),
        STRAIGHT: gym_server(PROBE, 2),
        CLIENT_DIRECT: gym_server(PROBE, 1),
    }
    sizes = {"1 KB": KB, "10 MB": 10 * MB} if run.quick else SIZES
    tables: dict[tuple[str, str], Table] = {}
    async with started(run, starters) as servers:
        before = {name: _resident(server) for name, server in servers.items()}
        forgotten = [forget_peak_memory(pid) for server in servers.values() for pid in server.workers]
        if not all(forgotten):
            run.notice("peak memory: this system does not tell it")
        for size in sizes:
            for direction in ("up", "down"):
                table = Table(f"{size} {direction}", (RATE, VERSUS_DIRECT, CPU))
                rounds = run if size == "10 MB" else run.with_rounds(3)
                await interleave(rounds, table, _measures(run, servers, direction, sizes[size]))
                table.add_ratios(DIRECT, RATE.key, VERSUS_DIRECT.key)
                tables[size, direction] = table
        peaks = _peaks(servers, before) if all(forgotten) else Table("Memory", (PEAK,))
    return BenchmarkResult("payloads", [*tables.values(), peaks], _checks(tables, peaks))


def _measures(run: Run, servers: Mapping[str, Server], direction: str, size: int) -> dict[str, Measure]:
    ways = {DIRECT: "direct", HOP: "hop", AIOHTTP: "hop", HAPROXY: "any", HAPROXY_2: "any"}
    # So that each measurement takes about a third of a second.
    count = {KB: 300, 100 * KB: 150, 10 * MB: 12}[size]

    def measure_of(name: str, server: Server) -> Measure:
        async def measure(number: int) -> dict[str, float]:
            own_client = name not in ways
            job: dict[str, Any] = {
                "host": server.host,
                "port": server.port,
                "workers": server.accepting,
                "config": server.config,
                "name": server.name,
                "way": ways.get(name),
                "straight_to_owner": True,
                "direction": direction,
                "size": size,
                "count": run.size(count, 3),
                "connections": IN_FLIGHT,
            }
            async with LoadGenerator("client_bulk" if own_client else "bulk", job) as generator:
                before = server.cpu_seconds()
                result = await generator.go()
                used = server.cpu_seconds() - before
            return {
                RATE.key: result["bytes"] / MB / result["seconds"],
                CPU.key: 1000 * used / result["requests"],
            }

        return measure

    return {name: measure_of(name, server) for name, server in servers.items()}


def _resident(server: Server) -> list[float]:
    return [resident_mb(pid) for pid in server.workers]


def _peaks(servers: Mapping[str, Server], before: Mapping[str, list[float]]) -> Table:
    table = Table("Memory", (PEAK,))
    for name, server in servers.items():
        try:
            peaks = [peak_memory_mb(pid) for pid in server.workers]
        except (OSError, ValueError):
            continue
        grown = [peak - earlier for peak, earlier in zip(peaks, before[name], strict=True)]
        table.add(name, {PEAK.key: max(grown) / IN_FLIGHT})
    return table


def _checks(tables: Mapping[tuple[str, str], Table], peaks: Table) -> list[Check]:
    up, down = tables["10 MB", "up"], tables["10 MB", "down"]

    def rate(what: str, found: Spread | None, limit: float) -> Check:
        return Check(5, f"10 MB {what}, MB/s", found, limit, at_least=True)

    straight = "ServerClient to 2 workers / to 1"
    faster = max((HAPROXY, HAPROXY_2), key=lambda name: sum(down.values(name, RATE.key)))
    return [
        rate("up: hop / direct", up.ratio(HOP, DIRECT, RATE.key), 0.8),
        rate(f"down: hop / {faster}", down.ratio(HOP, faster, RATE.key), 1.0),
        # Two workers give more than one; what a transfer costs can be compared.
        Check(5, f"10 MB up: server CPU, {straight}", up.ratio(STRAIGHT, CLIENT_DIRECT, CPU.key), 1.05),
        Check(5, f"10 MB down: server CPU, {straight}", down.ratio(STRAIGHT, CLIENT_DIRECT, CPU.key), 1.05),
        Check(5, "peak memory per request in flight, by the hop", peaks.spread(HOP, PEAK.key), 4.0, unit="MB"),
    ]
