"""Records of running collections: who writes them, who reads them, and what becomes of those that are over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from nemo_gym.errors import Interrupted
from nemo_gym.rollouts.events import CollectionStarted, RolloutFinished, RolloutStarted
from nemo_gym.rollouts.progress_record import KEPT_RUNS, ProgressRecord, RunProgress, read_runs
from nemo_gym.rollouts.recorder import MAX_HISTORY, History, RunRecorder
from nemo_gym.rollouts.tally import RunTally


def runs_folder() -> Path:
    return Path(os.environ["NEMO_GYM_STATE_DIR"]) / "runs"


def recorder_of(tally: RunTally) -> RunRecorder:
    return RunRecorder(tally, agent="agent", output=Path("out.jsonl"), head_url="http://127.0.0.1:1")


def test_a_run_is_seen_while_it_goes_on_and_after() -> None:
    assert read_runs() == []
    record = ProgressRecord()
    record.write(RunProgress(record.run_id, total=10, done=3, running=2))
    record.write(RunProgress(record.run_id, total=10, done=4, running=2))
    [run] = read_runs()
    assert (run.done, run.running, run.finished) == (4, 2, None)
    record.write(RunProgress(record.run_id, total=10, done=10, finished="completed"))
    record.close()
    assert [run.finished for run in read_runs()] == ["completed"]
    assert [path.suffix for path in runs_folder().iterdir()] == [".json"]


def test_a_run_whose_process_was_killed_is_interrupted() -> None:
    program = (
        "import os\n"
        "from nemo_gym.rollouts.progress_record import ProgressRecord, RunProgress\n"
        "record = ProgressRecord()\n"
        "record.write(RunProgress(record.run_id, done=3, running=2))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    [run] = read_runs()
    assert (run.finished, run.done, run.running) == ("interrupted", 3, 0)


def test_only_the_last_runs_are_kept_and_those_that_go_on() -> None:
    going_on = ProgressRecord()
    going_on.write(RunProgress(going_on.run_id))
    for number in range(KEPT_RUNS + 5):
        record = ProgressRecord()
        record.run_id = f"3000-{number:03}"
        record.write(RunProgress(record.run_id, finished="completed"))
        record.close()
    runs = [run.run_id for run in read_runs()]
    assert runs[0] == going_on.run_id
    assert runs[1:] == [f"3000-{number:03}" for number in range(5, KEPT_RUNS + 5)]
    going_on.close()


def test_what_another_version_has_written_is_read_as_far_as_it_goes() -> None:
    record = ProgressRecord()
    record.write(RunProgress(record.run_id))
    (runs_folder() / "0.json").write_text(json.dumps({"run_id": "0", "unknown": 1, "finished": "completed"}))
    (runs_folder() / "1.json").write_text("{")
    (runs_folder() / "2.json").write_text(json.dumps({"pid": 1}))
    (runs_folder() / "3.json").write_text("[]")
    assert [run.run_id for run in read_runs()] == ["0", record.run_id]
    record.close()


def test_trouble_with_the_files_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path / "file"))
    record = ProgressRecord()
    for _ in range(3):
        record.write(RunProgress(record.run_id))
    record.close()
    assert caplog.text.count("the run's progress can't be shown elsewhere") == 1
    assert read_runs() == []


def test_what_is_written_later_is_written_once_the_trouble_is_over(caplog: pytest.LogCaptureFixture) -> None:
    runs_folder().parent.mkdir(parents=True)
    runs_folder().touch()
    record = ProgressRecord()
    record.write(RunProgress(record.run_id))
    assert "can't be shown elsewhere" in caplog.text
    runs_folder().unlink()
    record.write(RunProgress(record.run_id, done=1))
    assert [run.done for run in read_runs()] == [1]
    record.close()


def test_a_record_that_could_not_be_brought_to_its_end_is_not_left_to_mislead() -> None:
    record = ProgressRecord()
    record.write(RunProgress(record.run_id, done=1))
    (runs_folder() / f"{record.run_id}.new").mkdir()
    record.write(RunProgress(record.run_id, done=2, finished="completed"))
    record.close()
    assert read_runs() == [], "it would be of a run that was killed"


@pytest.mark.parametrize(
    ("error", "finished"),
    [
        (None, "completed"),
        (asyncio.CancelledError(), "interrupted"),
        (Interrupted(signal.SIGINT), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (OSError("the disk is full"), "failed"),
    ],
)
def test_a_recorder_tells_how_the_run_ended(error: BaseException | None, finished: str) -> None:
    tally = RunTally()
    tally(CollectionStarted(total=4, already_done=1))
    tally(RolloutStarted(0, 0))
    tally(RolloutStarted(1, 0))
    tally(RolloutFinished(0, 0, 0.5, 1.0))
    recorder = recorder_of(tally)
    recorder.start()
    recorder.finish(error)
    [run] = read_runs()
    assert (run.finished, run.agent, run.output) == (finished, "agent", str(Path("out.jsonl").absolute()))
    assert (run.total, run.already_done, run.done, run.reward_sum, run.running) == (4, 1, 1, 0.5, 0)
    assert [point[1:] for point in run.history][-1] == [1, 0, 0.5]
    assert sum(run.reward_histogram) == 1
    assert len(run.reward_histogram) == len(run.reward_bounds) + 1
    assert run.updated_at >= run.started_at > 0


def test_rewards_beyond_what_a_float_holds_are_no_trouble() -> None:
    tally = RunTally()
    for _ in range(2):
        tally(RolloutFinished(0, 0, 1.7e308, 1.0))
    progress = recorder_of(tally).progress()
    assert RunProgress.from_json(orjson.loads(orjson.dumps(progress))).reward_sum == 0.0


def test_a_clock_that_is_set_does_not_turn_the_history_back(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(RunTally())
    first = recorder.progress()
    monkeypatch.setattr(time, "time", lambda: first.started_at - 3600)
    run = recorder.progress()
    assert run.updated_at >= first.updated_at >= run.started_at
    assert [point[0] for point in run.history] == [first.updated_at, run.updated_at]


def test_the_history_of_a_long_run_stays_short_even_and_up_to_date() -> None:
    history = History()
    for second in range(100_000):
        history.add(float(second), second)
        assert len(history.points()) <= MAX_HISTORY
    points = history.points()
    assert points[0] == [0.0, 0]
    assert points[-1] == [99_999.0, 99_999]
    assert len(points) > MAX_HISTORY / 3
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(points[:-1])]
    assert max(gaps) <= 2 * min(gaps)
