"""A long run against a counter server with several workers: are its answers right, and do its workers stay the same?

Each session is seeded, raised, read and verified, each request over a connection to another worker than the one
before, so that most are forwarded. At intervals all connections are closed, memory and descriptors of every worker
are read, and new connections opened. The server keeps few counters, so what grows is the framework's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.harness.arguments import output_file, positive
from benchmarks.harness.processes import workers_of
from nemo_gym.conformance.replay import Connections
from nemo_gym.deployment import Deployment, StopSignals
from nemo_gym.errors import Interrupted
from nemo_gym.global_config import GlobalConfig, load_global_config

CONFIG = """\
counter:
  resources_servers:
    example_session_state_mgmt: {{entrypoint: app.py, num_workers: {workers}, max_sessions: 1000}}
"""
UNDER_WAY = 32
WARM_UP_SHARE = 1 / 3
# What growth after the warm-up still counts as none, per worker: noise of the allocator, a connection being closed.
FLAT_MB = 2.0
FLAT_DESCRIPTORS = 3.0
SETTLE_S = 0.5
INTERRUPTED = 130
RESPONSE = {"id": "r", "created_at": 0, "model": "none", "object": "response", "output": []}


@dataclass(frozen=True, slots=True)
class Sample:
    """The workers at one moment, by process id: resident memory in MB, open descriptors."""

    sessions: int
    seconds: float
    rss_mb: dict[int, float]
    descriptors: dict[int, int]


@dataclass(slots=True)
class Result:
    """What a soak came to."""

    sessions: int
    num_workers: int
    right: int = 0
    seconds: float = 0.0
    machine: str = f"{platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}"
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    samples: list[Sample] = field(default_factory=list)
    growth_mb: dict[int, float] = field(default_factory=dict)
    growth_descriptors: dict[int, float] = field(default_factory=dict)
    flat: bool = False

    def conclude(self) -> None:
        """Work out by how much each worker has grown since the warm-up: the slope of a fitted line, times its length.

        Workers that did not live from the warm-up to the end make the result not flat.
        """
        steady = self.samples[int(len(self.samples) * WARM_UP_SHARE) :]
        sessions = [float(sample.sessions) for sample in steady]
        lasting = set.intersection(*(set(sample.rss_mb) for sample in steady))
        for pid in sorted(lasting):
            self.growth_mb[pid] = growth(sessions, [sample.rss_mb[pid] for sample in steady])
            self.growth_descriptors[pid] = growth(sessions, [float(sample.descriptors[pid]) for sample in steady])
        self.flat = (
            len(lasting) == self.num_workers
            and max(self.growth_mb.values()) < FLAT_MB
            and max(self.growth_descriptors.values()) < FLAT_DESCRIPTORS
        )


def growth(x: Sequence[float], y: Sequence[float]) -> float:
    """Return how much the line of least squares through the points rises from the first to the last."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    if not spread:
        return 0.0
    slope = sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True)) / spread
    return slope * (x[-1] - x[0])


async def soak(sessions: int, num_workers: int, num_samples: int) -> Result:
    """Run the sessions, showing a line per sample on standard error."""
    result = Result(sessions, num_workers)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "soak.yaml"
        path.write_text(CONFIG.format(workers=num_workers))
        config = load_global_config([path])
    async with Deployment(config) as deployment:
        pid = deployment.servers[0].pid
        assert pid is not None
        began, done = time.perf_counter(), 0
        result.samples.append(take_sample(pid, 0, 0.0))
        for number in range(1, num_samples + 1):
            until = sessions * number // num_samples
            result.right += await run_sessions(config, range(done, until))
            done = until
            await asyncio.sleep(SETTLE_S)
            sample = take_sample(pid, done, time.perf_counter() - began)
            result.samples.append(sample)
            show(sample, result.right)
        result.seconds = time.perf_counter() - began
    result.conclude()
    return result


