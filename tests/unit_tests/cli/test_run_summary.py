"""The summary at the end of a run, on a wide console."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from nemo_gym.cli.run_summary import RunSummary
from nemo_gym.reward_profile import profile_rollouts
from nemo_gym.rollouts.events import RolloutFailed, RolloutRunAgain
from nemo_gym.rollouts.ledger import CollectionSummary
from nemo_gym.rollouts.record import RolloutFiles
from nemo_gym.rollouts.tally import RunTally
from tests.fake_agent import write_rows

AGAIN = "gym eval run --resume --output out.jsonl"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutFiles:
    monkeypatch.chdir(tmp_path)
    files = RolloutFiles(tmp_path / "out.jsonl")
    write_rows(files.output, {"_ng_task_index": 0, "reward": 1.0}, {"_ng_task_index": 1, "reward": 0.0})
    return files


def summary_of(
    files: RolloutFiles, counts: CollectionSummary, failures: Iterable[tuple[str, str]] = (), logs: Path | None = None
) -> RunSummary:
    tally = RunTally()
    for name, reason in failures:
        tally(RolloutFailed(0, 0, name, reason))
    return RunSummary(files, counts, tally, AGAIN, logs)


def lines_of(summary: RunSummary, *, unfinished: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=300, highlight=False)
    if unfinished:
        summary.show_unfinished(console)
    else:
        summary.show(console, profile_rollouts(summary.files.output), {})
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_a_run_without_trouble_shows_figures_files_and_how_to_read_them(files: RolloutFiles) -> None:
    files.metrics.touch()
    lines = lines_of(
        summary_of(files, CollectionSummary(total=2, finished=2, duration_s=4.0), logs=files.output.parent)
    )
    assert "mean reward 0.5 +- 0.5 standard error over tasks" in lines
    assert "finished 2 of 2 rollouts" in lines
    assert "took 4.0 s 0.5 rollouts/s" in lines
    assert lines[-4:] == [
        "rollouts: out.jsonl",
        "metrics: out_metrics.json",
        "logs: .",
        "to read them: gym eval report out.jsonl",
    ]
    assert not any("fail" in line or "again" in line for line in lines)


def test_failures_are_told_by_class_with_the_reason_that_came_most_often(files: RolloutFiles) -> None:
    failures = [
        ("timeout", "took 3 s"),
        *(("http_error", f"agent 'a' answered 500: no room for session {number}") for number in range(3)),
        ("http_error", "agent 'a' answered 400: [no]\nsuch thing"),
    ]
    files.failures.touch()
    counts = CollectionSummary(
        total=9, already_done=2, finished=2, failed=5, run_again=4, lost_sessions=3, duration_s=1
    )
    lines = lines_of(summary_of(files, counts, failures))
    assert "finished 2 of 9 rollouts; an earlier run had finished 2" in lines
    assert "run again 4 3 of them for a lost session" in lines
    at = lines.index("failures most frequent reason")
    assert lines[at + 1 : at + 3] == [
        "http_error 4 agent 'a' answered 500: no room for session 0",
        "timeout 1 took 3 s",
    ]
    assert "failures: out_failures.jsonl" in lines
    assert lines[-1] == f"to make the 5 that failed again: {AGAIN}"


def test_a_run_that_ended_early_shows_what_it_has_and_how_to_go_on(files: RolloutFiles) -> None:
    files.metrics.touch()
    lines = lines_of(summary_of(files, CollectionSummary(total=10, finished=2, duration_s=1.0)), unfinished=True)
    assert "mean reward 0.5 +- 0.5 standard error over tasks" in lines
    assert "not made 8 under way or waiting when the run ended" in lines
    assert not any(line.startswith("metrics:") for line in lines), "they are of an earlier run"
    assert lines[-1] == f"to go on with the 8 that are left: {AGAIN}"


def test_a_narrow_terminal_shows_whole_numbers_or_that_they_are_cut(files: RolloutFiles) -> None:
    stream = io.StringIO()
    summary = summary_of(files, CollectionSummary(total=20_000, finished=12_345, duration_s=1.0))
    profile = dataclasses.replace(profile_rollouts(files.output), rollouts=12_345)
    summary.show(Console(file=stream, width=20, highlight=False), profile, {})
    lines = stream.getvalue().splitlines()
    assert next(line for line in lines if line.startswith("finished")).split()[1] == "12345"
    large = [word for word in " ".join(lines).split() if word.startswith(("12", "20"))]
    assert all(word in ("12345", "20000") or word.endswith("\u2026") for word in large), large


def test_what_is_to_be_typed_can_be_pasted(files: RolloutFiles) -> None:
    renamed = RolloutFiles(files.output.rename(files.output.with_name("it's mine.jsonl")))
    lines = lines_of(summary_of(renamed, CollectionSummary(total=2, finished=2, duration_s=1.0)))
    words = shlex.split(lines[-1].removeprefix("to read them: "))
    assert words == ["gym", "eval", "report", "it's mine.jsonl"]


def test_what_rollouts_were_run_again_for_is_told(files: RolloutFiles) -> None:
    summary = summary_of(files, CollectionSummary(total=2, finished=2, run_again=7, lost_sessions=4, duration_s=1.0))
    for reason in ("broke", "agent 'a' answered 502: port 1", "agent 'a' answered 502: port 2"):
        summary.tally(RolloutRunAgain(0, 0, 1, reason, "http_error"))
    for _ in range(4):
        summary.tally(RolloutRunAgain(0, 0, 1, "lost", "session_lost"))
    told = "run again 7 4 of them for a lost session, others mostly: agent 'a' answered 502: port 1"
    assert told in lines_of(summary)


def test_that_secrets_have_to_be_put_in_is_told(files: RolloutFiles) -> None:
    counts = CollectionSummary(total=3, finished=2, failed=1, duration_s=1.0)
    for again in ("gym eval run policy_api_key=...", "gym eval run 'a={b: ***}'"):
        summary = dataclasses.replace(summary_of(files, counts), call_again=again)
        assert lines_of(summary)[-1] == f"to make the 1 that failed again, with its secrets put in: {again}"


def test_what_servers_say_neither_controls_the_terminal_nor_tells_secrets(files: RolloutFiles) -> None:
    failures = [("odd\x1b[2J", "a\x1b]0;title\x07b\r\nAuthorization: Bearer abcdef123456")]
    lines = lines_of(summary_of(files, CollectionSummary(total=3, finished=2, failed=1, duration_s=1.0), failures))
    [line] = [line for line in lines if line.startswith("odd")]
    assert line.isprintable()
    assert "abcdef123456" not in line


def test_a_rollouts_file_that_can_not_be_read_does_not_hide_the_rest(files: RolloutFiles) -> None:
    files.output.write_text("no JSON\n")
    lines = lines_of(summary_of(files, CollectionSummary(total=10, finished=2, duration_s=1.0)), unfinished=True)
    assert lines[-1] == f"to go on with the 8 that are left: {AGAIN}"


def test_a_program_gets_the_same(files: RolloutFiles) -> None:
    counts = CollectionSummary(total=3, finished=2, failed=1, duration_s=2.0)
    summary = summary_of(files, counts, [("timeout", "took too long")])
    told = json.loads(json.dumps(summary.to_json(profile_rollouts(files.output), {})))
    assert (told["total"], told["finished"], told["failed"], told["lost_sessions"]) == (3, 2, 1, 0)
    assert told["failures"] == {"timeout": {"count": 1, "most_frequent_reason": "took too long"}}
    assert (told["rollouts_per_s"], told["call_again"]) == (1.5, AGAIN)
    assert told["files"] == {"rollouts": str(files.output)}
    assert told["metrics"]["mean_reward"] == 0.5
