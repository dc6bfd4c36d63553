"""The report of a run: on the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.harness.results import BenchmarkResult, Check, Column, Outcome, SuiteResult, Table
from benchmarks.harness.statistics import Spread
from benchmarks.harness.targets import verdicts_of

_STYLES: Final = {Outcome.MET: "green", Outcome.MISSED: "red", Outcome.NOT_MEASURED: "yellow"}
_TARGET_HEADINGS: Final = ("target", "what", "limit", "measured", "verdict")
_NOTE: Final = "Each cell: the median over the rounds, and in brackets the quartiles."


def as_json(result: SuiteResult) -> bytes:
    """Return everything: every round's values, the checks with their verdicts, the notices."""
    content = asdict(result)
    content["verdicts"] = [
        {
            "target": verdict.target,
            "title": verdict.title,
            "outcome": verdict.outcome,
            "checks": [{**asdict(check), "verdict": check.verdict} for check in verdict.checks],
        }
        for verdict in verdicts_of(result.checks)
    ]
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def as_markdown(result: SuiteResult) -> str:
    """Return the report as Markdown."""
    parts = [f"{headline(result)}.\n\n{_NOTE}"]
    if result.checks:
        parts.append("### Targets\n\n" + _markdown(_TARGET_HEADINGS, target_rows(result)))
    for benchmark in result.benchmarks:
        parts += [
            f"### {_title(benchmark, table)}\n\n{_markdown(headings(table), rows(table))}"
            for table in benchmark.tables
            if table.samples
        ]
        parts += [f"*{benchmark.name}:* {notice}" for notice in benchmark.notices]
    return "\n\n".join(parts) + "\n"


def show(result: SuiteResult, console: Console) -> None:
    """Show the report."""
    console.print(f"\n[bold]{headline(result)}[/bold]", highlight=False)
    console.print(f"[dim]{_NOTE}[/dim]", highlight=False)
    for benchmark in result.benchmarks:
        show_benchmark(benchmark, console)
        for notice in benchmark.notices:
            console.print(f"[yellow]{benchmark.name}:[/yellow]", escape(notice), highlight=False)
    if not result.checks:
        return
    shown = RichTable(*_TARGET_HEADINGS, title="Targets", title_justify="left", title_style="bold")
    for row, outcome in zip(target_rows(result), _outcomes(result), strict=True):
        shown.add_row(*row[:-1], Text(row[-1], style=_STYLES[outcome]))
    console.print()
    console.print(shown)


def show_benchmark(benchmark: BenchmarkResult, console: Console) -> None:
    """Show the tables of one benchmark."""
    for table in benchmark.tables:
        if not table.samples:
            continue
        shown = RichTable(title=_title(benchmark, table), title_justify="left", title_style="bold")
        for position, heading in enumerate(headings(table)):
            shown.add_column(heading, justify="right" if position else "left", overflow="fold")
        for alternative, *cells in rows(table):
            # The quartiles below the median: the tables are wide enough.
            shown.add_row(alternative, *(cell.replace(" (", "\n[dim](").replace(")", ")[/dim]") for cell in cells))
        console.print()
        console.print(shown)


def headline(result: SuiteResult) -> str:
    """Return when and on what the run was."""
    machine = result.machine
    return (
        f"{result.started_at}, {machine['cores']} cores ({machine['architecture']}), {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}; load average at the start {machine['load_at_start']}"
    )


def headings(table: Table) -> list[str]:
    """Return the headings of a table's columns; those without any value are left out."""
    return ["alternative", *(column.heading for column in _columns(table))]


def rows(table: Table) -> list[list[str]]:
    """Return the cells of a table, in the order in which alternatives were named first."""
    columns = _columns(table)
    return [
        [alternative, *(_cell(table.spread(alternative, column.key), column.digits) for column in columns)]
        for alternative in table.samples
    ]


def target_rows(result: SuiteResult) -> list[list[str]]:
    """Return a row for every check, and one for every target that has none."""
    found = []
    for verdict in verdicts_of(result.checks):
        title = f"{verdict.target}. {verdict.title}"
        found += [
            [title if not position else "", check.what, _limit(check), _cell(check.value, 2), check.verdict]
            for position, check in enumerate(verdict.checks)
        ] or [[title, "", "", "", Outcome.NOT_MEASURED]]
    return found


def _outcomes(result: SuiteResult) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for verdict in verdicts_of(result.checks):
        outcomes += [check.outcome for check in verdict.checks] or [Outcome.NOT_MEASURED]
    return outcomes


def _limit(check: Check) -> str:
    bound = "at least" if check.at_least else "at most"
    return f"{bound} {check.limit:g} {check.unit}".rstrip()


def _title(benchmark: BenchmarkResult, table: Table) -> str:
    return f"{benchmark.name}: {table.title}"


def _columns(table: Table) -> list[Column]:
    return [column for column in table.columns if any(column.key in row for row in table.samples.values())]


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    median = f"{spread.median:,.{digits}f}"
    if spread.count < 2:
        return median
    return f"{median} ({spread.low:,.{digits}f} - {spread.high:,.{digits}f})"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
