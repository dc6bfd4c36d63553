"""Interleaved rounds: every alternative once per round, in an order that changes, so that none has the best place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import psutil

from benchmarks.harness.load import LoadError, LoadGenerator
from benchmarks.harness.processes import memory_mb
from benchmarks.harness.results import Column, Table
from benchmarks.harness.run import Run
from benchmarks.harness.servers import Server, in_a_line
from benchmarks.load.turns import let_all_run

CPU: Final = Column("cpu_ms", "server CPU, ms/request", 3)
RATE: Final = Column("rate", "requests/s", 0)
P50: Final = Column("p50_ms", "p50, ms")
P99: Final = Column("p99_ms", "p99, ms")
TAIL: Final = Column("tail", "p99/p50", 1)
MEMORY: Final = Column("memory_mb", "MB/worker", 1)
RIGHT: Final = Column("right", "sessions right, %", 1)
REQUEST_COLUMNS: Final = (CPU, RATE, P50, P99, MEMORY, RIGHT)

Measure: TypeAlias = Callable[[int], Awaitable[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator does to a server.

    Attributes:
        server: The server's name among those that run.
        kind: The module of `benchmarks.load`.
        job: What it is to do; address and workers are added.
    """

    server: str
    kind: str = "sessions"
    job: Mapping[str, Any] = field(default_factory=dict)


async def interleave(run: Run, table: Table, measures: Mapping[str, Measure]) -> None:
    """Measure every alternative `run.rounds` times into `table`; one that fails is left out from then on."""
    remaining = list(measures)
    for number in range(run.rounds):
        run.step(f"{table.title}: round {number + 1} of {run.rounds}")
        for name in _order(remaining, number):
            try:
                table.add(name, await measures[name](number))
            except (LoadError, OSError, psutil.Error) as error:
                run.notice(f"{name}: failed in round {number + 1}: {in_a_line(error)}")
                remaining.remove(name)


def _order(names: list[str], number: int) -> list[str]:
    # Every second round backwards: of any two, each comes first about as often as the other.
    shift = number // 2 % max(1, len(names))
    shifted = names[shift:] + names[:shift]
    return shifted[::-1] if number % 2 else shifted


def measures_of(servers: Mapping[str, Server], loads: Mapping[str, Load]) -> dict[str, Measure]:
    """Return how to measure each of the loads whose server runs."""

    def measure_of(load: Load) -> Measure:
        async def measure(number: int) -> dict[str, float]:
            return await measure_load(servers[load.server], load, number)

        return measure

    return {name: measure_of(load) for name, load in loads.items() if load.server in servers}


async def measure_load(server: Server, load: Load, number: int) -> dict[str, float]:
    """Run a load once and return what it cost."""
    job = {
        "host": server.host,
        "port": server.port,
        "workers": server.accepting,
        "config": server.config,
        "name": server.name,
        "seed": number,
        **load.job,
    }
    try:
        async with LoadGenerator(load.kind, job) as generator:
            before = server.cpu_seconds()
            result = await generator.go()
            used = server.cpu_seconds() - before
    finally:
        # A load generator that is ended while it holds some of them back can't let them go.
        let_all_run(server.accepting)
    return {
        CPU.key: 1000 * used / result["requests"],
        RATE.key: result["requests"] / result["seconds"],
        P50.key: result["p50_ms"],
        P99.key: result["p99_ms"],
        TAIL.key: result["p99_ms"] / result["p50_ms"],
        MEMORY.key: sum(map(memory_mb, server.workers)) / len(server.workers),
        RIGHT.key: 100 * result["right"] / result["sessions"],
    }
