"""Twenty thousand live sessions: what each costs in memory, on all workers and on one, and whether all are right."""

from __future__ import annotations

from typing import Any

import psutil

from benchmarks.harness.load import LoadError, LoadGenerator
from benchmarks.harness.processes import memory_mb
from benchmarks.harness.results import BenchmarkResult, Column, Table
from benchmarks.harness.rounds import CPU, RATE, RIGHT
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, Server, bare_counter, gym_server, in_a_line, started
from nemo_gym.session_routing import SESSION_OWNER_KEY

PER_SESSION = Column("bytes_per_session", "bytes per session", 0)
COLUMNS = (
    PER_SESSION,
    Column("grown_mb", "all workers grew by, MB", 1),
    Column("most_mb", "largest worker, MB", 1),
    Column("seeds_per_s", "seeds/s", 0),
    CPU,
    RATE,
    RIGHT,
)


async def run(run: Run) -> BenchmarkResult:
    """Measure servers with many live sessions; once, as a server grows only once."""
    count = run.size(20_000, 400)
    starters = {
        "bare FastAPI, 1 worker": bare_counter(1),
        "ours, 1 worker": gym_server(COUNTER, 1),
        "ours, 4 workers": gym_server(COUNTER, 4),
        "ours, 4 workers, session_end after 600 s idle": gym_server(COUNTER, 4, session_end={"idle_timeout_s": 600}),
    }
    table = Table(f"{count} live sessions", COLUMNS)
    async with started(run, starters) as servers:
        for name, server in servers.items():
            run.step(f"{table.title}: {name}")
            try:
                table.add(name, await _measure(server, count))
            except (LoadError, OSError, psutil.Error) as error:
                run.notice(f"{name}: failed: {in_a_line(error)}")
    return BenchmarkResult("live_sessions", [table])


async def _measure(server: Server, count: int) -> dict[str, float]:
    # The warm-up makes the workers as large as work makes them, whatever is live.
    job: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "workers": server.accepting,
        "connections": 16,
        "live": count,
        "sessions": count,
        "warm_up": count // 10,
        "increments": 1,
        "hold": True,
        "owner_key": SESSION_OWNER_KEY,
    }
    async with LoadGenerator("sessions", job) as generator:
        before = [memory_mb(pid) for pid in server.workers]
        cpu_before = server.cpu_seconds()
        seeded = await generator.go()
        after = [memory_mb(pid) for pid in server.workers]
        await generator.told()
        result = await generator.go()
        used = server.cpu_seconds() - cpu_before
    grown = sum(after) - sum(before)
    return {
        PER_SESSION.key: grown * 2**20 / count,
        "grown_mb": grown,
        "most_mb": max(after),
        "seeds_per_s": count / seeded["seconds"],
        CPU.key: 1000 * used / (seeded["requests"] + result["requests"]),
        RATE.key: result["requests"] / result["seconds"],
        RIGHT.key: 100 * result["right"] / count,
    }
