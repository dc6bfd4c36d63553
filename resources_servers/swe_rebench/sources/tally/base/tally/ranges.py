"""Ranges of whole numbers."""


def total(first, last):
    """Return the sum of the whole numbers from first to last, both included."""
    return sum(range(first, last))
