"""The arithmetic of scored rollouts, against hand-made figures and brute force."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nemo_gym import global_config, metrics
from nemo_gym.metrics import (
    compute_aggregate_metrics,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    describe_numeric_fields,
    expected_best_of_k,
    group_by_task,
    highest_k_metrics,
    mean_and_standard_error,
    reported_ks,
)


def task(*rewards: float, **fields: Any) -> list[dict[str, Any]]:
    return [{"reward": reward, **fields} for reward in rewards]


def answered(*pairs: tuple[str | None, float]) -> list[dict[str, Any]]:
    return [{"answer": answer, "reward": reward} for answer, reward in pairs]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    expected = statistics.fmean(max(subset) for subset in itertools.combinations(scores, k))
    assert expected_best_of_k(scores, k) == pytest.approx(expected)


@settings(deadline=None)
@given(st.integers(1, 200), st.data())
def test_for_passes_the_best_of_k_is_the_unbiased_estimator_of_pass_at_k(n: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1 - math.comb(n - passed, k) / math.comb(n, k)
    assert expected_best_of_k([1.0] * passed + [0.0] * (n - passed), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 3])
def test_more_rollouts_than_there_are_have_no_best(k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        expected_best_of_k([1.0, 0.0], k)


@pytest.mark.parametrize(
    ("max_k", "ks"),
    [
        (0, []),
        (1, [1]),
        (4, [1, 2, 3, 4]),
        (16, [*range(1, 17)]),
        (17, [*range(1, 18)]),
        (100, [*range(1, 17), 32, 64, 100]),
    ],
)
def test_every_small_k_is_reported_and_few_large_ones(max_k: int, ks: list[int]) -> None:
    assert reported_ks(max_k) == ks


def test_pass_at_k_and_averages_are_percentages_over_tasks() -> None:
    figures, scores, names, max_k = compute_pass_majority_metrics([task(1, 0), task(0, 0)])

    assert figures["pass@1/accuracy"] == 25
    assert figures["pass@2/accuracy"] == 50
    assert figures["pass@1[avg-of-1]/accuracy"] == 50
    assert figures["pass@1[avg-of-2]/accuracy"] == 25
    assert figures["pass@1[avg-of-2]/accuracy/std_dev_across_runs"] == pytest.approx(statistics.stdev([50, 0]))
    assert figures["pass@1[avg-of-2]/accuracy/std_err_across_runs"] == pytest.approx(25)
    assert scores == [[{"accuracy": 1.0}, {"accuracy": 0.0}], [{"accuracy": 0.0}, {"accuracy": 0.0}]]
    assert (names, max_k) == (["accuracy"], 2)
    assert not any(key.startswith("majority") for key in figures)


def test_tasks_with_fewer_rollouts_have_no_part_in_a_greater_k() -> None:
    figures, *_ = compute_pass_majority_metrics([task(0, 1), task(0)])
    assert figures["pass@1/accuracy"] == 25
    assert figures["pass@2/accuracy"] == 100


def test_scores_are_what_the_score_function_says_and_a_missing_one_is_no_zero() -> None:
    tasks = [[{"ok": True, "style": 0.5}, {"ok": False}]]
    figures, _, names, _ = compute_pass_majority_metrics(tasks, lambda result: dict(result))
    assert names == ["ok", "style"]
    assert figures["pass@1/ok"] == 50
    assert figures["pass@1/style"] == 50
    assert "pass@2/style" not in figures


def test_no_tasks_have_no_metrics() -> None:
    assert compute_pass_majority_metrics([]) == ({}, [], [], 0)


@pytest.mark.parametrize(
    ("results", "accuracy"),
    [
        ([("a", 1), ("a", 1), ("b", 0)], 100),
        ([("b", 0), ("b", 0), ("a", 1)], 0),
        ([("a", 1), ("b", 0), (None, 0)], 50),
        ([(None, 0), (None, 0), ("a", 1)], 100),
        ([(None, 0), (None, 0), (None, 0)], 0),
    ],
)
def test_the_most_frequent_answer_is_scored_and_ties_share(
    results: list[tuple[str | None, float]], accuracy: float
) -> None:
    figures, *_ = compute_pass_majority_metrics([answered(*results)], answer_key="answer")
    assert figures["majority@3/accuracy"] == pytest.approx(accuracy)


def test_results_without_an_answer_are_told_as_a_score() -> None:
    figures, *_ = compute_pass_majority_metrics([answered(("a", 1), (None, 0))], answer_key="answer")
    assert figures["pass@1[avg-of-2]/no_answer"] == 50
    assert figures["majority@2/no_answer"] == 0


def test_answers_may_be_any_json() -> None:
    results = [
        {"answer": [1, 2], "reward": 1.0},
        {"answer": [1, 2], "reward": 1.0},
        {"answer": {"x": 1}, "reward": 0.0},
    ]
    assert compute_pass_majority_metrics([results], answer_key="answer")[0]["majority@3/accuracy"] == 100


def test_subsets_have_their_own_metrics() -> None:
    tasks = [task(1, kind="easy"), task(0, kind="hard"), task(1, kind="hard"), task(1), []]
    figures = compute_subset_metrics(tasks, "kind")
    assert figures["easy/pass@1/accuracy"] == 100
    assert figures["hard/pass@1/accuracy"] == 50
    assert {key.split("/")[0] for key in figures} == {"easy", "hard"}


def test_the_entries_of_the_greatest_k_are_picked() -> None:
    figures, *_ = compute_pass_majority_metrics([answered(*[("a", 1)] * 12)], answer_key="answer")
    assert highest_k_metrics(figures, "pass@{k}", exclude_names=["no_answer"]) == {"pass@12/accuracy": 100}
    assert highest_k_metrics(figures, "pass@1[avg-of-{k}]").keys() == {
        "pass@1[avg-of-12]/accuracy",
        "pass@1[avg-of-12]/no_answer",
    }
    assert highest_k_metrics(figures, "majority@{k}", score_names=["accuracy"]) == {"majority@12/accuracy": 100}
    assert highest_k_metrics(figures, "other@{k}") == {}


def test_numeric_fields_are_described_with_those_of_the_usage() -> None:
    results = [
        {
            "reward": 1.0,
            "steps": 2,
            "ok": True,
            "name": "x",
            "_ng_task_index": 3,
            "response": {"usage": {"output_tokens": 5}},
        },
        {"reward": 0.0, "steps": 4, "ok": False, "odd": math.nan, "response": {"usage": None}},
    ]
    described = describe_numeric_fields(results)
    assert described["mean/reward"] == 0.5
    assert described["std/reward"] == pytest.approx(statistics.stdev([0, 1]))
    assert (described["min/steps"], described["max/steps"], described["median/steps"]) == (2, 4, 3)
    assert described["mean/ok"] == 0.5
    assert described["mean/output_tokens"] == 5
    assert "std/output_tokens" not in described
    assert {key.split("/")[1] for key in described} == {"reward", "steps", "ok", "output_tokens"}


def test_results_are_grouped_by_task_and_ordered_by_rollout() -> None:
    results = [
        {"_ng_task_index": 1, "_ng_rollout_index": 1},
        {"_ng_task_index": 0, "_ng_rollout_index": 0},
        {"alone": True},
        {"_ng_task_index": 1, "_ng_rollout_index": 0},
    ]
    groups = group_by_task(results)
    assert list(groups.values()) == [[results[1]], [results[3], results[0]], [results[2]]]


def test_aggregate_metrics_have_tasks_totals_and_headlines() -> None:
    results = [
        {"_ng_task_index": index // 2, "_ng_rollout_index": index % 2, "reward": index / 4} for index in range(4)
    ]
    plain = compute_aggregate_metrics(results)
    assert [(group["_ng_task_index"], group["mean/reward"]) for group in plain.group_level_metrics] == [
        (0, 0.125),
        (1, 0.625),
    ]
    assert plain.key_metrics == {"mean/reward": 0.375}

    seen: list[list[list[dict[str, Any]]]] = []

    def own(tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        seen.append(tasks)
        return {"own": 1, "mean/reward": "mine"}

    aggregate = compute_aggregate_metrics(results, own, lambda figures: {"own": figures["own"]})
    assert [[result["reward"] for result in task] for task in seen[0]] == [[0, 0.25], [0.5, 0.75]]
    assert aggregate.agent_metrics["mean/reward"] == "mine"
    assert aggregate.key_metrics == {"own": 1}


def test_no_results_aggregate_to_nothing() -> None:
    aggregate = compute_aggregate_metrics([])
    assert (aggregate.group_level_metrics, aggregate.agent_metrics, aggregate.key_metrics) == ([], {}, {})


def test_the_standard_error_is_that_of_the_task_means() -> None:
    mean, error = mean_and_standard_error([0.0, 0.5, 1.0])
    assert mean == 0.5
    assert error == pytest.approx(0.5 / math.sqrt(3))
    assert mean_and_standard_error([0.25]) == (0.25, None)
    with pytest.raises(ValueError, match="no tasks"):
        mean_and_standard_error([])


def test_the_index_keys_are_those_of_the_configuration() -> None:
    assert metrics.TASK_INDEX_KEY == global_config.TASK_INDEX_KEY_NAME
    assert metrics.ROLLOUT_INDEX_KEY == global_config.ROLLOUT_INDEX_KEY_NAME
