"""The command line: which benchmarks to run, how, and where the report goes."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import soak
from benchmarks.harness.arguments import output_file, positive
from benchmarks.harness.report import as_json, as_markdown, show
from benchmarks.harness.results import BenchmarkResult, SuiteResult
from benchmarks.harness.run import Run, machine, private_folder
from benchmarks.suite import (
    counter,
    events,
    figures,
    live_sessions,
    mcp,
    payloads,
    placement,
    rollouts,
    slow_requests,
    startup,
    tail,
)
from nemo_gym.deployment import StopSignals
from nemo_gym.errors import Interrupted

ROUNDS: Final = 5
ALL: Final = "all"
SOAK: Final = "soak"
_INTERRUPTED: Final = 130
_WIDTH: Final = 180


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark by its name.

    Attributes:
        name: What it is called by.
        summary: What it measures.
        run: Does it.
    """

    name: str
    summary: str
    run: Callable[[Run], Awaitable[BenchmarkResult]]


SUITE: Final = (
    Benchmark(
        "counter", "server CPU per request: bare, ours, by ServerClient, HAProxy (targets 1, 2, 3, 6)", counter.run
    ),
    Benchmark("mcp", "the same over MCP", mcp.run),
    Benchmark("tail", "p99 over p50 under 16 connections (target 9)", tail.run),
    Benchmark("placement", "how evenly sessions are spread (target 4)", placement.run),
    Benchmark("payloads", "bodies of 1 KB to 10 MB, up and down (target 5)", payloads.run),
    Benchmark("events", "server-sent events (target 5)", events.run),
    Benchmark("slow_requests", "short requests beside 1,000 slow ones", slow_requests.run),
    Benchmark("live_sessions", "memory of 20,000 live sessions", live_sessions.run),
    Benchmark("rollouts", "whole rollouts through gym eval run (target 7)", rollouts.run),
    Benchmark("figures", "what the figures of the workers cost (target 10)", figures.run),
    Benchmark("startup", "time to serve, time to import (target 8)", startup.run),
)


def main() -> None:
    """Run the command."""
    parser = _parser()
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.list:
        show_list(Console())
        return
    if SOAK in arguments.name:
        if len(arguments.name) > 1:
            parser.error("soak runs alone; python -m benchmarks.soak has its options")
        if arguments.rounds or arguments.quick or arguments.markdown:
            parser.error("soak has no --rounds, --quick or --markdown; python -m benchmarks.soak has its options")
        soak.main(["--json", str(arguments.json)] if arguments.json else [])
    if arguments.json and arguments.markdown and arguments.json.resolve() == arguments.markdown.resolve():
        parser.error("--json and --markdown name the same file")
    try:
        benchmarks = chosen(arguments.name or [ALL])
    except KeyError as error:
        parser.error(f"there is no benchmark {error}; there are {', '.join(_names())}")
    try:
        result = asyncio.run(run_suite(benchmarks, console, rounds=arguments.rounds, quick=arguments.quick))
    except (Interrupted, KeyboardInterrupt):
        console.print("interrupted: nothing is left running")
        sys.exit(_INTERRUPTED)
    # Before it is shown: whoever reads standard output may be gone.
    forms: list[tuple[Path | None, Callable[[SuiteResult], bytes]]] = [
        (arguments.json, as_json),
        (arguments.markdown, lambda result: as_markdown(result).encode()),
    ]
    are_written = [write_report(path, form(result), console) for path, form in forms if path is not None]
    show(result, result_console())
    if not all(are_written):
        sys.exit(1)


def write_report(path: Path, content: bytes, console: Console) -> bool:
    """Write one form of the report; return whether it worked, and tell if it did not."""
    try:
        path.write_bytes(content)
    except OSError as error:
        told = f"can't write {path}: {error.strerror}"
        console.print(told, style="red", markup=False, highlight=False, soft_wrap=True)
        return False
    return True


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks of these names, in the order of the suite.

    Raises:
        KeyError: There is none of a name.
    """
    known = {ALL: SUITE, **{benchmark.name: (benchmark,) for benchmark in SUITE}}
    wanted = [benchmark for name in names for benchmark in known[name]]
    return [benchmark for benchmark in SUITE if benchmark in wanted]


def show_list(console: Console) -> None:
    """Show what there is."""
    for benchmark in SUITE:
        console.print(f"{benchmark.name:14} {benchmark.summary}", highlight=False, soft_wrap=True)
    soak_summary = "do workers grow in a long run? (by name only; python -m benchmarks.soak has its options)"
    console.print(f"{SOAK:14} {soak_summary}", highlight=False, soft_wrap=True)


def result_console() -> Console:
    """Return the console for tables; a file or pipe gets them wide."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


async def run_suite(
    benchmarks: Sequence[Benchmark], console: Console, *, rounds: int | None = None, quick: bool = False
) -> SuiteResult:
    """Run benchmarks one after the other; one that fails is noted, and the others go on.

    Args:
        benchmarks: What to run.
        console: Where progress is shown.
        rounds: How often each alternative is measured; by default 5, and 1 when it is to be quick.
        quick: Whether to do as little as shows that all works.

    Raises:
        Interrupted: By Ctrl-C or another stop signal, after everything has been stopped.
    """
    rounds = rounds or (1 if quick else ROUNDS)
    settings = {"benchmarks": [benchmark.name for benchmark in benchmarks], "rounds": rounds, "quick": quick}
    result = SuiteResult(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), machine(), settings)
    async with StopSignals(lambda _: console.print("stopping")):
        with private_folder() as folder:
            for position, benchmark in enumerate(benchmarks):
                console.print(f"[bold]{benchmark.name}[/bold] ({position + 1} of {len(benchmarks)})", highlight=False)
                result.benchmarks.append(await _run_one(benchmark, Run(folder, rounds, quick, console)))
    return result


async def _run_one(benchmark: Benchmark, run: Run) -> BenchmarkResult:
    began = time.perf_counter()
    try:
        result = await benchmark.run(run)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the others' results are kept
        run.notice(f"the benchmark failed: {type(error).__name__}: {error}")
        result = BenchmarkResult(benchmark.name)
    result.notices = run.notices
    result.seconds = round(time.perf_counter() - began, 1)
    run.step(f"{result.seconds:.0f} s")
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the framework; docs/performance.md tells what is measured."
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"one or more of {', '.join(_names())}")
    parser.add_argument("--list", action="store_true", help="tell what there is")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds per alternative ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="as little as shows that all works; says nothing of speed")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything, with each round's values")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the report as Markdown")
    return parser


def _names() -> list[str]:
    return [ALL, *(benchmark.name for benchmark in SUITE), SOAK]
