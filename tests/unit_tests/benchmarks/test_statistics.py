"""Medians, quartiles, and ratios taken round by round."""

from __future__ import annotations

import pytest

from benchmarks.harness.statistics import Spread, differences, quantile, ratios


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.25, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.25, 2.0),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 1.0, 5.0),
        ([1.0, 2.0, 3.0, 4.0], 0.75, 3.25),
    ],
)
def test_a_quantile_lies_between_its_neighbours(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == pytest.approx(expected)


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_a_spread_holds_the_median_and_the_quartiles() -> None:
    assert Spread.of([1.0, 100.0, 2.0, 3.0, 4.0]) == Spread(median=3.0, low=2.0, high=4.0, count=5)


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_slows_both() -> None:
    assert ratios([2.0, 20.0], [1.0, 10.0]) == [2.0, 2.0]
    assert differences([2.0, 20.0], [1.0, 10.0]) == [1.0, 10.0]


def test_rounds_that_only_one_has_are_left_out() -> None:
    assert ratios([2.0, 4.0, 6.0], [1.0, 2.0]) == [2.0, 2.0]
    assert ratios([2.0], [0.0]) == []
