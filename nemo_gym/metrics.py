"""The arithmetic of scored rollouts: pass@k, majority@k, spread between runs, statistics of numeric fields.

Everything here is a pure function of results in memory. A *result* is one rollout's verify response as a
dict; a *task* is the list of results of one dataset row, in the order of their rollout index. Scores are
fractions (0..1, or bool); metrics made of scores are percentages (0..100), rounded nowhere. A failed rollout
has no result, so it is absent here and never a 0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from nemo_gym.config_types import AggregateMetrics

Result = dict[str, Any]
ScoreFn = Callable[[Result], Mapping[str, float | bool]]

TASK_INDEX_KEY: Final = "_ng_task_index"
ROLLOUT_INDEX_KEY: Final = "_ng_rollout_index"
NO_ANSWER_SCORE: Final = "no_answer"

_INTERNAL_PREFIX: Final = "_ng_"
_EVERY_K_UP_TO: Final = 16


def default_scores(result: Result) -> dict[str, float]:
    """Return the one score of a result that has no score function: its reward, named `accuracy`."""
    return {"accuracy": float(result["reward"])}


def expected_best_of_k(scores: Sequence[float], k: int) -> float:
    """Estimate, without bias, the expected best score of `k` rollouts from the scores of `n >= k` of them.

    The mean of the best score over all k-subsets of the n rollouts. For scores of 0 and 1 this is the
    estimator `1 - C(n - c, k) / C(n, k)` of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1), with c
    the number of 1s.

    Args:
        scores: The scores of n rollouts of one task.
        k: How many rollouts may be tried, 1 <= k <= n.

    Raises:
        ValueError: k is out of its range.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of scores ({n}), not {k}")
    total = 0.0
    # The i-th best score is the best of C(n - 1 - i, k - 1) subsets; each share follows from the one before.
    share = k / n
    for i, score in enumerate(sorted(scores, reverse=True)):
        total += share * score
        remaining = n - 1 - i
        if remaining < k:
            break
        share *= (remaining - k + 1) / remaining
    return total


def reported_ks(max_k: int) -> list[int]:
    """Return the ks that metrics are given for: each up to 16, then powers of two, and `max_k` itself."""
    ks = list(range(1, min(max_k, _EVERY_K_UP_TO) + 1))
    k = 2 * _EVERY_K_UP_TO
    while k < max_k:
        ks.append(k)
        k *= 2
    if max_k > _EVERY_K_UP_TO:
        ks.append(max_k)
    return ks


def compute_pass_majority_metrics(
    tasks: Sequence[Sequence[Result]],
    score_fn: ScoreFn | None = None,
    answer_key: str | None = None,
) -> tuple[dict[str, Any], list[list[dict[str, float]]], list[str], int]:
    """Compute pass@k, the average over k runs, and majority@k of every score.

    The keys are `pass@{k}/{score}`, `pass@1[avg-of-{k}]/{score}` (over the first k rollouts of each task),
    the latter's `/std_dev_across_runs` and `/std_err_across_runs` for k >= 2 (one run is the k-th rollout of
    every task), and with `answer_key` `majority@{k}/{score}` for k >= 2. Tasks of fewer than k rollouts are
    left out of the figures of that k. A score that a result does not have is left out too, not taken as 0.

    Args:
        tasks: Per task, its results.
        score_fn: Gives a result's scores by name, as fractions or bools; the reward as `accuracy` when None.
        answer_key: The field that holds a result's final answer, or None. With it comes the score
            `no_answer`. The most frequent answer of k rollouts counts; equally frequent ones share the vote.

    Returns:
        The metrics; the scores of each result of each task; the score names; the largest number of rollouts.
    """
    score = score_fn or default_scores
    all_scores: list[list[dict[str, float]]] = []
    for task in tasks:
        rows = [{name: float(value) for name, value in score(result).items()} for result in task]
        if answer_key is not None:
            for row, result in zip(rows, task, strict=True):
                row.setdefault(NO_ANSWER_SCORE, float(result.get(answer_key) is None))
        all_scores.append(rows)
    names = list(dict.fromkeys(name for rows in all_scores for row in rows for name in row))
    max_k = max((len(task) for task in tasks), default=0)
    answers = [[_answer(result, answer_key) for result in task] for task in tasks] if answer_key is not None else None

    metrics: dict[str, Any] = {}
    for k in reported_ks(max_k):
        for name in names:
            metrics.update(_pass_metrics(all_scores, name, k))
        if answers is not None and k >= 2:
            for name in names:
                metrics.update(_majority_metrics(all_scores, answers, name, k))
    return metrics, all_scores, names, max_k


