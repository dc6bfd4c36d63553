"""How long something took, each time, counted in ranges: a few steps each, and never more memory."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0,
)  # fmt: skip
"""The ranges' upper bounds in seconds: fine where a hop is, and up to the length of a whole rollout."""


class Durations:
    """Counts durations.

    Attributes:
        counts: How many were in each range; the last one has no upper bound.
        sum: Seconds of all together.
    """

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
