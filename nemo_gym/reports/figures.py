"""The plots of a report as Plotly figures, from one run or two.

A figure is plain JSON that plotly.js draws; the page adds the colours of its theme. Where a mark of a plot stands for
a task or a kind of failure, its `customdata` says which, and a click shows its rollouts.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nemo_gym.reports.comparison import Comparison, wilson
from nemo_gym.reports.facts import PARTS
from nemo_gym.reports.plotting import COLOURS, DISCRETE, Figure, Trace, View, bins, plain, short, task_name
from nemo_gym.reports.runs import Run

PART_COLOURS: Final = {
    "seed": "#8a7fd1",
    "model": "#2f7ed8",
    "tools": "#2a9d78",
    "verify": "#e0a526",
    "other": "#8b95a1",
}

POINTS_SHOWN: Final = 1_500
TASKS_AS_BARS: Final = 60
TASKS_COMPARED: Final = 400
KINDS_SHOWN: Final = 20

_LENGTHS: Final = {
    "output_tokens": "output tokens",
    "total_tokens": "all tokens",
    "characters": "characters written",
    "seconds": "seconds",
}
_STEPS: Final = {"turns": "turns", "tool_calls": "tool calls"}


def all_figures(runs: Sequence[Run], names: Sequence[str], comparison: Comparison | None = None) -> list[Figure]:
    """Return the figures of a report.

    Args:
        runs: One run or two.
        names: What they are called in legends.
        comparison: Of two runs.
    """
    names = [plain(name) for name in names]
    figures = [
        _differences(comparison) if comparison is not None else None,
        _reward_distribution(runs, names),
        _pass_rates(runs, names),
        _reward_against(runs, names, "length", _LENGTHS),
        _reward_against(runs, names, "turns", _STEPS),
        _durations(runs, names),
        _failures(runs, names),
    ]
    return [figure for figure in figures if figure is not None]


def _reward_distribution(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    rewards = [[reward for reward in run.columns["reward"] if not math.isnan(reward)] for run in runs]
    if not any(rewards):
        return None
    data, data_of_share = [], []
    labels, count = bins(rewards)
    for at, (name, values) in enumerate(zip(names, rewards, strict=True)):
        counts = count(values)
        trace = {"type": "bar", "name": name, "x": labels, "y": counts, "marker": {"color": COLOURS[at]}}
        data.append({**trace, "hovertemplate": "reward %{x}<br>%{y} rollouts<extra>" + name + "</extra>"})
        shares = [count / len(values) if values else 0 for count in counts]
        hover = "reward %{x}<br>%{y:.1%} of rollouts<extra>" + name + "</extra>"
        data_of_share.append({**trace, "y": shares, "hovertemplate": hover})
    axis = {"title": {"text": "reward"}, "type": "category"}
    count_view = View("rollouts", data, {"xaxis": axis, "yaxis": {"title": {"text": "rollouts"}}})
    share_axis = {"title": {"text": "share of rollouts"}, "tickformat": ".0%"}
    share_view = View("share", data_of_share, {"xaxis": axis, "yaxis": share_axis})
    views = [count_view, share_view] if len(runs) == 1 else [share_view, count_view]
    return Figure("rewards", "Rewards", "How many rollouts got which reward. Failed rollouts have none.", views)


def _pass_rates(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    scored = [[task for task in run.tasks if task.places] for run in runs]
    if not any(scored):
        return None
    curves, shares = [], []
    buckets = [f"{10 * at} %" for at in range(11)]
    for at, (run, name, tasks) in enumerate(zip(runs, names, scored, strict=True)):
        rated = [(run.passes(task), len(task.places), task) for task in tasks]
        rated.sort(key=lambda entry: (entry[0] / entry[1], entry[2].index))
        intervals = [wilson(passes, rollouts) for passes, rollouts, _ in rated]
        rates = [interval.value or 0.0 for interval in intervals]
        curve: Trace = {
            "name": name,
            "x": list(range(1, len(rated) + 1)),
            "y": rates,
            "customdata": [[at, task.index] for _, _, task in rated],
            "text": [f"{task_name(task)}: {passes} of {rollouts} passed" for passes, rollouts, task in rated],
            "hovertemplate": "%{text}<extra>" + name + "</extra>",
        }
        if len(rated) <= TASKS_AS_BARS and len(runs) == 1:
            above = [(interval.high or 0.0) - rate for interval, rate in zip(intervals, rates, strict=True)]
            below = [rate - (interval.low or 0.0) for interval, rate in zip(intervals, rates, strict=True)]
            error = {
                "type": "data",
                "symmetric": False,
                "array": above,
                "arrayminus": below,
                "thickness": 1,
                "width": 2,
            }
            curve |= {"type": "bar", "textposition": "none", "error_y": error, "marker": {"color": COLOURS[at]}}
        else:
            curve |= {"type": "scatter", "mode": "lines", "line": {"color": COLOURS[at], "width": 2}}
        curves.append(curve)
        counts = Counter(map(_tenth, rates))
        bar = {"type": "bar", "name": name, "x": buckets, "y": [counts[bucket] for bucket in range(11)]}
        hover = "%{y} tasks pass about %{x}<extra>" + name + "</extra>"
        shares.append({**bar, "marker": {"color": COLOURS[at]}, "hovertemplate": hover})
    rate_axis = {"title": {"text": "pass rate"}, "tickformat": ".0%", "range": [0, 1.02]}
    rank_axis = {"title": {"text": "tasks, hardest first"}, "rangemode": "tozero"}
    spread_axis = {"title": {"text": "pass rate, to 10 %; the ends: never, always"}, "type": "category"}
    caption = "The share of a task's rollouts that passed"
    if any(trace["type"] == "bar" for trace in curves):
        caption += ", with its 95 % interval (Wilson)"
    return Figure(
        "passrates",
        "Pass rate per task",
        f"{caption}. Click a task to read its rollouts.",
        [
            View("each task", curves, {"xaxis": rank_axis, "yaxis": rate_axis}),
            View("how many tasks", shares, {"xaxis": spread_axis, "yaxis": {"title": {"text": "tasks"}}}),
        ],
    )


def _tenth(rate: float) -> int:
    """Return a rate in tenths, with 0 and 10 for none and all alone: what never passes is another thing than a few."""
    return round(rate) * 10 if rate in (0.0, 1.0) else min(9, max(1, round(10 * rate)))


def _reward_against(runs: Sequence[Run], names: Sequence[str], what: str, measures: Mapping[str, str]) -> Figure | None:
    views = []
    hidden = 0
    for measure, title in measures.items():
        data: list[Trace] = []
        distinct: set[float] = set()
        for at, (run, name) in enumerate(zip(runs, names, strict=True)):
            columns = zip(run.columns[measure], run.columns["reward"], range(len(run)), strict=True)
            pairs = [entry for entry in columns if not (math.isnan(entry[0]) or math.isnan(entry[1]))]
            distinct |= {x for x, _, _ in pairs}
            hidden = max(hidden, len(pairs) - POINTS_SHOWN)
            data += _points_and_mean(pairs, name, at, title)
        if len(distinct) > 1:
            axes = {"xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": "reward"}}}
            views.append(View(title, data, axes))
    if not views:
        return None
    some = (
        f" Of more than {POINTS_SHOWN:,} rollouts an even selection is drawn; the line is of all." if hidden > 0 else ""
    )
    caption = f"Dots are rollouts; the line is their mean reward, of each value or of groups of equal size.{some}"
    return Figure(f"against-{what}", f"Reward against {what}", caption, views)


def _points_and_mean(pairs: list[tuple[float, float, int]], name: str, at: int, title: str) -> Iterator[Trace]:
    pairs = sorted(pairs)
    step = max(1, math.ceil(len(pairs) / POINTS_SHOWN))
    shown = pairs[::step]
    opacity = 0.55 if len(shown) < 200 else 0.3
    yield {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "showlegend": False,
        "x": [x for x, _, _ in shown],
        "y": [y for _, y, _ in shown],
        "customdata": [[at, None, place] for _, _, place in shown],
        "marker": {"color": COLOURS[at], "size": 6, "opacity": opacity},
        "hovertemplate": f"%{{x}} {title}<br>reward %{{y}}<extra>{name}</extra>",
    }
    groups = list(_groups(pairs))
    yield {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [statistics.fmean(x for x, _, _ in group) for group in groups],
        "y": [statistics.fmean(y for _, y, _ in group) for group in groups],
        "text": [f"mean of {len(group)} rollouts" for group in groups],
        "line": {"color": COLOURS[at], "width": 2.5},
        "marker": {"color": COLOURS[at], "size": 7},
        "hovertemplate": f"%{{x:.4~g}} {title}<br>mean reward %{{y:.3~g}}<br>%{{text}}<extra>{name}</extra>",
    }


def _groups(pairs: list[tuple[float, float, int]]) -> Iterator[list[tuple[float, float, int]]]:
    """Cut sorted pairs into groups: one for each value where there are few, else ten of about equal size."""
    distinct = len({x for x, _, _ in pairs})
    group: list[tuple[float, float, int]] = []
    for pair in pairs:
        full = distinct <= DISCRETE or len(group) >= len(pairs) / 10
        if group and full and pair[0] != group[-1][0]:
            yield group
            group = []
        group.append(pair)
    if group:
        yield group


def _durations(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    known = [_seconds_of_results(run) for run in runs]
    if not any(known):
        return None
    views = []
    by_part = [_mean_parts(run) for run in runs]
    if any(by_part):
        shown = [part for part in PART_COLOURS if any(part in parts for parts in by_part)]
        data = [
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": list(names),
                "x": [parts.get(part) for parts in by_part],
                "marker": {"color": PART_COLOURS[part]},
                "hovertemplate": part + ": %{x:.3~g} s on average<extra></extra>",
            }
            for part in shown
        ]
        axes = {
            "xaxis": {"title": {"text": "seconds, mean per rollout"}},
            "yaxis": {"type": "category", "visible": len(runs) > 1},
        }
        views.append(View("by part", data, {**axes, "barmode": "stack", "legend": {"traceorder": "normal"}}))
    boxes = [_box(values, name, at) for at, (values, name) in enumerate(zip(known, names, strict=True)) if values]
    box_axes = {
        "xaxis": {"title": {"text": "seconds per rollout"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "visible": len(runs) > 1},
    }
    views.append(View("spread", boxes, {**box_axes, "showlegend": False}))
    caption = "Where a rollout's time goes." if any(by_part) else "How long rollouts took; their agent tells no parts."
    return Figure("durations", "Durations", f"{caption} The box holds the middle half, its whiskers 5 to 95 %.", views)


def _seconds_of_results(run: Run) -> list[float]:
    told = zip(run.columns["seconds"], run.failure, strict=True)
    return [value for value, failure in told if failure is None and not math.isnan(value)]


def _mean_parts(run: Run) -> dict[str, float]:
    """Return the mean seconds of each part over the rollouts that tell any, and of what is left as `other`."""
    told = [
        place
        for place in range(len(run))
        if any(not math.isnan(run.parts[part][place]) for part in PARTS)
        and not math.isnan(run.columns["seconds"][place])
    ]
    if not told:
        return {}
    means = {}
    for part in PARTS:
        values = [run.parts[part][place] for place in told]
        if any(not math.isnan(value) for value in values):
            means[part] = math.fsum(value for value in values if not math.isnan(value)) / len(told)
    other = statistics.fmean(run.columns["seconds"][place] for place in told) - math.fsum(means.values())
    return {**means, "other": max(0.0, other)}


def _box(values: list[float], name: str, at: int) -> Trace:
    values = sorted(values)

    def rank(share: float) -> float:
        return values[max(0, math.ceil(share * len(values)) - 1)]

    return {
        "type": "box",
        "orientation": "h",
        "name": name,
        "y": [name],
        "q1": [rank(0.25)],
        "median": [statistics.median(values)],
        "q3": [rank(0.75)],
        "lowerfence": [rank(0.05)],
        "upperfence": [rank(0.95)],
        "mean": [statistics.fmean(values)],
        "marker": {"color": COLOURS[at]},
    }


def _failures(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    counts = [run.failures for run in runs]
    kinds = sorted(set().union(*counts), key=lambda kind: (sum(count[kind] for count in counts), kind))
    if not kinds:
        return None
    hidden, kinds = kinds[:-KINDS_SHOWN], kinds[-KINDS_SHOWN:]
    labels = [plain(short(kind)) for kind in kinds]  # not as categories: two that are cut may look the same
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(range(len(kinds))),
            "text": labels,
            "textposition": "none",
            "x": [count[kind] for kind in kinds],
            "customdata": [[at, None, None, kind] for kind in kinds],
            "width": 0.8 / len(runs) * min(1, len(kinds) / 4),
            "marker": {"color": COLOURS[at]},
            "hovertemplate": "%{text}: %{x} rollouts<extra>" + name + "</extra>",
        }
        for at, (name, count) in enumerate(zip(names, counts, strict=True))
    ]
    axes = {
        "xaxis": {"title": {"text": "rollouts"}, "rangemode": "tozero"},
        "yaxis": {"tickvals": list(range(len(kinds))), "ticktext": labels, "automargin": True, "zeroline": False},
    }
    caption = "Rollouts without result, by reason. They have no part in any other figure. Click a bar to read them."
    if hidden:
        caption += f" {len(hidden)} rarer reasons are not drawn."
    return Figure("failures", "Failures", caption, [View("failures", data, axes)])


def _differences(comparison: Comparison) -> Figure | None:
    differing = [pair for pair in comparison.pairs if pair.difference is not None]
    if not differing:
        return None
    ordered = sorted(differing, key=lambda pair: (pair.difference or 0.0, pair.second.index))
    step = math.ceil(len(ordered) / TASKS_COMPARED)
    shown = ordered[::step]
    differences = [pair.difference or 0.0 for pair in shown]
    data = [
        {
            "type": "bar",
            "name": "difference",
            "x": list(range(1, len(shown) + 1)),
            "y": differences,
            "customdata": [[1, pair.second.index] for pair in shown],
            "text": [task_name(pair.second) for pair in shown],
            "textposition": "none",
            "marker": {"color": [COLOURS[difference > 0] for difference in differences]},
            "hovertemplate": "%{text}<br>%{y:+.3~g}<extra></extra>",
        }
    ]
    some = f" One of {step} tasks is drawn." if step > 1 else ""
    axes = {
        "xaxis": {"title": {"text": "tasks, from most worse to most better"}},
        "yaxis": {"title": {"text": "mean reward, B less A"}, "zeroline": True},
        "showlegend": False,
        "bargap": 0.15 if len(shown) < 100 else 0,
    }
    caption = (
        f"Each task's mean reward in B less that in A: orange is better in B.{some} "
        "Click a task to read its rollouts side by side."
    )
    return Figure("differences", "Change by task", caption, [View("tasks", data, axes)])


def names_of(files: Sequence[str]) -> list[str]:
    """Return what runs are called: by their file alone, or A and B with it."""
    return (
        list(files)
        if len(files) == 1
        else [f"{letter} · {short(file)}" for letter, file in zip("AB", files, strict=True)]
    )