def compute_subset_metrics(
    tasks: Sequence[Sequence[Result]],
    subset_key: str,
    score_fn: ScoreFn | None = None,
    answer_key: str | None = None,
) -> dict[str, Any]:
    """Compute the metrics of `compute_pass_majority_metrics` for each subset, keyed `{subset}/...`.

    Args:
        tasks: Per task, its results.
        subset_key: The field whose value, in a task's first result, names its subset; tasks without it are
            left out.
        score_fn: As in `compute_pass_majority_metrics`.
        answer_key: As in `compute_pass_majority_metrics`.
    """
    subsets: dict[str, list[Sequence[Result]]] = {}
    for task in tasks:
        if task and task[0].get(subset_key) is not None:
            subsets.setdefault(str(task[0][subset_key]), []).append(task)
    return {
        f"{subset}/{key}": value
        for subset, members in subsets.items()
        for key, value in compute_pass_majority_metrics(members, score_fn, answer_key)[0].items()
    }


def highest_k_metrics(
    agent_metrics: Mapping[str, Any],
    pattern: str,
    *,
    score_names: Iterable[str] | None = None,
    exclude_names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Pick the entries of a family of metrics that have the greatest k.

    Args:
        agent_metrics: Metrics by key.
        pattern: The family, for example `pass@{k}`, `majority@{k}` or `pass@1[avg-of-{k}]`.
        score_names: Only these scores; all when None.
        exclude_names: Scores to leave out.

    Returns:
        The entries `{pattern with its k}/{score}`, without their statistics across runs; empty when there are
        none.
    """
    before, _, after = pattern.partition("{k}")
    matcher = re.compile(re.escape(before) + r"(?P<k>\d+)" + re.escape(after) + r"/(?P<name>[^/]+)")
    excluded = frozenset(exclude_names or ())
    wanted = None if score_names is None else frozenset(score_names)
    found: list[tuple[int, str]] = []
    for key in agent_metrics:
        match = matcher.fullmatch(key)
        if match and match["name"] not in excluded and (wanted is None or match["name"] in wanted):
            found.append((int(match["k"]), key))
    highest = max((k for k, _ in found), default=0)
    return {key: agent_metrics[key] for k, key in found if k == highest}


def describe_numeric_fields(results: Iterable[Result]) -> dict[str, float]:
    """Return `mean/`, `std/`, `min/`, `max/` and `median/` of every numeric field of the results.

    Fields are those of the result itself and of `response.usage` (`input_tokens`, ...); bools count as 0 and
    1. Fields of the framework (`_ng_...`) and numbers that are not finite are left out. `std/` is the sample
    standard deviation, absent when there is one value only.
    """
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in {**_usage(result), **result}.items():
            if isinstance(value, bool | int | float) and not name.startswith(_INTERNAL_PREFIX):
                number = float(value)
                if math.isfinite(number):
                    values.setdefault(name, []).append(number)
    described: dict[str, float] = {}
    for name, numbers in values.items():
        described[f"mean/{name}"] = statistics.fmean(numbers)
        if len(numbers) > 1:
            described[f"std/{name}"] = statistics.stdev(numbers)
        described[f"min/{name}"] = min(numbers)
        described[f"max/{name}"] = max(numbers)
        described[f"median/{name}"] = statistics.median(numbers)
    return described


def group_by_task(results: Iterable[Result]) -> dict[Any, list[Result]]:
    """Group results by `_ng_task_index` in ascending order, each group in the order of `_ng_rollout_index`.

    A result without a task index is a task of its own, keyed by a negative number that no dataset row has.
    """
    groups: dict[int, list[Result]] = {}
    unindexed = 0
    for result in results:
        index = result.get(TASK_INDEX_KEY)
        if index is None:
            unindexed -= 1
            index = unindexed
        groups.setdefault(index, []).append(result)
    for group in groups.values():
        group.sort(key=lambda result: result.get(ROLLOUT_INDEX_KEY) or 0)
    indexed = sorted(index for index in groups if index >= 0)
    alone = sorted((index for index in groups if index < 0), reverse=True)
    return {index: groups[index] for index in (*indexed, *alone)}


def compute_aggregate_metrics(
    verify_responses: Sequence[Result],
    compute_metrics_fn: Callable[[list[list[Result]]], dict[str, Any]] | None = None,
    get_key_metrics_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> AggregateMetrics:
    """Turn verify responses into metrics per task and over all.

    Args:
        verify_responses: The results, with their `_ng_task_index` and `_ng_rollout_index`.
        compute_metrics_fn: The environment's own metrics of its tasks; they win over statistics of the same
            key.
        get_key_metrics_fn: Picks the headline figures out of the metrics; `mean/reward` when None.

    Returns:
        `group_level_metrics` (one entry per task, with its index and its number of rollouts), `agent_metrics`
        and `key_metrics`.
    """
    groups = group_by_task(verify_responses)
    group_level: list[dict[str, Any]] = []
    for index, group in groups.items():
        label = {TASK_INDEX_KEY: index} if index >= 0 else {}
        group_level.append({**label, "num_rollouts": len(group), **describe_numeric_fields(group)})
    agent_metrics: dict[str, Any] = dict(describe_numeric_fields(verify_responses))
    if compute_metrics_fn is not None:
        agent_metrics.update(compute_metrics_fn(list(groups.values())))
    if get_key_metrics_fn is not None:
        key_metrics = get_key_metrics_fn(agent_metrics)
    else:
        key_metrics = {key: agent_metrics[key] for key in ("mean/reward",) if key in agent_metrics}
    return AggregateMetrics(group_level_metrics=group_level, agent_metrics=agent_metrics, key_metrics=key_metrics)


def mean_and_standard_error(task_means: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of task means and its standard error, clustered by task.

    Rollouts of one task are not independent, so the task is the unit: the sample standard deviation of the
    task means, divided by the square root of the number of tasks. None for fewer than two tasks.

    Raises:
        ValueError: There are no tasks.
    """
    if not task_means:
        raise ValueError("the mean of no tasks is not defined")
    mean = statistics.mean(task_means)  # fmean fails where the sum is beyond what a float holds
    if len(task_means) < 2:
        return mean, None
    return mean, statistics.stdev(task_means) / math.sqrt(len(task_means))


def _pass_metrics(all_scores: list[list[dict[str, float]]], name: str, k: int) -> dict[str, float]:
    columns = [[row[name] for row in rows if name in row] for rows in all_scores]
    columns = [column for column in columns if len(column) >= k]
    if not columns:
        return {}
    average = f"pass@1[avg-of-{k}]/{name}"
    metrics = {
        f"pass@{k}/{name}": 100 * statistics.fmean(expected_best_of_k(column, k) for column in columns),
        average: 100 * statistics.fmean(statistics.fmean(column[:k]) for column in columns),
    }
    if k >= 2:
        runs = [100 * statistics.fmean(column[run] for column in columns) for run in range(k)]
        deviation = statistics.stdev(runs)
        metrics[f"{average}/std_dev_across_runs"] = deviation
        metrics[f"{average}/std_err_across_runs"] = deviation / math.sqrt(k)
    return metrics


def _majority_metrics(
    all_scores: list[list[dict[str, float]]], answers: list[list[str | None]], name: str, k: int
) -> dict[str, float]:
    voted: list[float] = []
    for rows, task_answers in zip(all_scores, answers, strict=True):
        if len(rows) < k:
            continue
        by_answer: dict[str | None, list[float]] = {}
        for winner in _winners(task_answers[:k]):
            for row, answer in zip(rows[:k], task_answers[:k], strict=True):
                if answer == winner and name in row:
                    by_answer.setdefault(winner, []).append(row[name])
        if by_answer:
            voted.append(statistics.fmean(statistics.fmean(scores) for scores in by_answer.values()))
    return {f"majority@{k}/{name}": 100 * statistics.fmean(voted)} if voted else {}


def _winners(answers: Sequence[str | None]) -> list[str | None]:
    """Return the most frequent answers; None alone when nobody answered."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    return [answer for answer, count in votes.items() if count == most] or [None]


def _answer(result: Result, answer_key: str) -> str | None:
    answer = result.get(answer_key)
    return None if answer is None else repr(answer)


def _usage(result: Result) -> dict[str, Any]:
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return usage if isinstance(usage, dict) else {}
