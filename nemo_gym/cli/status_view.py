"""How `gym env status` looks: each server with its workers beneath it, as many columns as the window has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from nemo_gym.deployment.diagnosis import Finding, Severity, seconds_text
from nemo_gym.deployment.rates import WorkerRates, total_rates
from nemo_gym.deployment.status import DeploymentStatus, ServerStatus
from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures

_INDENT: Final = "  "
_GAP: Final = 2
_UNKNOWN: Final = "-"
_PASSING: Final = ("starting", "leaving")
_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


@dataclass(frozen=True, slots=True)
class _Row:
    """What one line of a server's table is made of: a worker, or all of them together."""

    name: str
    state: Text
    figures: WorkerFigures
    rates: WorkerRates | None
    age: float | None


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; the higher its rank, the sooner a narrow window goes without it."""

    title: str
    rank: int
    cell: Callable[[_Row], str | Text]
    silent_too: bool = False
    left: bool = False


def _quantile(q: float, of: Callable[[_Row], Histogram]) -> Callable[[_Row], str]:
    def cell(row: _Row) -> str:
        histogram = of(row)
        return _seconds(histogram.quantile(q)) if histogram.count else _UNKNOWN

    return cell


def _request_seconds(row: _Row) -> Histogram:
    return row.figures.request_seconds if row.rates is None else row.rates.request_seconds


def _per_second(of: Callable[[WorkerRates], float]) -> Callable[[_Row], str]:
    return lambda row: _UNKNOWN if row.rates is None else f"{of(row.rates):.1f}"


def _cpu(row: _Row) -> str:
    return f"{row.figures.cpu_s:.0f}s" if row.rates is None else f"{row.rates.cpu:.0%}"


_COLUMNS: Final = (
    _Column("worker", 0, lambda row: row.name, silent_too=True, left=True),
    _Column("state", 0, lambda row: row.state, silent_too=True, left=True),
    _Column("process", 6, lambda row: str(row.figures.pid or ""), silent_too=True),
    _Column("sessions", 0, lambda row: str(row.figures.sessions_open)),
    _Column("new/s", 3, _per_second(lambda rates: rates.sessions_per_s)),
    _Column("begun", 6, lambda row: str(row.figures.sessions_created)),
    _Column("ended", 6, lambda row: str(row.figures.sessions_ended)),
    _Column("lost", 1, lambda row: str(row.figures.sessions_lost), silent_too=True),
    _Column("in flight", 1, lambda row: str(row.figures.requests_in_flight)),
    _Column("req/s", 2, _per_second(lambda rates: rates.requests_per_s)),
    _Column("handled", 4, lambda row: str(row.figures.requests_handled)),
    _Column("5xx", 4, lambda row: str(row.figures.replies.get("5xx", 0))),
    _Column("410", 3, lambda row: str(sum(row.figures.lost_replies.values()))),
    _Column("out", 5, lambda row: str(row.figures.forwarded_out)),
    _Column("in", 5, lambda row: str(row.figures.forwarded_in)),
    _Column("p50", 6, _quantile(0.5, _request_seconds)),
    _Column("p99", 3, _quantile(0.99, _request_seconds)),
    _Column("hop p99", 5, _quantile(0.99, lambda row: row.figures.hop_seconds)),
    _Column("lag", 2, lambda row: _seconds(row.figures.loop_lag_s)),
    _Column("memory", 2, lambda row: f"{row.figures.memory_bytes / 1e6:.0f}M"),
    _Column("cpu", 4, _cpu),
    _Column("restarts", 1, lambda row: str(row.figures.restarts), silent_too=True),
    _Column("up", 6, lambda row: "" if row.age is None else seconds_text(row.age).replace(" ", ""), silent_too=True),
)
_RATES: Final = {"new/s", "req/s"}


class StatusView:
    """The state of all deployments, to be printed as wide as it may be.

    Args:
        deployments: What was found.
        heading: A line above all, for one of many looks.
        fits_window: Whether to leave out what does not fit into the window's height, workers that are well first.
    """

    def __init__(
        self, deployments: Sequence[DeploymentStatus], *, heading: str | None = None, fits_window: bool = False
    ) -> None:
        self._deployments = deployments
        self._heading = heading
        self._fits_window = fits_window

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what is shown, line by line."""
        lines = self._wrapped(console, options.max_width, all_workers=True)
        if self._fits_window and len(lines) > console.height:
            lines = self._wrapped(console, options.max_width, all_workers=False)
        if self._fits_window and len(lines) > console.height:
            kept = max(1, console.height - 1)
            more = Text(f"({len(lines) - kept} more lines do not fit)", style="dim", no_wrap=True)
            lines = [*lines[:kept], more]
        yield from lines

    def _wrapped(self, console: Console, width: int, *, all_workers: bool) -> list[Text]:
        found = []
        for line in self._lines(width, all_workers=all_workers):
            if line.no_wrap:
                line.truncate(width, overflow="ellipsis")
                found.append(line)
            else:
                wrapped = line.wrap(console, width)
                for part in wrapped:
                    part.rstrip()
                found += wrapped
        return found

    def _lines(self, width: int, *, all_workers: bool) -> Iterator[Text]:
        if self._heading is not None:
            yield Text(self._heading, style="dim", no_wrap=True)
        if not self._deployments:
            yield Text("No deployment is running.")
        for position, deployment in enumerate(self._deployments):
            if position:
                yield Text()
            # From the first of many looks on, so that the columns stay where they are.
            with_rates = self._heading is not None
            yield from _deployment_lines(deployment, width, all_workers=all_workers, with_rates=with_rates)


