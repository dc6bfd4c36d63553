"""Intervals for a run's figures, and what sets two runs apart.

The unit is the task: rollouts of one task are not independent, so a run is as sure of its mean as it has tasks, not
rollouts. Every figure of a run is the mean over tasks of each task's mean. Its interval is the percentile bootstrap
over tasks (Efron and Tibshirani 1993, chapter 13): tasks are drawn with replacement, with all their rollouts. Two
runs are compared on the tasks that both have: the same draw serves both, so what makes a task hard for both cancels
out. Without common tasks each run is drawn by itself.

A pass rate of a single task has the interval of Wilson (1927), the difference of two of them that of Newcombe (1998,
method 10).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nemo_gym.reports.runs import Run, Task

COMPARED: Final = ("reward", "passed", "output_tokens", "turns", "tool_calls", "seconds")
FEW_TASKS: Final = 30
"""With fewer tasks than this a percentile interval tends to be too narrow."""

_SEED: Final = 20240229
_DRAWS: Final = 10_000
_DRAWS_OF_MANY: Final = 2_000
_MANY_TASKS: Final = 2_000
_DRAWN_AT_ONCE: Final = 2_000_000
_Z: Final = NormalDist().inv_cdf(0.975)
_EQUAL: Final = 1e-9

Floats: TypeAlias = NDArray[np.float64]
PairBy: TypeAlias = Literal["row", "index"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval.

    Args:
        value: The figure; None where nothing tells it.
        low: The interval's lower end; None where there is no interval: one task, or every task fared the same.
        high: Its upper end.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure of two runs.

    Args:
        name: One of `COMPARED`.
        first: Of the first run.
        second: Of the second run.
        difference: Second less first.
        tasks: How many tasks it is from; of the smaller run where they are not paired.
    """

    name: str
    first: Interval
    second: Interval
    difference: Interval
    tasks: int


@dataclass(frozen=True, slots=True)
class TaskPair:
    """A task that both runs have.

    Args:
        first: In the first run.
        second: In the second.
        difference: Its mean reward in the second less that in the first; None where one has no reward.
        pass_difference: Its pass rate in the second less that in the first, with the interval of Newcombe.
    """

    first: Task
    second: Task
    difference: float | None
    pass_difference: Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """What sets a second run apart from a first.

    Args:
        paired_by: What told that two tasks are the same: `row`, `index`, or None where no task has results in both.
        pairs: The tasks that both have.
        only_first: How many tasks have a reward in the first run only.
        only_second: How many in the second only.
        measures: The figures side by side.
        better: Tasks with a higher mean reward in the second run.
        same: Tasks with the same.
        worse: Tasks with a lower one.
        sign_test: The two-sided p-value of the sign test on better and worse; None when no task differs.
    """

    paired_by: PairBy | None
    pairs: tuple[TaskPair, ...]
    only_first: int
    only_second: int
    measures: tuple[Measured, ...]
    better: int
    same: int
    worse: int
    sign_test: float | None


def run_intervals(run: Run) -> dict[str, Interval]:
    """Return every measure of a run with its interval, clustered by task."""
    values = _task_means(run, run.tasks)
    draws = _draw(values)
    return {name: _interval(values[:, at], draws[:, at]) for at, name in enumerate(COMPARED)}


def compare(first: Run, second: Run, pair_by: PairBy | None = None) -> Comparison:
    """Compare two runs.

    Args:
        first: The one that is compared with.
        second: The one that is asked about.
        pair_by: What tells that two tasks are the same: `row`, the digest of the row's content, or `index`, the row's
            number; by default the digest, or the number where a run has no digests.
    """
    chosen = pair_by or ("row" if _has_digests(first) and _has_digests(second) else "index")
    ours, theirs = _matched(first, second, chosen)
    pairs = tuple(_pair(first, a, second, b) for a, b in zip(ours, theirs, strict=True))
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    better = sum(difference > _EQUAL for difference in differences)
    worse = sum(difference < -_EQUAL for difference in differences)
    paired = any(a.results and b.results for a, b in zip(ours, theirs, strict=True))
    measures = _paired(first, ours, second, theirs) if paired else _unpaired(first, second)
    return Comparison(
        paired_by=chosen if paired else None,
        pairs=pairs,
        only_first=sum(bool(task.places) for task in first.tasks) - len(differences),
        only_second=sum(bool(task.places) for task in second.tasks) - len(differences),
        measures=tuple(measures),
        better=better,
        same=len(differences) - better - worse,
        worse=worse,
        sign_test=sign_test(better, worse),
    )


def wilson(passes: int, rollouts: int) -> Interval:
    """Return a pass rate with Wilson's interval; without a value for no rollouts."""
    if not rollouts:
        return Interval(None)
    rate = passes / rollouts
    scale = 1 + _Z**2 / rollouts
    middle = (rate + _Z**2 / (2 * rollouts)) / scale
    half = _Z / scale * math.sqrt(rate * (1 - rate) / rollouts + _Z**2 / (4 * rollouts**2))
    return Interval(rate, max(0.0, middle - half), min(1.0, middle + half))


def newcombe(first: Interval, second: Interval) -> Interval:
    """Return the difference of two independent pass rates that have Wilson's intervals, second less first."""
    values = (first.value, first.low, first.high, second.value, second.low, second.high)
    if any(value is None for value in values):
        return Interval(None)
    a, a_low, a_high, b, b_low, b_high = (float(value) for value in values if value is not None)
    difference = b - a
    return Interval(
        difference, difference - math.hypot(b - b_low, a_high - a), difference + math.hypot(b_high - b, a - a_low)
    )


