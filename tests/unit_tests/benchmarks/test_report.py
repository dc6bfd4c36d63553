"""Checks, verdicts and the report in its three forms."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.harness.report import as_json, as_markdown, show
from benchmarks.harness.results import BenchmarkResult, Check, Column, Outcome, SuiteResult, Table
from benchmarks.harness.statistics import Spread
from benchmarks.harness.targets import TARGETS, verdicts_of

CPU = Column("cpu_ms", "CPU, ms", 3)
MACHINE = {
    "architecture": "x86_64",
    "cores": 2,
    "memory_gb": 8,
    "system": "Linux 6.1",
    "python": "3.11.7",
    "load_at_start": 0.1,
}


def of(value: float) -> Spread:
    return Spread.of([value])


def table() -> Table:
    made = Table("Counting", (CPU, Column("unmeasured", "never"), Column("ratio", "CPU / bare")))
    for bare, ours in ((0.10, 0.15), (0.20, 0.24), (0.10, 0.14)):
        made.add("bare", {"cpu_ms": bare})
        made.add("ours", {"cpu_ms": ours})
    return made


@pytest.fixture
def result() -> SuiteResult:
    counted = table()
    counted.add_ratios("bare", "cpu_ms", "ratio")
    checks = [
        Check(1, "ours / bare", counted.ratio("ours", "bare", "cpu_ms"), 1.5),
        Check(2, "ours / other", of(1.21), 1.1),
    ]
    benchmark = BenchmarkResult("counter", [counted], checks, ["other [/opt/other:1]: it is not installed"])
    return SuiteResult("2026-01-02 03:04 UTC", MACHINE, {"rounds": 3}, [benchmark])


def test_a_table_compares_round_by_round() -> None:
    ratio = table().ratio("ours", "bare", "cpu_ms")
    assert ratio is not None
    assert ratio.median == pytest.approx(1.4)
    difference = table().difference("ours", "bare", "cpu_ms")
    assert difference is not None
    assert difference.median == pytest.approx(0.04)


def test_what_was_not_measured_has_no_ratio() -> None:
    assert table().ratio("ours", "missing", "cpu_ms") is None
    assert table().spread("missing", "cpu_ms") is None


@pytest.mark.parametrize(
    ("check", "outcome", "verdict"),
    [
        (Check(1, "", of(1.5), 1.5), Outcome.MET, "met"),
        (Check(1, "", of(1.2), 1.1, stretch=1.0), Outcome.MISSED, "missed by 9%"),
        (Check(1, "", of(1.05), 1.1, stretch=1.0), Outcome.MET, "met"),
        (Check(1, "", of(0.99), 1.1, stretch=1.0), Outcome.MET, "met, and its stretch"),
        (Check(1, "", of(1.1005), 1.1), Outcome.MISSED, "missed by 0.0%"),
        (Check(1, "", of(120), 150, at_least=True), Outcome.MISSED, "missed by 20%"),
        (Check(1, "", of(151), 150, at_least=True), Outcome.MET, "met"),
        (Check(1, "", None, 150), Outcome.NOT_MEASURED, "not measured"),
    ],
)
def test_a_check_says_whether_it_is_met_or_by_how_much_it_is_missed(
    check: Check, outcome: Outcome, verdict: str
) -> None:
    assert (check.outcome, check.verdict) == (outcome, verdict)


def test_every_target_has_a_verdict_and_one_missed_check_misses_it() -> None:
    met, missed, unknown = of(1.0), of(2.0), None
    verdicts = verdicts_of(
        [Check(2, "", met, 1), Check(2, "", missed, 1), Check(3, "", met, 1), Check(3, "", unknown, 1)]
    )
    outcomes = {verdict.target: verdict.outcome for verdict in verdicts}
    assert list(outcomes) == list(TARGETS)
    assert (outcomes[1], outcomes[2], outcomes[3]) == (Outcome.NOT_MEASURED, Outcome.MISSED, Outcome.NOT_MEASURED)
    assert verdicts_of([Check(4, "", of(1.0), 1)])[3].outcome is Outcome.MET


def test_markdown_holds_targets_tables_and_notices(result: SuiteResult) -> None:
    text = as_markdown(result)
    assert "2026-01-02 03:04 UTC, 2 cores (x86_64), 8 GB" in text
    assert "| 1. Framework overhead, one worker | ours / bare | at most 1.5 | 1.40 (1.30 - 1.45) | met |" in text
    assert "| ours / other | at most 1.1 | 1.21 | missed by 10% |" in text
    assert "| 9. Tail |  |  |  | not measured |" in text
    assert "### counter: Counting" in text
    assert "| alternative | CPU, ms | CPU / bare |\n|---|---|---|\n| bare | 0.100 (0.100 - 0.150) | 1.00" in text
    assert "*counter:* other [/opt/other:1]: it is not installed" in text


def test_json_holds_every_rounds_value_and_the_verdicts(result: SuiteResult) -> None:
    content = json.loads(as_json(result))
    (benchmark,) = content["benchmarks"]
    assert benchmark["tables"][0]["samples"]["ours"]["cpu_ms"] == [0.15, 0.24, 0.14]
    assert [verdict["outcome"] for verdict in content["verdicts"][:3]] == ["met", "missed", "not measured"]
    assert content["verdicts"][0]["checks"][0]["verdict"] == "met"


def test_the_terminal_shows_the_same(result: SuiteResult) -> None:
    console = Console(file=io.StringIO(), width=200)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("counter: Counting", "0.150", "(0.145 - 0.195)", "missed by 10%", "9. Tail", "not measured"):
        assert part in text
    assert "counter: other [/opt/other:1]: it is not installed" in text
    assert "[dim]" not in text