async def run_sessions(config: GlobalConfig, numbers: range) -> int:
    """Run sessions over new connections, some at once, and return how many were right in all they answered."""
    remaining = iter(numbers)
    instance = config.instances["counter"]
    async with Connections(instance.url, instance.num_workers) as connections:

        async def work() -> int:
            return sum([await is_right(connections, number) for number in remaining])

        return sum(await asyncio.gather(*(work() for _ in range(UNDER_WAY))))


async def is_right(connections: Connections, number: int) -> bool:
    """Run one session."""
    start, added = number % 997, number % 89 + 1
    row = {"responses_create_params": {"input": "count"}, "initial_count": start, "expected_count": start + added}
    requests: list[tuple[str, Any]] = [
        ("/seed_session", row),
        ("/increment_counter", {"count": added}),
        ("/get_counter_value", {}),
        ("/verify", {**row, "response": RESPONSE}),
    ]
    cookies: dict[str, str] = {}
    answers = []
    worker = None
    for path, body in requests:
        connection = connections.another(worker)
        worker = connection.worker
        reply = await connection.post(path, body, cookies)
        if reply.status != 200:
            return False
        cookies.update(reply.cookies)
        answers.append(json.loads(reply.text))
    return bool(answers[2]["count"] == start + added and answers[3]["reward"] == 1.0)


def take_sample(pid: int, sessions: int, seconds: float) -> Sample:
    """Look at the workers of the server whose main process is `pid`."""
    workers = [psutil.Process(worker) for worker in workers_of(pid)]
    return Sample(
        sessions,
        round(seconds, 1),
        {worker.pid: round(worker.memory_info().rss / 2**20, 2) for worker in workers},
        {worker.pid: worker.num_fds() for worker in workers},
    )


def show(sample: Sample, right: int) -> None:
    memory = " ".join(f"{value:7.1f}" for value in sample.rss_mb.values())
    descriptors = " ".join(f"{value:4d}" for value in sample.descriptors.values())
    print(
        f"{sample.sessions:8d} sessions {sample.seconds:7.1f} s  MB {memory}  descriptors {descriptors}"
        f"  right {right / sample.sessions:.4%}",
        file=sys.stderr,
    )


def show_result(result: Result) -> None:
    print(f"{result.started_at}, {result.machine}")
    print(
        f"{result.sessions} sessions (4 requests each) on {result.num_workers} workers in {result.seconds:.0f} s, "
        f"{4 * result.sessions / result.seconds:.0f} requests/s; right: {result.right / result.sessions:.4%}"
    )
    print("worker  MB at start  MB at end  growth after warm-up (MB)  descriptors at end  growth")
    first, last = result.samples[0], result.samples[-1]
    for position, pid in enumerate(result.growth_mb):
        print(
            f"{position:6d}  {first.rss_mb.get(pid, 0.0):11.1f}  {last.rss_mb[pid]:9.1f}  "
            f"{result.growth_mb[pid]:25.2f}  {last.descriptors[pid]:18d}  {result.growth_descriptors[pid]:6.1f}"
        )
    print("flat" if result.flat else "NOT flat")


async def until_stopped(sessions: int, num_workers: int, num_samples: int) -> Result:
    """Run the sessions, or as many as there are when a stop signal comes: then raise `Interrupted`."""
    async with StopSignals(lambda _: print("stopping", file=sys.stderr)):
        return await soak(sessions, num_workers, num_samples)


def main(arguments_given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--sessions", type=positive, default=100_000)
    parser.add_argument("--workers", type=positive, default=4)
    parser.add_argument("--samples", type=positive, default=30, help="at least 3")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result, with all samples, as JSON"
    )
    arguments = parser.parse_args(arguments_given)
    try:
        result = asyncio.run(until_stopped(arguments.sessions, arguments.workers, max(3, arguments.samples)))
    except (Interrupted, KeyboardInterrupt):
        print("interrupted: nothing is left running", file=sys.stderr)
        sys.exit(INTERRUPTED)
    show_result(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    sys.exit(0 if result.flat and result.right == result.sessions else 1)


if __name__ == "__main__":
    main()
