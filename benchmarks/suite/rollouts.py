"""Whole rollouts through `gym eval run`, with a model that answers at once: how many, and where the time goes.

Target 7. Rows of the counter environment's example data, many times over. Measured from the moment when a fifth of the
rollouts are done until nearly all are, so that neither the start of the programs nor the sums at the end count.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import psutil

from benchmarks.harness.load import LoadError
from benchmarks.harness.processes import cpu_seconds, tree
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import Measure, interleave
from benchmarks.harness.run import ROOT, Run, machine
from benchmarks.harness.servers import COUNTER, deployed, in_a_line, said_in
from nemo_gym.deployment import Deployment
from nemo_gym.errors import NemoGymError
from nemo_gym.global_config import load_global_config

DATA: Final = ROOT / "resources_servers" / COUNTER / "data" / "example.jsonl"
ROWS: Final = 50
PARTS: Final = {"counter": "resources", "agent": "agent", "policy_model": "model"}
ONE_CORE: Final = "1 worker each, all on one core"
COLLECTOR: Final = "collector"
RATE: Final = Column("rate", "rollouts/s", 0)
PER_CORE: Final = Column("per_core", "rollouts/s per core", 0)
PER_CPU: Final = Column("per_cpu_s", "rollouts per CPU second", 0)
COLUMNS: Final = (
    RATE,
    PER_CORE,
    PER_CPU,
    *(Column(part, f"{part}, % of CPU", 1) for part in (COLLECTOR, *PARTS.values())),
    Column("busy", "cores busy, %", 0),
    Column("right", "right, %", 1),
)

_CONFIG: Final = """\
counter: {{resources_servers: {{{counter}: {{entrypoint: app.py, num_workers: {workers}}}}}}}
agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      num_workers: {workers}
      resources_server: {{type: resources_servers, name: counter}}
      model_server: {{type: responses_api_models, name: policy_model}}
