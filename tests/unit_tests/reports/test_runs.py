"""What a run counts, and what it tells about a file whose figures need a second look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import DatasetError, UsageError
from nemo_gym.reports.comparison import run_intervals
from nemo_gym.reports.report import default_output, write_report
from nemo_gym.reports.runs import Run, read_run, shown_names
from tests.report_rollouts import rollout, write


def run_of(tmp_path: Path, records: list[Any]) -> Run:
    return read_run(write(tmp_path / "rollouts.jsonl", records), 1.0, lambda _: (0, 0))


@pytest.mark.parametrize("number", [2**53, 2**63, 2**64 - 1, -1, True, "0", 0.0])
def test_what_is_no_number_of_a_row_makes_a_rollout_a_task_of_its_own(tmp_path: Path, number: Any) -> None:
    records = [rollout(0, 0, 1.0) | {"_ng_task_index": number, "_ng_rollout_index": number} for _ in range(2)]
    run = run_of(tmp_path, [*records, {"reward": 0.0}])
    assert [(task.index, len(task.places)) for task in run.tasks] == [(-3, 1), (-2, 1), (-1, 1)]
    assert list(run.rollout_index) == [0, 0, 0]


def test_a_number_that_only_python_reads_is_none_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"reward": 1, "x": NaN, "_ng_task_index": 1' + "0" * 30 + "}\n")
    assert [task.index for task in read_run(path, 1.0, lambda _: (0, 0)).tasks] == [-1]


def test_rollouts_without_a_number_are_counted_within_their_task(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{"reward": 1, "_ng_task_index": task} for task in (0, 1, 0, 0)])
    assert list(run.rollout_index) == [0, 0, 1, 2]
    assert run.notices == []


def test_a_rollout_that_stands_twice_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path, [rollout(0), rollout(1), rollout(1, 1), rollout(0), rollout(0)])
    assert run.notices == ["2 lines hold a rollout that another line holds too (the same row and number); all count"]


def test_rows_that_differ_under_one_number_are_told(tmp_path: Path) -> None:
    records = [
        rollout(task, index, _ng_row_digest=f"{task}{index * (task < 2)}") for task in range(4) for index in (0, 1)
    ]
    run = run_of(tmp_path, records)
    assert run.notices == [
        "2 tasks have rollouts of different rows under one number, the first is task 0: "
        "this file was put together from several, and its tasks are mixed"
    ]


def test_a_rollout_without_a_reward_has_its_part_in_all_other_figures(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, [rollout(0, 0, None, tokens=30), rollout(0, 1, 1.0, tokens=10), rollout(1, 0, "1", tokens=5)]
    )
    intervals = run_intervals(run)
    assert intervals["reward"].value == 1.0
    assert intervals["output_tokens"].value == 12.5


def test_runs_of_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [tmp_path / name / "x" / "rollouts.jsonl" for name in ("before", "after")]
    for path in paths:
        path.parent.mkdir(parents=True)
    assert shown_names(paths) == ["before/x/rollouts.jsonl", "after/x/rollouts.jsonl"]
    assert shown_names([paths[0], paths[0]]) == ["rollouts.jsonl", "rollouts.jsonl"]
    assert shown_names([paths[0], tmp_path / "b.jsonl"]) == ["rollouts.jsonl", "b.jsonl"]
    assert default_output(paths) == paths[0].with_name("rollouts_and_after_x_rollouts_report.html")


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -float("inf")])
def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path, threshold: float) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0)])
    with pytest.raises(UsageError, match="pass-threshold"):
        write_report([path], tmp_path / "report.html", pass_threshold=threshold)


def test_a_folder_is_refused_with_the_rollouts_file_that_is_in_it(tmp_path: Path) -> None:
    write(tmp_path / "rollouts.jsonl", [rollout(0)])
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(DatasetError, match="is a folder; expected a rollouts file"):
            default_output([tmp_path / "rollouts.jsonl", folder])
        with pytest.raises(DatasetError, match="is a folder"):
            write_report([folder], tmp_path / "report.html")
    with pytest.raises(DatasetError, match=r"such as .*/rollouts\.jsonl"):
        default_output([tmp_path])


def test_what_has_no_folder_of_its_own_needs_an_output() -> None:
    with pytest.raises(UsageError, match=r"/dev/null .* --output"):
        default_output([Path("/dev/null")])


def test_a_compressed_file_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\n\x00")
    with pytest.raises(DatasetError, match=r"line 1: compressed .*gunzip"):
        write_report([path], tmp_path / "report.html")
