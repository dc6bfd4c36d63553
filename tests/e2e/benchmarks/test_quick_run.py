"""Benchmarks as a user runs them, in their quick form: their structure, their answers, their end; never their speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness.folders import sweep_stale_folders
from tests.support import command_of

ROOT = Path(__file__).parents[3]
NAMES = ("placement", "events", "startup")
LIMIT_S = 240


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """Where the run makes its folder, and what all of its processes are known by."""
    return {**os.environ, "TMPDIR": str(folder)}


def left_by(folder: Path) -> list[psutil.Process]:
    """Return the processes that a run has left."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def folder() -> Any:
    # Short, as the path of a socket has about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as name:
        yield Path(name)


def test_a_quick_run_reports_and_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    as_json, as_markdown = tmp_path / "report.json", tmp_path / "report.md"
    arguments = [*NAMES, "--quick", "--json", str(as_json), "--markdown", str(as_markdown)]
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(as_json.read_text())
    assert [benchmark["name"] for benchmark in report["benchmarks"]] == list(NAMES)
    notices = [notice for benchmark in report["benchmarks"] for notice in benchmark["notices"]]
    assert all("haproxy is not installed" in notice for notice in notices), notices
    placement, events, startup = (benchmark["tables"][0]["samples"] for benchmark in report["benchmarks"])
    assert len(placement) == 6
    assert all(row["right"] == [100.0] for row in placement.values())
    assert all(row["first_ms"][0] > 0 for row in events.values())
    assert {"direct", "hop"} <= events.keys()
    assert all(row["ready_s"][0] > 0 for row in startup.values())
    outcomes = {verdict["target"]: verdict["outcome"] for verdict in report["verdicts"]}
    assert {target for target, outcome in outcomes.items() if outcome != "not measured"} == {4, 5, 8}
    for part in ("### Targets", "### events: Streams", "4. Even placement", "| 1. Framework overhead"):
        assert part in as_markdown.read_text()
    assert "Targets" in done.stdout
    assert list(folder.iterdir()) == []
    assert left_by(folder) == []


def test_ctrl_c_leaves_no_process_and_no_file(folder: Path) -> None:
    with subprocess.Popen(
        command("placement", "--quick"), cwd=ROOT, env=environment(folder), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1" in line:
                break
        give_up = time.monotonic() + LIMIT_S
        # In the middle of a measurement, where there are servers and a load generator.
        while not any("benchmarks.load" in " ".join(command_of(it)) for it in psutil.Process(process.pid).children()):
            assert time.monotonic() < give_up
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(LIMIT_S) == 130, rest
    assert rest.index("stopping") < rest.index("interrupted")
    assert list(folder.iterdir()) == []
    assert left_by(folder) == []


def test_a_killed_run_leaves_no_process_and_its_files_to_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        command("counter", "--quick"), cwd=ROOT, env=environment(folder), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 1" in line:
                break
        programs = " ".join(part for it in left_by(folder) for part in command_of(it))
        assert "bare_counter" in programs
        process.kill()
    give_up = time.monotonic() + LIMIT_S
    while left_by(folder):
        assert time.monotonic() < give_up, left_by(folder)
        time.sleep(0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (left,) = folder.glob("b-*")
    assert sweep_stale_folders() == [left]
    assert not left.exists()


def test_ctrl_c_ends_a_soak_in_order(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.soak", "--sessions", "100000000", "--samples", "1000000"],
        cwd=ROOT,
        env=environment(folder),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "sessions" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(LIMIT_S) == 130, rest
    assert rest.splitlines()[-2:] == ["stopping", "interrupted: nothing is left running"]
    assert left_by(folder) == []
