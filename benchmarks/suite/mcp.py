"""The counter over MCP: the tool calls of each session carry the token of its seed, and no cookie."""

from __future__ import annotations

from benchmarks.harness.results import BenchmarkResult, Column, Table
from benchmarks.harness.rounds import REQUEST_COLUMNS, Load, interleave, measures_of
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, UNROUTED, gym_server, started

ONE = "over MCP, 1 worker"
UNROUTED_4 = "over MCP, 4 workers, no routing (wrong)"
VERSUS_CEILING = Column("versus_ceiling", "CPU / no routing")


async def run(run: Run) -> BenchmarkResult:
    """Measure sessions whose tool calls go over MCP."""
    starters = {ONE: gym_server(COUNTER, 1, expose_tools_over_mcp=True)}
    for workers in (2, 4, 8):
        starters[f"over MCP, {workers} workers"] = gym_server(COUNTER, workers, expose_tools_over_mcp=True)
    starters[UNROUTED_4] = gym_server(UNROUTED, 4, expose_tools_over_mcp=True)
    job = {
        "protocol": "mcp",
        "connections": 16,
        "live": 32,
        "sessions": run.size(200, 40),
        "warm_up": run.size(60, 10),
    }
    table = Table("Counter over MCP (seed, 2 tool calls, verify)", (*REQUEST_COLUMNS, VERSUS_CEILING))
    async with started(run, starters) as servers:
        await interleave(run, table, measures_of(servers, {name: Load(name, job=job) for name in starters}))
    table.add_ratios(UNROUTED_4, "cpu_ms", VERSUS_CEILING.key)
    return BenchmarkResult("mcp", [table])
