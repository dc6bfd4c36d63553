"""What the plots show, as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_gym.reports.comparison import compare
from nemo_gym.reports.figures import POINTS_SHOWN, TASKS_COMPARED, all_figures, names_of
from nemo_gym.reports.plotting import BINS, Figure
from nemo_gym.reports.runs import Run, read_run, shown_names
from tests.report_rollouts import failure, many, rollout, write


def run_of(tmp_path: Path, name: str, records: Any, failures: Any = ()) -> Run:
    return read_run(write(tmp_path / f"{name}.jsonl", records, failures), 1.0, lambda _: (0, 0))


def figures_of(*runs: Run) -> dict[str, Figure]:
    comparison = compare(*runs) if len(runs) == 2 else None
    return {
        figure.id: figure for figure in all_figures(runs, names_of(shown_names([run.path for run in runs])), comparison)
    }


def view(figure: Figure, label: str) -> Any:
    return next(view for view in figure.views if view.label == label)


def test_few_different_rewards_have_a_bar_each_and_many_share_bars(tmp_path: Path) -> None:
    few = figures_of(run_of(tmp_path, "a", [rollout(at, reward=(at % 3) / 2) for at in range(9)]))["rewards"]
    assert [(bar["x"], bar["y"]) for bar in few.views[0].data] == [(["0", "0.5", "1"], [3, 3, 3])]
    spread = figures_of(run_of(tmp_path, "b", [rollout(at, reward=at / 99) for at in range(100)]))["rewards"]
    (bar,) = spread.views[0].data
    assert len(bar["x"]) == BINS
    assert sum(bar["y"]) == 100
    assert set(bar["y"]) == {5}


def test_rewards_that_hardly_differ_have_bars_of_their_own(tmp_path: Path) -> None:
    for count in (2, 200):
        records = [rollout(at, reward=1 - at * 1e-9) for at in range(count)]
        (bar,) = figures_of(run_of(tmp_path, "a", records))["rewards"].views[0].data
        assert len(set(bar["x"])) == len(bar["x"]) == min(count, BINS)


def test_shares_make_runs_of_different_size_comparable(tmp_path: Path) -> None:
    first = run_of(tmp_path, "a", [rollout(at, reward=at % 2) for at in range(10)])
    second = run_of(tmp_path, "b", [rollout(at, reward=at % 2) for at in range(40)])
    shares = figures_of(first, second)["rewards"].views[0]
    assert [bar["y"] for bar in shares.data] == [[0.5, 0.5], [0.5, 0.5]]


def test_pass_rates_are_ordered_and_lead_to_their_task(tmp_path: Path) -> None:
    records = [rollout(task, at, float(at < task)) for task in (2, 0, 1) for at in range(2)]
    figure = figures_of(run_of(tmp_path, "a", records))["passrates"]
    (curve,) = figure.views[0].data
    assert curve["y"] == [0.0, 0.5, 1.0]
    assert curve["customdata"] == [[0, 0], [0, 1], [0, 2]]
    assert all(0 <= low <= 1 for low in curve["error_y"]["arrayminus"])


def test_tasks_that_pass_now_and_then_are_apart_from_those_that_never_or_always_do(tmp_path: Path) -> None:
    passes = {0: 0, 1: 1, 2: 15, 3: 29, 4: 30}
    records = [rollout(task, at, float(at < count)) for task, count in passes.items() for at in range(30)]
    (bars,) = view(figures_of(run_of(tmp_path, "a", records))["passrates"], "how many tasks").data
    assert {x: y for x, y in zip(bars["x"], bars["y"], strict=True) if y} == {
        "0 %": 1, "10 %": 1, "50 %": 1, "90 %": 1, "100 %": 1,
    }  # fmt: skip


def test_failed_rollouts_have_no_part_in_the_durations(tmp_path: Path) -> None:
    figure = figures_of(run_of(tmp_path, "a", [rollout(0)], [failure(at) for at in range(1, 9)]))["durations"]
    (box,) = view(figure, "spread").data
    assert (box["median"], box["mean"], box["upperfence"]) == ([1.5], [1.5], [1.5])


def test_the_line_is_of_all_rollouts_though_only_some_are_dots(tmp_path: Path) -> None:
    figure = figures_of(run_of(tmp_path, "a", many(2_000, words=3)))["against-length"]
    dots, line = view(figure, "output tokens").data
    assert len(dots["x"]) <= POINTS_SHOWN
    assert sum(int(text.split()[2]) for text in line["text"]) == 2_000
    assert "even selection" in figure.caption


def test_a_measure_that_never_varies_has_no_plot(tmp_path: Path) -> None:
    figures = figures_of(run_of(tmp_path, "a", [rollout(at, tokens=5 + at) for at in range(5)]))
    assert "against-turns" not in figures
    assert "seconds" not in [one.label for one in figures["against-length"].views]


def test_durations_have_parts_where_the_agent_tells_them(tmp_path: Path) -> None:
    told = {"total": 1.5, "model": 1.0, "tools": 0.25, "seed": 0.05}
    figure = figures_of(run_of(tmp_path, "a", [rollout(at, _ng_rollout_seconds=told) for at in range(3)]))["durations"]
    parts = {trace["name"]: trace["x"][0] for trace in view(figure, "by part").data}
    assert set(parts) == {"seed", "model", "tools", "other"}
    assert abs(parts["other"] - 0.2) < 1e-9
    without = figures_of(run_of(tmp_path, "b", [rollout(0)]))["durations"]
    assert [one.label for one in without.views] == ["spread"]


def test_failures_are_counted_by_reason_and_lead_to_their_rollouts(tmp_path: Path) -> None:
    failures = [failure(1), failure(2, kind="<b>lost</b>"), failure(3, kind="<b>lost</b>")]
    (trace,) = figures_of(run_of(tmp_path, "a", [rollout(0)], failures))["failures"].views[0].data
    assert (trace["text"], trace["x"]) == (["timeout", "&lt;b&gt;lost&lt;/b&gt;"], [1, 2])
    assert trace["customdata"][1] == [0, None, None, "<b>lost</b>"]


def test_no_name_or_text_reaches_a_plot_as_markup(tmp_path: Path) -> None:
    record = rollout(0, id="<a href='javascript:x'>%{x}")
    figures = figures_of(
        run_of(tmp_path, "<b>a%{x}", [record, rollout(1)]), run_of(tmp_path, "b", [record, rollout(1, reward=0.0)])
    )
    assert "<a" not in str(figures)
    assert "<b>" not in str(figures)
    assert "a%{x}" not in str(figures)


def test_differences_are_ordered_and_thinned_out(tmp_path: Path) -> None:
    first = run_of(tmp_path, "a", [rollout(at, reward=0.5) for at in range(500)])
    second = run_of(tmp_path, "b", [rollout(at, reward=at / 500) for at in range(500)])
    figure = figures_of(first, second)["differences"]
    (bars,) = figure.views[0].data
    assert len(bars["y"]) <= TASKS_COMPARED
    assert bars["y"] == sorted(bars["y"])
    assert "One of 2 tasks is drawn" in figure.caption
