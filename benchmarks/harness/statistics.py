"""Medians and spreads. Ratios are taken within a round, so that what slows the machine for a while slows both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements, and how far they lie apart.

    Attributes:
        median: The median.
        low: The lower quartile.
        high: The upper quartile.
        count: How many measurements there were.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), quantile(values, 0.25), quantile(values, 0.75), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, interpolated between neighbours."""
    if not values:
        raise ValueError("no values: a quantile needs at least one")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of each round; rounds that only one of the two has are left out."""
    return [value / other for value, other in zip(values, base, strict=False) if other]


def differences(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the difference of each round; rounds that only one of the two has are left out."""
    return [value - other for value, other in zip(values, base, strict=False)]
