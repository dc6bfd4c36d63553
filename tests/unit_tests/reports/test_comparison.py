"""Intervals and differences: known values, and what must not be concluded."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.reports.comparison import Comparison, PairBy, compare, newcombe, run_intervals, sign_test, wilson
from nemo_gym.reports.runs import Run, read_run
from tests.report_rollouts import failure, rollout, write


def run_of(tmp_path: Path, name: str, records: list[Any], failures: list[Any] | None = None) -> Run:
    return read_run(write(tmp_path / f"{name}.jsonl", records, failures or ()), 1.0, lambda _: (0, 0))


def rewards(tmp_path: Path, name: str, by_task: list[list[float]], **changes: Any) -> Run:
    return run_of(
        tmp_path,
        name,
        [rollout(task, at, reward, **changes) for task, row in enumerate(by_task) for at, reward in enumerate(row)],
    )


def measured(comparison: Comparison, name: str) -> Any:
    return next(one for one in comparison.measures if one.name == name)


def test_wilsons_interval_is_that_of_the_literature() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3: 81 of 263, and 15 of 148.
    one, two = wilson(81, 263), wilson(15, 148)
    assert (one.low, one.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (two.low, two.high) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert (wilson(0, 20).low, wilson(0, 20).high) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(0, 0).value is None


def test_newcombes_interval_is_that_of_the_literature() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 873-890, table II, method 10: 56 of 70 less 48 of 80.
    found = newcombe(wilson(48, 80), wilson(56, 70))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_the_sign_test_is_exact_and_stays_so_for_many_tasks() -> None:
    assert sign_test(0, 0) is None
    assert sign_test(5, 5) == 1.0
    assert sign_test(9, 1) == pytest.approx(22 / 1024)
    assert sign_test(3_000, 2_800) == pytest.approx(0.009, abs=0.001)


def test_a_task_counts_once_however_many_rollouts_it_has(tmp_path: Path) -> None:
    run = rewards(tmp_path, "a", [[1.0] * 100, [0.0], [0.0], [0.0]])
    interval = run_intervals(run)["reward"]
    assert interval.value == 0.25
    assert interval.low == 0.0
    assert interval.high is not None
    assert interval.high >= 0.5


def test_repeats_of_few_tasks_do_not_make_the_interval_narrow(tmp_path: Path) -> None:
    few = run_intervals(rewards(tmp_path, "a", [[float(task % 2)] * 2 for task in range(10)]))["reward"]
    many = run_intervals(rewards(tmp_path, "b", [[float(task % 2)] * 50 for task in range(10)]))["reward"]
    assert few == many


def test_tasks_that_are_hard_for_both_runs_cancel_out(tmp_path: Path) -> None:
    first = rewards(tmp_path, "a", [[task / 50] * 2 for task in range(50)])
    second = rewards(tmp_path, "b", [[task / 50 + (0.05 if task % 2 else 0.01)] * 2 for task in range(50)])
    found = measured(compare(first, second), "reward")
    assert found.difference.value == pytest.approx(0.03)
    assert found.difference.high - found.difference.low < 0.02
    assert found.first.high - found.first.low > 0.1


def test_there_is_no_interval_where_nothing_varies(tmp_path: Path) -> None:
    first, second = rewards(tmp_path, "a", [[0.0], [0.0]]), rewards(tmp_path, "b", [[1.0], [1.0]])
    found = measured(compare(first, second), "reward")
    assert (found.difference.value, found.difference.low, found.difference.high) == (1.0, None, None)
    alone = run_intervals(rewards(tmp_path, "c", [[0.5, 1.0]]))["reward"]
    assert (alone.value, alone.low) == (0.75, None)


def test_rows_are_paired_by_what_they_hold_wherever_they_stand(tmp_path: Path) -> None:
    first = rewards(tmp_path, "a", [[0.0], [1.0], [0.0]])
    moved = [rollout(2 - task, 0, float(task == 1), _ng_row_digest=f"{task:016x}") for task in range(3)]
    found = compare(first, run_of(tmp_path, "b", moved))
    assert (found.paired_by, found.better, found.worse, found.same) == ("row", 0, 0, 3)
    by_index = compare(first, run_of(tmp_path, "c", moved), "index")
    assert [(pair.first.index, pair.second.index) for pair in by_index.pairs] == [(0, 0), (1, 1), (2, 2)]


def test_runs_without_rewards_are_paired_for_what_they_have(tmp_path: Path) -> None:
    first = run_of(tmp_path, "a", [rollout(task, reward=None, tokens=10 * task) for task in range(9)])
    second = run_of(tmp_path, "b", [rollout(task, reward=None, tokens=11 * task) for task in range(9)])
    found = compare(first, second)
    assert (found.paired_by, found.better, found.same, found.worse, found.sign_test) == ("row", 0, 0, 0, None)
    tokens = measured(found, "output_tokens").difference
    assert tokens.value == 4.0
    assert 2.0 < tokens.low < 4.0 < tokens.high < 6.0
    bare = [rollout(task, reward=None, _ng_row_digest=None) for task in range(9)]
    assert compare(first, run_of(tmp_path, "d", bare)).paired_by == "index"
    alone = run_of(tmp_path, "c", [], [failure(task) for task in range(9)])
    assert compare(first, alone).paired_by is None


def test_a_row_that_only_failed_in_a_run_stands_beside_that_of_its_number(tmp_path: Path) -> None:
    first = run_of(tmp_path, "a", [rollout(0)], [failure(1), failure(2), failure(4)])
    second = run_of(tmp_path, "b", [rollout(0), rollout(1), rollout(3, _ng_row_digest=f"{4:016x}")], [failure(2)])
    found = compare(first, second)
    assert found.paired_by == "row"
    assert [(pair.first.index, pair.second.index) for pair in found.pairs] == [(0, 0), (1, 1), (2, 2)]
    assert (found.same, found.only_first, found.only_second) == (1, 0, 2)
    assert measured(found, "reward").tasks == 1


def test_equal_rows_are_paired_one_by_one(tmp_path: Path) -> None:
    first = rewards(tmp_path, "a", [[0.0], [1.0]], _ng_row_digest="same")
    second = rewards(tmp_path, "b", [[1.0], [1.0]], _ng_row_digest="same")
    found = compare(first, second)
    assert ([pair.difference for pair in found.pairs], found.better) == ([1.0, 0.0], 1)


@pytest.mark.parametrize(("pair_by", "paired"), [(None, "index"), ("index", "index"), ("row", None)])
def test_rows_without_digest_are_paired_by_number_unless_asked_otherwise(
    tmp_path: Path, pair_by: PairBy | None, paired: str | None
) -> None:
    first = rewards(tmp_path, "a", [[0.0], [1.0]], _ng_row_digest=None)
    second = rewards(tmp_path, "b", [[1.0], [1.0]])
    assert compare(first, second, pair_by).paired_by == paired


def test_runs_without_a_common_task_are_compared_as_a_whole(tmp_path: Path) -> None:
    first = rewards(tmp_path, "a", [[float(task % 3 == 0)] for task in range(60)])
    second = run_of(tmp_path, "b", [rollout(100 + task, 0, float(task % 3 > 0)) for task in range(60)])
    found = compare(first, second)
    assert (found.paired_by, found.pairs, found.only_first, found.only_second) == (None, (), 60, 60)
    difference = measured(found, "reward").difference
    assert difference.value == pytest.approx(1 / 3)
    assert 0.1 < difference.low < 1 / 3 < difference.high < 0.55


def test_only_tasks_with_rewards_in_both_runs_have_a_part(tmp_path: Path) -> None:
    first = rewards(tmp_path, "a", [[1.0], [1.0], [0.0]])
    records = [rollout(0, 0, 1.0), rollout(1, 0, 0.0), rollout(7, 0, 1.0)]
    found = compare(first, run_of(tmp_path, "b", records, [failure(2)]))
    assert (found.better, found.same, found.worse, found.only_first, found.only_second) == (0, 1, 1, 1, 1)
    reward = measured(found, "reward")
    assert (reward.first.value, reward.second.value, reward.difference.value, reward.tasks) == (1.0, 0.5, -0.5, 2)


def test_the_interval_covers_the_truth_about_as_often_as_it_says(tmp_path: Path) -> None:
    chance = random.Random(11)
    covered, widths = 0, []
    for _ in range(10):
        interval = run_intervals(rewards(tmp_path, "a", [[float(chance.random() < 0.4)] for _ in range(60)]))["reward"]
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 0.4 <= interval.high
        widths.append(interval.high - interval.low)
    assert covered >= 8
    by_the_normal_distribution = 2 * 1.96 * math.sqrt(0.4 * 0.6 / 60)
    assert statistics.fmean(widths) == pytest.approx(by_the_normal_distribution, rel=0.05)
