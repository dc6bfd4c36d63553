"""What a rollouts file says as a whole: rewards with their error, pass@k, tasks, tokens, turns, durations, failures.

The file is read once, line by line, and a few numbers are kept of each rollout. Failures are counted by kind and
have no part in any figure of rewards: a rollout that failed has no reward.

Environments know this module as the door to the arithmetic of `nemo_gym.metrics`.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson

from nemo_gym.config_types import AggregateMetrics
from nemo_gym.errors import DatasetError
from nemo_gym.global_config import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.metrics import (
    compute_aggregate_metrics as compute_aggregate_metrics,
    compute_pass_majority_metrics as compute_pass_majority_metrics,
    compute_subset_metrics as compute_subset_metrics,
    expected_best_of_k,
    highest_k_metrics as highest_k_metrics,
    mean_and_standard_error,
    reported_ks,
)
from nemo_gym.rollouts.attempts import NG_FAILURE_CLASS_KEY
from nemo_gym.rollouts.io import DURATION_KEY, iter_failures, iter_results
from nemo_gym.rollouts.record import RolloutFiles, write_whole

PASS_THRESHOLD: Final = 1.0
"""The reward from which on a rollout has passed, unless the caller says otherwise."""

_TOKEN_FIELDS: Final = ("input_tokens", "output_tokens", "total_tokens")


@dataclass(frozen=True, slots=True)
class Distribution:
    """How one quantity is spread over the rollouts that have it.

    Args:
        count: How many rollouts have it.
        total: Their sum; None when it is beyond what a float holds.
        mean: Their mean.
        std: Their sample standard deviation; None for a single value.
        min: The smallest.
        median: The middle one.
        p95: The value that 95 % of them do not exceed (nearest rank).
        max: The largest.
    """

    count: int
    total: float | None
    mean: float
    std: float | None
    min: float
    median: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Return the distribution of `values`, leaving out NaN; None when nothing is left."""
        ordered = sorted(value for value in values if not math.isnan(value))
        if not ordered:
            return None
        try:
            total, mean = math.fsum(ordered), statistics.fmean(ordered)
        except OverflowError:
            total, mean = None, statistics.mean(ordered)
        return cls(
            count=len(ordered),
            total=total,
            mean=mean,
            std=statistics.stdev(ordered) if len(ordered) > 1 else None,
            min=ordered[0],
            median=statistics.median(ordered),
            p95=ordered[math.ceil(0.95 * len(ordered)) - 1],
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The share of tasks that k rollouts are expected to pass at least once (Chen et al. 2021, arXiv:2107.03374).

    Args:
        k: How many rollouts.
        value: The share, 0 to 1.
        tasks: How many tasks it was estimated from: those with k results or more.
    """

    k: int
    value: float
    tasks: int


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """The figures of one row.

    Args:
        task_index: The row; negative for a result that names none, which is then a task of its own.
        rollouts: Results.
        failed: Rollouts without result.
        mean_reward: None without results.
        pass_rate: The share of results that passed, 0 to 1; None without results.
        mean_duration_s: Seconds; None where no result has its duration.
    """

    task_index: int
    rollouts: int
    failed: int
    mean_reward: float | None
    pass_rate: float | None
    mean_duration_s: float | None


@dataclass(frozen=True, slots=True)
class RewardProfile:
    """The figures of a rollouts file.

    Args:
        rollouts: Results in the file.
        failed: Rollouts that failed and have no result.
        failures: How many of them, by kind.
        mean_reward: The mean over tasks of each task's mean reward; None without results.
        reward_std_err: Its standard error, clustered by task: the sample standard deviation of the task means over
            the square root of the number of tasks; None for fewer than two tasks.
        reward: The rewards of all results.
        pass_threshold: The reward from which on a result has passed.
        pass_at_k: pass@k for each k up to the most results of a task.
        tokens: `input_tokens`, `output_tokens` and `total_tokens` per rollout, as `response.usage` tells them.
        turns: Times the model was asked, per rollout.
        tool_calls: Calls the model made, per rollout.
        duration_s: Seconds that the attempt with the result took, per rollout.
        tasks: Every task, by its index.
    """

    rollouts: int
    failed: int
    failures: Mapping[str, int]
    mean_reward: float | None
    reward_std_err: float | None
    reward: Distribution | None
    pass_threshold: float
    pass_at_k: tuple[PassAtK, ...]
    tokens: Mapping[str, Distribution]
    turns: Distribution | None
    tool_calls: Distribution | None
    duration_s: Distribution | None
    tasks: tuple[TaskProfile, ...]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line of a table of figures.

    Args:
        name: What it is.
        value: Its value.
        unit: `""`, `"%"`, `"s"` or `"tokens"`.
        std_err: Its standard error, in the same unit, where there is one.
        note: What else should be known, for people.
    """

    name: str
    value: float
    unit: str = ""
    std_err: float | None = None
    note: str = ""


def profile_rollouts(output: Path, *, pass_threshold: float = PASS_THRESHOLD) -> RewardProfile:
    """Profile a rollouts file, and the failures file beside it if there is one.

    Args:
        output: The rollouts file.
        pass_threshold: The reward from which on a result has passed.

    Raises:
        DatasetError: The file can't be read, or a line is no result with a finite reward.
    """
    columns = _Columns()
    for number, result in enumerate(iter_results(output), start=1):
        columns.add(result, f"{output}, result {number}")
    failed = {
        (failure[TASK_INDEX_KEY_NAME], failure[ROLLOUT_INDEX_KEY_NAME]): str(failure.get(NG_FAILURE_CLASS_KEY))
        for failure in iter_failures(RolloutFiles(output).failures)
    }
    for rollout in zip(columns.tasks, columns.indices, strict=True):
        failed.pop(rollout, None)  # it succeeded in a later run
    tasks = tuple(_task_profiles(columns, Counter(task for task, _ in failed), pass_threshold))
    means = [task.mean_reward for task in tasks if task.mean_reward is not None]
    mean, error = mean_and_standard_error(means) if means else (None, None)
    tokens = {name: Distribution.of(values) for name, values in columns.tokens.items()}
    return RewardProfile(
        rollouts=len(columns.rewards),
        failed=len(failed),
        failures=dict(Counter(failed.values()).most_common()),
        mean_reward=mean,
        reward_std_err=error,
        reward=Distribution.of(columns.rewards),
        pass_threshold=pass_threshold,
        pass_at_k=tuple(_pass_at_k([list(group) for _, group in columns.rewards_by_task()], pass_threshold)),
        tokens={name: spread for name, spread in tokens.items() if spread is not None},
        turns=Distribution.of(columns.turns),
        tool_calls=Distribution.of(columns.tool_calls),
        duration_s=Distribution.of(columns.durations),
        tasks=tasks,
    )


def metric_rows(profile: RewardProfile) -> list[MetricRow]:
    """Return the headline figures of a profile in the order in which people read them."""
    rows = [MetricRow("rollouts", profile.rollouts, note=f"of {len(profile.tasks)} tasks")]
    if profile.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in profile.failures.items())
        rows.append(MetricRow("failed", profile.failed, note=kinds))
    if profile.mean_reward is not None:
        note = "standard error over tasks" if profile.reward_std_err is not None else ""
        rows.append(MetricRow("mean reward", profile.mean_reward, std_err=profile.reward_std_err, note=note))
    complete = len([task for task in profile.tasks if task.rollouts])
    for entry in profile.pass_at_k:
        note = f"reward >= {profile.pass_threshold:g}" if entry.k == 1 else ""
        if entry.tasks < complete:
            note = f"{entry.tasks} of {complete} tasks have {entry.k} results"
        rows.append(MetricRow(f"pass@{entry.k}", 100 * entry.value, "%", note=note))
    spreads = {
        "turns": (profile.turns, ""),
        "tool calls": (profile.tool_calls, ""),
        **{name.replace("_", " "): (spread, "tokens") for name, spread in profile.tokens.items()},
        "duration": (profile.duration_s, "s"),
    }
    for name, (spread, unit) in spreads.items():
        if spread is not None:
            note = f"median {spread.median:.4g}, p95 {spread.p95:.4g}, max {spread.max:.4g}"
            rows.append(MetricRow(f"{name} per rollout", spread.mean, unit, note=note))
    return rows


