"""What the plots of a report have in common: their shape, colours, bars and texts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nemo_gym.reports.runs import Task

COLOURS: Final = ("#2f7ed8", "#e8871e")
"""Of the first run and the second; told apart by the colour-blind too, on light and dark."""

BINS: Final = 20
DISCRETE: Final = 15
"""Up to how many different values each has its own bar or point."""

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at a figure.

    Args:
        label: Its name on the button that chooses it.
        data: Plotly traces.
        layout: Plotly layout, without colours.
    """

    label: str
    data: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its title.

    Args:
        id: Its id in the page.
        title: What it shows.
        caption: How it is to be read.
        views: The ways to look at it, the first at first.
    """

    id: str
    title: str
    caption: str
    views: list[View]


def bins(columns: Sequence[Sequence[float]]) -> tuple[list[str], Callable[[Sequence[float]], list[int]]]:
    """Return the labels of the bars for some columns of values, and what counts a column's values into them."""
    distinct = sorted({value for column in columns for value in column})
    if len(distinct) <= DISCRETE:

        def count_each(values: Sequence[float]) -> list[int]:
            counts = Counter(values)
            return [counts[value] for value in distinct]

        return _labels(distinct, 6), count_each
    low, high = distinct[0], distinct[-1]
    step = (high - low) / BINS
    edges = [low + step * at for at in range(1, BINS)]

    def count_ranges(values: Sequence[float]) -> list[int]:
        counts = Counter(bisect_right(edges, value) for value in values)
        return [counts[at] for at in range(BINS)]

    ends = [low, *edges, high]
    names = _labels(ends, 3)
    return [f"{names[at]} to {names[at + 1]}" for at in range(BINS)], count_ranges


def _labels(values: Sequence[float], digits: int) -> list[str]:
    """Return different values as texts that differ: bars of the same name would become one."""
    for length in range(digits, 17):
        labels = [f"{value:.{length}g}" for value in values]
        if len(set(labels)) == len(labels):
            return labels
    return [repr(value) for value in values]


def task_name(task: Task) -> str:
    """Return what a task is called in a plot."""
    name = f"task {task.index}" if task.index >= 0 else "a task"
    return plain(f"{name} · {short(task.label)}" if task.label else name)


def plain(text: str) -> str:
    """Return a text for a place where plotly.js reads a few tags and templates, with nothing left for it to read."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def short(text: str, limit: int = 40) -> str:
    """Return a text cut to a length."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
