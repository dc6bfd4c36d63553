"""The JSONL files of a collection: reading rows, keeping results and failures."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nemo_gym.errors import DatasetError
from nemo_gym.rollouts.io import (
    FailuresFile,
    ResultsFile,
    RolloutSet,
    append_line,
    format_digest,
    index_input,
    iter_failures,
    iter_results,
    read_rows,
)
from tests.fake_agent import read_lines


def result(rollouts: RolloutSet, task: int, rollout: int = 0, **fields: Any) -> dict[str, Any]:
    digest = format_digest(rollouts.row_digests[task])
    return {"_ng_task_index": task, "_ng_rollout_index": rollout, "_ng_row_digest": digest, **fields}


@pytest.fixture
def rollouts(tmp_path: Path) -> RolloutSet:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    digests = array("Q")
    assert len(list(index_input(source, digests))) == 3
    return RolloutSet(digests, num_repeats=2)


def test_rows_are_numbered_without_blank_lines_and_lines_with_them(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"a": "\xc3\xa9"}  \nnonsense\n{"a": 4}')
    rows = list(read_rows(source))

    assert [(row.task_index, row.line_number) for row in rows] == [(0, 1), (1, 3), (2, 4), (3, 5)]
    assert [row.parse() for row in (rows[0], rows[1], rows[3])] == [{"a": 1}, {"a": "é"}, {"a": 4}]
    assert len(list(read_rows(source, limit=2))) == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "invalid JSON"),
        ("[]", "an array"),
        ('"x"', "a string"),
        ("1.5", "a number"),
        ("null", "null"),
        ("true", "a boolean"),
    ],
)
def test_a_row_that_is_no_object_tells_what_it_is(tmp_path: Path, line: str, found: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(line)
    [row] = read_rows(source)
    with pytest.raises(DatasetError, match=found):
        row.parse()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="absent"):
        list(read_rows(tmp_path / "absent.jsonl"))
    with pytest.raises(DatasetError, match="absent"):
        list(iter_results(tmp_path / "absent.jsonl"))


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 2))))
def test_a_rollout_set_holds_what_was_added(members: set[tuple[int, int]]) -> None:
    rollouts = RolloutSet(array("Q", range(10)), num_repeats=3)
    for member in [*members, *members]:
        rollouts.add(*member)

    assert len(rollouts) == len(members)
    assert {(task, index) for task in range(-1, 11) for index in range(-1, 4) if (task, index) in rollouts} == members


def test_a_rollout_set_refuses_what_it_does_not_cover() -> None:
    rollouts = RolloutSet(array("Q", [1]), num_repeats=2)
    for stranger in [(1, 0), (0, 2), (-1, 0)]:
        with pytest.raises(ValueError, match="has no rollout"):
            rollouts.add(*stranger)


def test_appended_results_are_found_by_a_scan(tmp_path: Path, rollouts: RolloutSet) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile.open(path) as results:
        results.append(result(rollouts, 2, 1))
        results.append(result(rollouts, 0, 0))
    found = RolloutSet(rollouts.row_digests, 2)
    with ResultsFile.open(path) as results:
        list(results.scan(found))

    assert (2, 1) in found
    assert (0, 0) in found
    assert len(found) == 2


def test_whatever_part_of_the_last_line_is_missing_whole_lines_stay(tmp_path: Path, rollouts: RolloutSet) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile.open(path) as results:
        results.append(result(rollouts, 0))
        first = results.size
        results.append(result(rollouts, 1, text="é\u2028"))
        second = results.size
    whole = path.read_bytes()
    for cut in range(first, second + 1):
        path.write_bytes(whole[:cut])
        found = RolloutSet(rollouts.row_digests, 2)
        with ResultsFile.open(path) as results:
            list(results.scan(found))
            results.append(result(rollouts, 2))
        expected = [0, 1, 2] if cut >= second - 1 else [0, 2]
        assert [line["_ng_task_index"] for line in read_lines(path)] == expected
        assert len(found) == len(expected) - 1


@pytest.mark.parametrize(
    "damage",
    [
        {"_ng_task_index": "0"},
        {"_ng_rollout_index": None},
        {"_ng_row_digest": "no number"},
        {"_ng_task_index": 10**12},
        {"_ng_rollout_index": -1},
    ],
)
def test_a_line_that_is_no_result_of_the_run_is_named(
    tmp_path: Path, rollouts: RolloutSet, damage: dict[str, Any]
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile.open(path) as results:
        results.append(result(rollouts, 0))
        results.append({**result(rollouts, 1), **damage})
        with pytest.raises(DatasetError, match=r"out\.jsonl, line 2"):
            list(results.scan(rollouts))


def test_a_line_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "out"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        append_line(descriptor, b"whole\n")
        with pytest.raises(BrokenPipeError):
            append_line(writer, b"nothing\n")
    finally:
        os.close(descriptor)
        os.close(writer)
    assert path.read_bytes() == b"whole\n"


def test_tidying_keeps_the_last_failure_of_each_rollout_without_result(tmp_path: Path, rollouts: RolloutSet) -> None:
    failures = FailuresFile(tmp_path / "failures.jsonl")
    for task, reason in [(0, "first"), (1, "only"), (0, "second"), (9, "of a longer run")]:
        failures.append({"_ng_task_index": task, "_ng_rollout_index": 0, "reason": reason})
    rollouts.add(1, 0)
    failures.tidy(rollouts)
    assert [line["reason"] for line in iter_failures(failures.path)] == ["second", "of a longer run"]

    failures.append({"_ng_task_index": 2, "_ng_rollout_index": 0, "reason": "new"})
    assert len(read_lines(failures.path)) == 3
    failures.close()


def test_a_failures_file_without_failures_is_removed(tmp_path: Path, rollouts: RolloutSet) -> None:
    failures = FailuresFile(tmp_path / "failures.jsonl")
    failures.tidy(rollouts)
    failures.append({"_ng_task_index": 1, "_ng_rollout_index": 0})
    rollouts.add(1, 0)
    failures.tidy(rollouts)
    assert list(tmp_path.glob("failures*")) == []


def test_a_file_of_something_else_is_no_failures_file(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    path.write_text('{"_ng_task_index": 1}\n')
    with pytest.raises(DatasetError, match="not a failures file"):
        list(iter_failures(path))


def test_results_are_read_up_to_an_unfinished_line_but_not_past_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"a": 1}\n\n{"a": ')
    assert list(iter_results(path)) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DatasetError, match="line 2: invalid JSON"):
        list(iter_results(path))
    path.write_text("[]\n")
    with pytest.raises(DatasetError, match="line 1: expected a JSON object"):
        list(iter_results(path))