def profile_as_json(profile: RewardProfile, agents: Mapping[str, AggregateMetrics] | None = None) -> dict[str, Any]:
    """Return a profile, and the agents' own metrics by agent, as a JSON object."""
    return {
        **asdict(profile),
        "agents": {name: metrics.model_dump(mode="json") for name, metrics in (agents or {}).items()},
    }


def write_metrics(path: Path, profile: RewardProfile, agents: Mapping[str, AggregateMetrics] | None = None) -> None:
    """Write `profile_as_json` to a file, replacing an older one at once.

    Raises:
        NemoGymError: It can't be written.
    """
    write_whole(path, orjson.dumps(profile_as_json(profile, agents), option=orjson.OPT_INDENT_2) + b"\n")


class _Columns:
    """A few numbers of each result, column by column; NaN where a result does not tell."""

    def __init__(self) -> None:
        self.tasks = array("q")
        self.indices = array("q")
        self.rewards = array("d")
        self.durations = array("d")
        self.turns = array("d")
        self.tool_calls = array("d")
        self.tokens = {name: array("d") for name in _TOKEN_FIELDS}
        self._unindexed = 0

    def add(self, result: dict[str, Any], where: str) -> None:
        reward = _number(result.get("reward"))
        if not math.isfinite(reward):
            raise DatasetError(f"{where}: has no finite number as its reward; not a result of a rollout")
        task = _index(result, TASK_INDEX_KEY_NAME, where)
        if task is None:
            self._unindexed -= 1
            task = self._unindexed
        self.tasks.append(task)
        self.indices.append(_index(result, ROLLOUT_INDEX_KEY_NAME, where) or 0)
        self.rewards.append(reward)
        self.durations.append(_number(result.get(DURATION_KEY)))
        response = result.get("response")
        response = response if isinstance(response, dict) else {}
        usage = response.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        for name, column in self.tokens.items():
            column.append(_number(usage.get(name)))
        turns, calls = turns_and_calls(response.get("output"))
        self.turns.append(turns)
        self.tool_calls.append(calls)

    def order(self) -> list[int]:
        """The places of the results, by task and then by rollout."""
        return sorted(range(len(self.tasks)), key=lambda place: (self.tasks[place], self.indices[place]))

    def rewards_by_task(self) -> Iterator[tuple[int, Iterator[float]]]:
        for task, places in groupby(self.order(), key=self.tasks.__getitem__):
            yield task, (self.rewards[place] for place in places)