def _deployment_lines(status: DeploymentStatus, width: int, *, all_workers: bool, with_rates: bool) -> Iterator[Text]:
    record = status.record
    yield Text(f"Deployment {record.pid}, since {record.started_at}, in {record.working_dir}", style="bold")
    yield Text(f"head server {record.head_url}: {status.health}; logs: {record.log_dir}")
    findings = [finding for server in status.servers for finding in server.findings]
    for finding in findings:
        yield _finding_line(finding)
    rows = {server.name: list(_rows(server, with_rates=with_rates)) for server in status.servers}
    columns, widths = _fitting([row for of_one in rows.values() for row in of_one], width, with_rates=with_rates)
    for server in status.servers:
        yield _server_line(server)
        if not rows[server.name]:
            continue
        yield _joined([column.title for column in columns], columns, widths, style="dim")
        shown = [row for row in rows[server.name] if all_workers or row.state.plain != "ok" or row.age is None]
        for row in shown:
            yield _joined([_cell(column, row) for column in columns], columns, widths)
        if len(shown) < len(rows[server.name]):
            yield Text(f"{_INDENT}({len(rows[server.name]) - len(shown)} more that are ok)", style="dim", no_wrap=True)


def _finding_line(finding: Finding) -> Text:
    return Text.assemble((f"{finding.severity}: ", _STYLES[finding.severity]), f"{finding.server}: {finding.text}")


def _server_line(server: ServerStatus) -> Text:
    # Signals change the number while the server runs.
    wanted = server.num_workers if server.figures is None else server.figures.num_workers
    workers = "1 worker" if wanted == 1 else f"{wanted} workers"
    return Text.assemble(
        (server.name, "bold"),
        " ",
        (server.health, "green" if server.health == "ok" else "bold red"),
        f"  {server.kind}, {workers}, {server.url}",
        no_wrap=True,
    )


def _rows(server: ServerStatus, *, with_rates: bool) -> Iterator[_Row]:
    figures, rates = server.figures, server.rates if with_rates else {}
    if figures is None:
        return
    for worker in figures.workers:
        age = max(0.0, figures.at - worker.started_at) if worker.pid else None
        state = _state(worker, server.findings)
        yield _Row(str(worker.slot), state, worker, rates.get(worker.pid), age)
    if len(figures.workers) > 1:
        yield _Row("all", Text(), _together(figures), total_rates(rates.values()), None)


def _state(worker: WorkerFigures, findings: Sequence[Finding]) -> Text:
    """The worst that was found of a worker, in a word or two."""
    if worker.state in _PASSING:
        return Text(worker.state, style="dim")
    of_it = [finding for finding in findings if finding.worker == worker.slot]
    if of_it:
        return Text(of_it[0].kind.replace("_", " "), style=_STYLES[of_it[0].severity])
    return Text("ok", style="green") if worker.responding else Text("no answer", style="bold red")


def _together(figures: ServerFigures) -> WorkerFigures:
    return WorkerFigures(
        sessions_open=figures.sessions_open,
        sessions_created=figures.sessions_created,
        sessions_ended=figures.sessions_ended,
        sessions_lost=figures.sessions_lost,
        requests_in_flight=figures.requests_in_flight,
        requests_handled=figures.requests_handled,
        forwarded_out=figures.forwarded,
        forwarded_in=sum(worker.forwarded_in for worker in figures.workers),
        replies=figures.replies,
        lost_replies=figures.lost_replies,
        request_seconds=figures.request_seconds,
        hop_seconds=figures.hop_seconds,
        loop_lag_s=max((worker.loop_lag_s for worker in figures.workers), default=0.0),
        memory_bytes=figures.memory_bytes,
        cpu_s=figures.cpu_s,
        restarts=figures.restarts,
    )


def _fitting(rows: Sequence[_Row], width: int, *, with_rates: bool) -> tuple[list[_Column], list[int]]:
    """Return the columns that there is room for, and their widths; those of rank 0 are always there."""
    columns = [column for column in _COLUMNS if with_rates or column.title not in _RATES]
    wanted = {
        column.title: max([len(column.title), *(len(str(_cell(column, row))) for row in rows)]) for column in columns
    }
    while len(_INDENT) + sum(wanted[column.title] + _GAP for column in columns) - _GAP > width:
        last = max(column.rank for column in columns)
        if last == 0:
            break
        # One at a time, from the right.
        columns.remove([column for column in columns if column.rank == last][-1])
    return columns, [wanted[column.title] for column in columns]


def _cell(column: _Column, row: _Row) -> str | Text:
    return column.cell(row) if row.figures.responding or column.silent_too else _UNKNOWN


def _joined(cells: Sequence[str | Text], columns: Sequence[_Column], widths: Sequence[int], *, style: str = "") -> Text:
    line = Text(_INDENT, style=style, no_wrap=True)
    for position, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        text = cell.copy() if isinstance(cell, Text) else Text(cell)
        text.align("left" if column.left else "right", width)
        line.append(" " * _GAP if position else "")
        line.append_text(text)
    line.rstrip()
    return line


def _seconds(seconds: float) -> str:
    """A length of time in few characters: `0.4ms`, `23ms`, `1.2s`."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f}ms"
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
