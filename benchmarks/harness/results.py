"""What a benchmark comes to: tables with every round's values, checks against the targets, notices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from benchmarks.harness.statistics import Spread, differences, ratios


@dataclass(frozen=True, slots=True)
class Column:
    """One thing that was measured.

    Attributes:
        key: Its name in the samples.
        heading: Its name in reports, with the unit.
        digits: How many digits stand behind the point.
    """

    key: str
    heading: str
    digits: int = 2


@dataclass(slots=True)
class Table:
    """Some alternatives, measured in the same rounds.

    Attributes:
        title: What they did.
        columns: What was measured, in the order to show it.
        samples: By alternative and column, one value per round.
    """

    title: str
    columns: Sequence[Column]
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, alternative: str, values: dict[str, float]) -> None:
        """Add what a round came to for an alternative."""
        row = self.samples.setdefault(alternative, {})
        for key, value in values.items():
            row.setdefault(key, []).append(value)

    def values(self, alternative: str, key: str) -> list[float]:
        """Return a value of each round; none where the alternative was not measured."""
        return self.samples.get(alternative, {}).get(key, [])

    def spread(self, alternative: str, key: str) -> Spread | None:
        """Return the spread of a value over the rounds."""
        values = self.values(alternative, key)
        return Spread.of(values) if values else None

    def ratio(self, alternative: str, base: str, key: str) -> Spread | None:
        """Return the spread of the ratio of two alternatives, taken round by round."""
        found = ratios(self.values(alternative, key), self.values(base, key))
        return Spread.of(found) if found else None

    def difference(self, alternative: str, base: str, key: str) -> Spread | None:
        """Return the spread of the difference of two alternatives, taken round by round."""
        found = differences(self.values(alternative, key), self.values(base, key))
        return Spread.of(found) if found else None

    def add_ratios(self, base: str, key: str, name: str, alternatives: Collection[str] | None = None) -> None:
        """Add, as `name`, the ratio of each alternative (or of these only) to `base` in `key`, round by round."""
        for alternative, row in self.samples.items():
            found = ratios(row.get(key, []), self.values(base, key))
            if found and (alternatives is None or alternative in alternatives):
                row[name] = found


class Outcome(StrEnum):
    """Whether a target was reached."""

    MET = "met"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Check:
    """One number that a target asks for.

    Attributes:
        target: The target's number.
        what: What the number is.
        value: What was measured; None where it could not be.
        limit: What it is to be at most, or at least.
        at_least: Whether the limit is a lower one.
        stretch: A limit that would be better still.
        unit: Of value and limit; empty for ratios.
    """

    target: int
    what: str
    value: Spread | None
    limit: float
    at_least: bool = False
    stretch: float | None = None
    unit: str = ""

    @property
    def outcome(self) -> Outcome:
        """Whether the median keeps the limit."""
        if self.value is None:
            return Outcome.NOT_MEASURED
        return Outcome.MET if self._keeps(self.limit) else Outcome.MISSED

    @property
    def verdict(self) -> str:
        """The outcome in words: a missed target says by how much."""
        if self.value is None or self.outcome is Outcome.NOT_MEASURED:
            return Outcome.NOT_MEASURED
        if self.outcome is Outcome.MISSED:
            away = abs(self.value.median - self.limit) / abs(self.limit)
            return f"missed by {away:.0%}" if away >= 0.01 else f"missed by {away:.1%}"
        return "met, and its stretch" if self.stretch is not None and self._keeps(self.stretch) else "met"

    def _keeps(self, limit: float) -> bool:
        assert self.value is not None
        return self.value.median >= limit if self.at_least else self.value.median <= limit


@dataclass(slots=True)
class BenchmarkResult:
    """What one benchmark came to.

    Attributes:
        name: The benchmark.
        tables: What was measured.
        checks: What of it the targets ask for.
        notices: What was left out, and what failed.
        seconds: How long it took.
    """

    name: str
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class SuiteResult:
    """What a whole run came to.

    Attributes:
        started_at: ISO 8601, UTC.
        machine: What it ran on, by names of things.
        settings: How it was called.
        benchmarks: In the order in which they ran.
    """

    started_at: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    benchmarks: list[BenchmarkResult] = field(default_factory=list)

    @property
    def checks(self) -> list[Check]:
        """All checks, by target."""
        return sorted((it for benchmark in self.benchmarks for it in benchmark.checks), key=lambda it: it.target)