def _task_profiles(columns: _Columns, failed: Counter[int], threshold: float) -> Iterator[TaskProfile]:
    places_by_task = {task: list(places) for task, places in groupby(columns.order(), key=columns.tasks.__getitem__)}
    for task in sorted({*places_by_task, *failed}):
        places = places_by_task.get(task, [])
        rewards = [columns.rewards[place] for place in places]
        duration = Distribution.of(columns.durations[place] for place in places)
        yield TaskProfile(
            task_index=task,
            rollouts=len(rewards),
            failed=failed[task],
            mean_reward=statistics.mean(rewards) if rewards else None,
            pass_rate=statistics.fmean(reward >= threshold for reward in rewards) if rewards else None,
            mean_duration_s=duration.mean if duration else None,
        )


def _pass_at_k(rewards_by_task: list[list[float]], threshold: float) -> Iterator[PassAtK]:
    passed = [[float(reward >= threshold) for reward in rewards] for rewards in rewards_by_task]
    for k in reported_ks(max((len(task) for task in passed), default=0)):
        shares = [expected_best_of_k(task, k) for task in passed if len(task) >= k]
        yield PassAtK(k, statistics.fmean(shares), len(shares))


def turns_and_calls(output: Any) -> tuple[float, float]:
    """Count the turns of the model and the calls it made in a response's output items; NaN without output.

    What a tool returned (`..._output`) ends a turn; parallel calls belong to one.
    """
    if not isinstance(output, list):
        return math.nan, math.nan
    turns = calls = 0
    in_turn = False
    for item in output:
        kind = str(item.get("type", "message")) if isinstance(item, dict) else "message"
        calls += kind.endswith("_call")
        by_model = not kind.endswith("_output")
        turns += by_model and not in_turn
        in_turn = by_model
    return turns, calls


def _index(result: dict[str, Any], key: str, where: str) -> int | None:
    index = result.get(key)
    if index is None or (type(index) is int and 0 <= index < 2**63):
        return index
    raise DatasetError(f"{where}: expected a row's or rollout's number as its {key}, found {str(index)[:80]}")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