policy_model: {{responses_api_models: {{pattern_model: {{entrypoint: app.py, num_workers: {workers}}}}}}}
"""
_POLL_S: Final = 0.02
_PATIENCE_S: Final = 120.0
_FROM, _TO = 0.2, 0.95


@dataclass(frozen=True, slots=True)
class _Sample:
    """How far it was at one moment, and what each part had used by then."""

    seconds: float
    done: int
    used: dict[str, float]


async def run(run: Run) -> BenchmarkResult:
    """Measure rollouts with one worker of each server, with as many as there are cores, and on one core."""
    cores = int(machine()["cores"])
    several = f"{max(2, cores)} workers each"
    arrangements = {"1 worker each": (1, False), several: (max(2, cores), False), ONE_CORE: (1, True)}
    if not hasattr(os, "sched_setaffinity") or cores < 2:
        del arrangements[ONE_CORE]
        run.notice("rollouts on one core: this system can't keep processes to one, or has no other")
    table = Table("Counter rollouts, 64 at once", COLUMNS)
    measures: dict[str, Measure] = {}
    async with AsyncExitStack() as stack:
        for name, (workers, on_one_core) in arrangements.items():
            try:
                deployment = await stack.enter_async_context(_deployment(run, workers, on_one_core=on_one_core))
            except (NemoGymError, OSError) as error:
                run.notice(f"{name}: {in_a_line(error)}")
                continue
            measures[name] = _measure(run, deployment, cores, on_one_core=on_one_core)
        await interleave(run.with_rounds(3), table, measures)
    return BenchmarkResult("rollouts", [table], _checks(table, several))


def _checks(table: Table, several: str) -> list[Check]:
    medians = {name: spread.median for name in table.samples if (spread := table.spread(name, RATE.key)) is not None}
    best = max((name for name in medians if name != ONE_CORE), key=medians.__getitem__, default=several)
    return [
        Check(7, f"rollouts/s per core ({best})", table.spread(best, PER_CORE.key), 150, at_least=True),
        Check(7, "rollouts/s per core: all cores / one", table.ratio(best, ONE_CORE, PER_CORE.key), 0.9, at_least=True),
        Check(7, f"the collector's share of the CPU ({best})", table.spread(best, COLLECTOR), 15, unit="%"),
    ]


@asynccontextmanager
async def _deployment(run: Run, workers: int, *, on_one_core: bool) -> AsyncIterator[Deployment]:
    path = run.folder / "work" / f"rollouts-{time.monotonic_ns()}.yaml"
    path.write_text(_CONFIG.format(counter=COUNTER, workers=workers))
    config = load_global_config([path], working_dir=run.folder / "work")
    async with AsyncExitStack() as stack:
        with _kept_to_one_core() if on_one_core else nullcontext():
            deployment = await stack.enter_async_context(deployed(run, config))
        yield deployment


@contextmanager
def _kept_to_one_core() -> Iterator[None]:
    """Keep the processes started in this block to one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _measure(run: Run, deployment: Deployment, cores: int, *, on_one_core: bool) -> Measure:
    servers = {PARTS[server.instance.name]: tree([server.pid or 0]) for server in deployment.servers}
    rollouts = run.size(1200, 100)

    async def measure(number: int) -> dict[str, float]:
        output = run.folder / "work" / f"rollouts-{time.monotonic_ns()}.jsonl"
        arguments = [
            *("--no-serve", "--head-server", deployment.head_url, "--agent", "agent"),
            *("--input", str(DATA), "--num-repeats", str(rollouts // ROWS), "--output", str(output)),
        ]
        log = output.with_suffix(".log")
        with _kept_to_one_core() if on_one_core else nullcontext(), log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "nemo_gym.cli", "eval", "run", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        try:
            first, last = await _watch(process, output, rollouts, servers)
        except LoadError as error:
            raise LoadError(f"{error}; it said: {said_in(log)}") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
            await process.wait()
        return _values(first, last, 1 if on_one_core else cores) | {"right": 100 * _share_right(output, rollouts)}

    return measure


async def _watch(
    process: asyncio.subprocess.Process, output: Path, rollouts: int, servers: Mapping[str, list[psutil.Process]]
) -> tuple[_Sample, _Sample]:
    """Return how things stood when the rollouts were under way, and when nearly all were done; wait for the end."""
    parts = {COLLECTOR: [psutil.Process(process.pid)], **servers}
    first: _Sample | None = None
    last: _Sample | None = None
    lines = _LineCount(output)
    async with asyncio.timeout(_PATIENCE_S):
        while process.returncode is None and last is None:
            done = lines.now()
            if done >= _TO * rollouts and first is not None:
                last = _sample(done, parts)
            elif done >= _FROM * rollouts and first is None:
                first = _sample(done, parts)
            await asyncio.sleep(_POLL_S)
        await process.wait()
    if process.returncode or first is None or last is None:
        raise LoadError(f"gym eval run ended with exit code {process.returncode}, or was too quick to be measured")
    return first, last


class _LineCount:
    """How many lines a growing file has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._lines = 0

    def now(self) -> int:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
            self._position += len(added)
            self._lines += added.count(b"\n")
        return self._lines


def _sample(done: int, parts: Mapping[str, list[psutil.Process]]) -> _Sample:
    return _Sample(time.perf_counter(), done, {name: cpu_seconds(processes) for name, processes in parts.items()})


def _values(first: _Sample, last: _Sample, cores: int) -> dict[str, float]:
    seconds, done = last.seconds - first.seconds, last.done - first.done
    used = {name: last.used[name] - first.used[name] for name in first.used}
    total = sum(used.values())
    return {
        RATE.key: done / seconds,
        PER_CORE.key: done / seconds / cores,
        PER_CPU.key: done / total,
        **{name: 100 * part / total for name, part in used.items()},
        "busy": 100 * total / seconds / cores,
    }


def _share_right(output: Path, rollouts: int) -> float:
    with output.open("rb") as lines:
        return sum(orjson.loads(line)["reward"] == 1.0 for line in lines) / rollouts
