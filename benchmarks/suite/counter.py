"""The counter sequence: what the framework costs, what routing costs, and what one would use instead.

Targets 1, 2, 3 and 6. A session is seed, two increments, verify; 16 connections, 32 sessions woven together.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.harness.haproxy import haproxy_before
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import REQUEST_COLUMNS, Load, interleave, measures_of
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, UNROUTED, bare_counter, gym_server, started

BARE_1: Final = "bare FastAPI, 1 worker"
BARE_4: Final = "bare FastAPI, 4 workers, no routing (wrong)"
OURS: Final = "ours, {} workers"
OURS_1: Final = "ours, 1 worker"
OURS_4: Final = OURS.format(4)
AIOHTTP: Final = "ours, 4 workers, session_hop: aiohttp"
LOCAL: Final = "ours, 4 workers, session_placement: local"
UNROUTED_4: Final = "ours, 4 workers, no routing (wrong)"
HAPROXY: Final = "HAProxy before 4 of ours"
CLIENT: Final = "ServerClient, ours, {} workers"
CLIENT_1: Final = "ServerClient, ours, 1 worker"
STRAIGHT: Final = CLIENT.format(4)
SHARED_PORT: Final = "ServerClient by the shared port, ours, 4 workers"
CLIENT_UNROUTED: Final = "ServerClient, ours, 4 workers, no routing (wrong)"
CLIENT_HAPROXY: Final = "ServerClient, HAProxy before 4 of ours"

VERSUS_BARE: Final = Column("versus_bare", "CPU / bare, 1 worker")
VERSUS_CEILING: Final = Column("versus_ceiling", "CPU / no routing")
VERSUS_HAPROXY: Final = Column("versus_haproxy", "CPU / HAProxy")


async def run(run: Run) -> BenchmarkResult:
    """Measure the counter sequence."""
    starters = {
        BARE_1: bare_counter(1),
        BARE_4: bare_counter(4),
        OURS_1: gym_server(COUNTER, 1),
        OURS.format(2): gym_server(COUNTER, 2),
        OURS_4: gym_server(COUNTER, 4),
        OURS.format(8): gym_server(COUNTER, 8),
        AIOHTTP: gym_server(COUNTER, 4, session_hop="aiohttp"),
        LOCAL: gym_server(COUNTER, 4, session_placement="local"),
        UNROUTED_4: gym_server(UNROUTED, 4),
        HAPROXY: haproxy_before(COUNTER, 4),
    }
    foreign = {"connections": 16, "live": 32, "sessions": run.size(800, 50), "warm_up": run.size(150, 10)}
    client: dict[str, Any] = {**foreign, "sessions": run.size(400, 50), "straight_to_owner": False}
    straight = {**client, "straight_to_owner": True}
    loads = {name: Load(name, job=foreign) for name in starters}
    loads |= {
        CLIENT_1: Load(OURS_1, "server_client", straight),
        CLIENT.format(2): Load(OURS.format(2), "server_client", straight),
        STRAIGHT: Load(OURS_4, "server_client", straight),
        CLIENT.format(8): Load(OURS.format(8), "server_client", straight),
        SHARED_PORT: Load(OURS_4, "server_client", client),
        CLIENT_UNROUTED: Load(UNROUTED_4, "server_client", client),
        CLIENT_HAPROXY: Load(HAPROXY, "server_client", client),
    }
    columns = (*REQUEST_COLUMNS, VERSUS_BARE, VERSUS_CEILING, VERSUS_HAPROXY)
    table = Table("Counter sequence (seed, 2 increments, verify)", columns)
    async with started(run, starters) as servers:
        await interleave(run, table, measures_of(servers, loads))
    compare(table)
    return BenchmarkResult("counter", [table], checks_of(table))


def compare(table: Table) -> None:
    """Add the ratios to what each alternative is compared with: to what the same client calls."""
    own = [name for name in table.samples if name.startswith("ServerClient")]
    foreign = [name for name in table.samples if name not in own]
    table.add_ratios(BARE_1, "cpu_ms", VERSUS_BARE.key, foreign)
    for client, ceiling, haproxy in ((foreign, UNROUTED_4, HAPROXY), (own, CLIENT_UNROUTED, CLIENT_HAPROXY)):
        table.add_ratios(ceiling, "cpu_ms", VERSUS_CEILING.key, client)
        table.add_ratios(haproxy, "cpu_ms", VERSUS_HAPROXY.key, client)


def checks_of(table: Table) -> list[Check]:
    """Return what the targets ask for."""

    def cpu(target: int, what: str, one: str, base: str, limit: float, stretch: float | None = None) -> Check:
        return Check(target, f"CPU per request: {what}", table.ratio(one, base, "cpu_ms"), limit, stretch=stretch)

    return [
        cpu(1, "one worker / bare FastAPI", OURS_1, BARE_1, 1.5),
        cpu(2, "foreign client, 4 workers / HAProxy", OURS_4, HAPROXY, 1.10, stretch=1.0),
        cpu(2, "foreign client, 4 workers / no routing", OURS_4, UNROUTED_4, 1.25),
        cpu(3, "ServerClient, 4 workers / no routing", STRAIGHT, CLIENT_UNROUTED, 1.05),
        cpu(3, "ServerClient, 4 workers / HAProxy", STRAIGHT, CLIENT_HAPROXY, 1.0),
        cpu(6, "hop in frames / hop by aiohttp", OURS_4, AIOHTTP, 1.0),
    ]
