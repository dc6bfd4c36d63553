"""Sums of whole numbers."""

from tally.ranges import total

__all__ = ["total"]