def sign_test(better: int, worse: int) -> float | None:
    """Return the exact two-sided p-value for as many tasks better and worse, if each were as likely; None for none."""
    n = better + worse
    if not n:
        return None
    fewer = min(better, worse)
    # Summed as integers and divided once: the powers of two are beyond floats from 1,024 tasks on.
    ways = term = 1
    for k in range(fewer):
        term = term * (n - k) // (k + 1)
        ways += term
    return min(1.0, float(2 * ways / 2**n))


def _pair(first: Run, a: Task, second: Run, b: Task) -> TaskPair:
    difference = second.mean(b, "reward") - first.mean(a, "reward")
    return TaskPair(
        a,
        b,
        None if math.isnan(difference) else difference,
        newcombe(wilson(first.passes(a), len(a.places)), wilson(second.passes(b), len(b.places))),
    )


def _has_digests(run: Run) -> bool:
    return all(task.digest for task in run.tasks if task.results)


def _matched(first: Run, second: Run, pair_by: PairBy) -> tuple[list[Task], list[Task]]:
    """Return the tasks that both runs have, those of the one and those of the other in the same order."""
    firsts, seconds = _keyed(first, pair_by), _keyed(second, pair_by)
    matched = [(firsts[key], seconds[key]) for key in firsts if key in seconds]
    # A task that only failed has no digest. It goes with the row of its number: no figure depends on it.
    paired = {a.index for a, _ in matched}, {b.index for _, b in matched}
    left = {task.index: task for task in second.tasks if task.index not in paired[1]}
    for task in first.tasks:
        other = left.get(task.index)
        if other and task.index >= 0 and task.index not in paired[0] and not (task.results and other.results):
            matched.append((task, other))
    return [a for a, _ in matched], [b for _, b in matched]


def _keyed(run: Run, pair_by: PairBy) -> dict[tuple[str, int], Task]:
    """Return a run's tasks by what they are paired by; of rows that are equal the n-th is paired with the n-th."""
    seen: Counter[str] = Counter()
    keyed = {}
    for task in run.tasks:
        key = task.digest if pair_by == "row" else str(task.index) if task.index >= 0 else ""
        if key:
            keyed[key, seen[key]] = task
            seen[key] += 1
    return keyed


def _task_means(run: Run, tasks: Sequence[Task]) -> Floats:
    """Return the measures of tasks, one row a task, one column a measure; NaN where a task has none."""
    rows = []
    for task in tasks:
        passed = run.passes(task) / len(task.places) if task.places else math.nan
        rows.append([passed if name == "passed" else run.mean(task, name) for name in COMPARED])
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(COMPARED))


def _paired(first: Run, ours: Sequence[Task], second: Run, theirs: Sequence[Task]) -> list[Measured]:
    a, b = _task_means(first, ours), _task_means(second, theirs)
    missing = np.isnan(a) | np.isnan(b)
    a, b = np.where(missing, np.nan, a), np.where(missing, np.nan, b)
    values = np.hstack([a, b, b - a])
    draws, width = _draw(values), len(COMPARED)
    measured = []
    for at, name in enumerate(COMPARED):
        one, two, difference = (
            _interval(values[:, column], draws[:, column]) for column in (at, width + at, 2 * width + at)
        )
        measured.append(Measured(name, one, two, difference, int((~missing[:, at]).sum())))
    return measured


def _unpaired(first: Run, second: Run) -> list[Measured]:
    a, b = _task_means(first, first.tasks), _task_means(second, second.tasks)
    # Different streams, for the runs have nothing in common.
    a_draws, b_draws = _draw(a, stream=0), _draw(b, stream=1)
    shared = min(len(a_draws), len(b_draws))
    measured = []
    for at, name in enumerate(COMPARED):
        one, two = _interval(a[:, at], a_draws[:, at]), _interval(b[:, at], b_draws[:, at])
        difference = Interval(None)
        if one.value is not None and two.value is not None:
            low, high = _ends(b_draws[:shared, at] - a_draws[:shared, at])
            known = one.low is not None and two.low is not None
            difference = Interval(two.value - one.value, low if known else None, high if known else None)
        tasks = min(int((~np.isnan(a[:, at])).sum()), int((~np.isnan(b[:, at])).sum()))
        measured.append(Measured(name, one, two, difference, tasks))
    return measured


def _draw(values: Floats, stream: int = 0) -> Floats:
    """Return the columns' means in draws of rows with replacement: one row a draw. NaN has no part in a mean."""
    rows, columns = values.shape
    draws = _DRAWS if rows <= _MANY_TASKS else _DRAWS_OF_MANY
    if not rows:
        return np.full((draws, columns), np.nan)
    present = (~np.isnan(values)).astype(np.float64)
    filled = np.nan_to_num(values, nan=0.0)
    random = np.random.default_rng([_SEED, stream])
    means = np.empty((draws, columns))
    step = max(1, _DRAWN_AT_ONCE // rows)
    for start in range(0, draws, step):
        size = min(step, draws - start)
        drawn = random.integers(0, rows, (size, rows)) + np.arange(size)[:, None] * rows
        times = np.bincount(drawn.ravel(), minlength=size * rows).reshape(size, rows).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means[start : start + size] = (times @ filled) / (times @ present)
    return means


def _interval(values: Floats, draws: Floats) -> Interval:
    known = values[~np.isnan(values)]
    if not len(known):
        return Interval(None)
    value = float(known.mean())
    if len(known) < 2 or float(np.ptp(known)) <= _EQUAL:
        return Interval(value)
    return Interval(value, *_ends(draws))


def _ends(draws: Floats) -> tuple[float, float]:
    low, high = np.nanquantile(draws, [0.025, 0.975]) if not np.isnan(draws).all() else (math.nan, math.nan)
    return float(low), float(high)
