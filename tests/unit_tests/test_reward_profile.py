"""The figures of rollouts files that are written by hand."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym import metrics, reward_profile
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.errors import DatasetError, NemoGymError
from nemo_gym.reward_profile import Distribution, PassAtK, metric_rows, profile_as_json, profile_rollouts, write_metrics
from tests.fake_agent import write_rows

CALL = {"type": "function_call"}
RETURNED = {"type": "function_call_output"}
MESSAGE = {"type": "message"}


def result(task: int, rollout: int, reward: float, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "reward": reward, **fields}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_rewards_are_averaged_over_tasks_with_the_error_between_tasks(output: Path) -> None:
    write_rows(output, result(0, 0, 1.0), result(0, 1, 1.0), result(0, 2, 1.0), result(1, 0, 0.0), result(2, 0, 0.5))
    profile = profile_rollouts(output)

    assert profile.rollouts == 5
    assert profile.mean_reward == 0.5
    assert profile.reward_std_err == pytest.approx(statistics.stdev([1, 0, 0.5]) / math.sqrt(3))
    assert profile.reward is not None
    assert profile.reward.mean == pytest.approx(0.7)


def test_pass_at_k_counts_results_from_the_threshold_on(output: Path) -> None:
    write_rows(output, result(1, 0, 0.5), result(0, 0, 0.5), result(0, 1, 1.0), result(1, 1, 0.0), result(2, 0, 1.0))

    assert profile_rollouts(output).pass_at_k == (PassAtK(1, 0.5, 3), PassAtK(2, 0.5, 2))
    assert profile_rollouts(output, pass_threshold=0.5).pass_at_k == (
        PassAtK(1, pytest.approx(5 / 6), 3),
        PassAtK(2, 1.0, 2),
    )


def test_every_task_has_its_figures(output: Path) -> None:
    write_rows(output, result(1, 0, 1.0, _ng_duration_s=2), result(0, 0, 0.0), result(1, 1, 0.5, _ng_duration_s=4))
    first, second = profile_rollouts(output).tasks

    assert (first.task_index, first.rollouts, first.mean_reward, first.pass_rate) == (0, 1, 0.0, 0.0)
    assert first.mean_duration_s is None
    assert (second.task_index, second.rollouts, second.mean_reward, second.pass_rate) == (1, 2, 0.75, 0.5)
    assert second.mean_duration_s == 3


def test_failures_are_counted_by_kind_and_have_no_part_in_rewards(output: Path) -> None:
    write_rows(output, result(0, 0, 1.0))
    write_rows(
        output.with_name("out_failures.jsonl"),
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_failure_class": "made_good_since"},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "_ng_failure_class": "timeout"},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_failure_class": "http_error"},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_failure_class": "timeout"},
    )
    profile = profile_rollouts(output)

    assert profile.mean_reward == 1.0
    assert (profile.failed, profile.failures) == (2, {"timeout": 2})
    assert [(task.task_index, task.failed, task.mean_reward) for task in profile.tasks] == [(0, 1, 1.0), (1, 1, None)]


def test_a_file_without_results_has_no_mean(output: Path) -> None:
    write_rows(output)
    profile = profile_rollouts(output)
    assert (profile.rollouts, profile.mean_reward, profile.reward, profile.pass_at_k) == (0, None, None, ())


@pytest.mark.parametrize(
    ("items", "turns", "calls"),
    [
        ([MESSAGE], 1, 0),
        ([CALL, RETURNED, MESSAGE], 2, 1),
        ([CALL, CALL, RETURNED, RETURNED, CALL, RETURNED], 2, 3),
        ([{"type": "reasoning"}, CALL, RETURNED, {"type": "reasoning"}, MESSAGE], 2, 1),
        ([], 0, 0),
    ],
)
def test_turns_and_calls_are_read_from_the_output_items(
    output: Path, items: list[dict[str, Any]], turns: int, calls: int
) -> None:
    write_rows(output, result(0, 0, 1.0, response={"output": items}))
    profile = profile_rollouts(output)
    assert profile.turns is not None
    assert profile.tool_calls is not None
    assert (profile.turns.mean, profile.tool_calls.mean) == (turns, calls)


def test_tokens_and_durations_are_spread_over_the_results_that_have_them(output: Path) -> None:
    usage = {"input_tokens": 30, "output_tokens": 10}
    write_rows(
        output,
        result(0, 0, 1.0, response={"usage": usage}, _ng_duration_s=1.5),
        result(1, 0, 1.0, response={"usage": None}),
        result(2, 0, 1.0),
    )
    profile = profile_rollouts(output)

    assert profile.tokens["input_tokens"].total == 30
    assert profile.tokens["output_tokens"].count == 1
    assert "total_tokens" not in profile.tokens
    assert profile.duration_s is not None
    assert profile.duration_s.max == 1.5
    assert profile.turns is None


def test_a_distribution_is_described_by_its_ranks() -> None:
    spread = Distribution.of([*range(100, 0, -1), math.nan])
    assert spread is not None
    assert (spread.count, spread.min, spread.median, spread.p95, spread.max) == (100, 1, 50.5, 95, 100)
    single = Distribution.of([3.0])
    assert single is not None
    assert (single.std, single.p95) == (None, 3.0)
    assert Distribution.of([math.nan]) is None


@pytest.mark.parametrize("reward", [None, "1", True])
def test_a_line_without_a_reward_is_refused_and_named(output: Path, reward: Any) -> None:
    write_rows(output, result(0, 0, 1.0), {"_ng_task_index": 1, "reward": reward})
    with pytest.raises(DatasetError, match=r"out\.jsonl, result 2"):
        profile_rollouts(output)


def test_a_result_without_a_task_index_is_a_task_of_its_own(output: Path) -> None:
    write_rows(output, {"reward": 1.0}, {"reward": 0.0})
    assert [task.rollouts for task in profile_rollouts(output).tasks] == [1, 1]


def test_the_table_leads_with_what_people_read_first(output: Path) -> None:
    write_rows(output, result(0, 0, 1.0, _ng_duration_s=1), result(0, 1, 0.0), result(1, 0, 1.0))
    write_rows(
        output.with_name("out_failures.jsonl"),
        {"_ng_task_index": 1, "_ng_rollout_index": 1, "_ng_failure_class": "timeout"},
    )
    rows = {row.name: row for row in metric_rows(profile_rollouts(output))}

    assert list(rows) == ["rollouts", "failed", "mean reward", "pass@1", "pass@2", "duration per rollout"]
    assert (rows["failed"].value, rows["failed"].note) == (1, "1 timeout")
    assert rows["mean reward"].std_err == pytest.approx(0.25)
    assert (rows["pass@1"].value, rows["pass@1"].unit) == (75, "%")
    assert rows["pass@2"].note == "1 of 2 tasks have 2 results"


def test_metrics_are_written_as_json(output: Path) -> None:
    write_rows(output, result(0, 0, 1.0))
    profile = profile_rollouts(output)
    aggregate = AggregateMetrics(group_level_metrics=[], agent_metrics={"own": 1}, key_metrics={})
    path = output.with_name("out_metrics.json")
    write_metrics(path, profile, {"agent": aggregate})
    written = orjson.loads(path.read_bytes())

    assert written["mean_reward"] == 1.0
    assert written["tasks"][0]["task_index"] == 0
    assert written["agents"]["agent"]["agent_metrics"] == {"own": 1}
    assert profile_as_json(profile)["agents"] == {}
    assert [entry.name for entry in output.parent.glob("*metrics*")] == ["out_metrics.json"]


def test_environments_find_the_arithmetic_here() -> None:
    for name in (
        "compute_aggregate_metrics",
        "compute_pass_majority_metrics",
        "compute_subset_metrics",
        "highest_k_metrics",
    ):
        assert getattr(reward_profile, name) is getattr(metrics, name)


@pytest.mark.parametrize(
    "field",
    [
        {"_ng_task_index": "a"},
        {"_ng_task_index": True},
        {"_ng_task_index": 2**63},
        {"_ng_rollout_index": "b"},
        {"_ng_rollout_index": 1.5},
        {"reward": True},
        {"reward": "1"},
        {"reward": None},
    ],
)
def test_a_line_with_fields_of_another_kind_is_named(output: Path, field: dict[str, Any]) -> None:
    write_rows(output, result(0, 0, 1.0), {**result(0, 1, 1.0), **field})
    with pytest.raises(DatasetError, match=r"out\.jsonl, result 2"):
        profile_rollouts(output)


def test_rewards_near_the_end_of_what_a_float_holds_have_their_mean(output: Path) -> None:
    write_rows(output, result(0, 0, 1e308), result(0, 1, 1e308), result(1, 0, 1e308), result(2, 0, -1e308))
    profile = profile_rollouts(output)

    assert profile.mean_reward == pytest.approx(1e308 / 3)
    assert profile.reward is not None
    assert profile.reward.mean == pytest.approx(5e307)
    write_rows(output, result(0, 0, 1e308), result(0, 1, 1e308))
    assert profile_rollouts(output).reward.total is None  # type: ignore[union-attr]


def test_metrics_that_can_not_be_written_leave_no_half_file(output: Path) -> None:
    write_rows(output, result(0, 0, 1.0))
    target = output.with_name("taken")
    target.mkdir()
    with pytest.raises(NemoGymError, match=r"can't write .*taken"):
        write_metrics(target, profile_rollouts(output))
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "taken"]
