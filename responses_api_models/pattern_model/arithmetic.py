"""Sums written out in digits, the one kind of question that the policy answers without a tool."""

from __future__ import annotations

import re
from typing import Final

_SUM: Final = re.compile(r"(?<![\w.*/^(-])(-?\d+(?:\s*[-+]\s*\d+)+)\s*=?\s*\??\s*$", re.MULTILINE)
_TERM: Final = re.compile(r"[-+]?\s*\d+")


def solve_sum(text: str) -> int | None:
    """Return the value of the one sum of whole numbers (`12 - 5 + 3 =`) that ends a line of `text`, or None."""
    found = _SUM.findall(text)
    if len(found) != 1:
        return None
    return sum(int(term.replace(" ", "")) for term in _TERM.findall(found[0]))
