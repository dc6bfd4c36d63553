"""What the benchmarks' command refuses before it runs anything, what it writes, and what it removes."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli, soak
from benchmarks.harness.folders import locked_folder, sweep_stale_folders
from benchmarks.harness.results import SuiteResult
from benchmarks.harness.run import machine


def refusal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "x"], "argument --rounds: expected a whole number of at least 1, got 'x'"),
        (["--rounds", "0"], "expected a whole number of at least 1, got '0'"),
        (["nonsense"], "there is no benchmark 'nonsense'; there are all, counter"),
        (["soak", "counter"], "soak runs alone"),
        (["soak", "--quick"], "soak has no --rounds, --quick or --markdown"),
        (["soak", "--rounds", "2"], "soak has no --rounds"),
        (["--json", "no-such.report", "--markdown", "./no-such.report"], "--json and --markdown name the same file"),
    ],
)
def test_what_cant_be_done_is_told_before_anything_is_run(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_report_that_cant_be_written_is_told_before_anything_is_run_and_nothing_is_overwritten(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in [(tmp_path / "none" / "report", "No such file"), (tmp_path, "Is a directory")]:
        assert f"can't write '{path}': {reason}" in refusal(["counter", option, str(path)], monkeypatch, capsys)
    kept = tmp_path / "kept"
    kept.write_text("of an earlier run")
    refusal(["nonsense", option, str(kept)], monkeypatch, capsys)
    refusal(["nonsense", option, str(tmp_path / "new")], monkeypatch, capsys)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "of an earlier run")]


def test_a_report_that_cant_be_written_in_the_end_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_json, as_markdown = tmp_path / "report.json", tmp_path / "report.md"

    async def run_suite(*_: Any, **__: Any) -> SuiteResult:
        as_json.mkdir()
        return SuiteResult("then", machine(), {})

    monkeypatch.setattr(cli, "run_suite", run_suite)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--json", str(as_json), "--markdown", str(as_markdown)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "Is a directory" in capsys.readouterr().err
    assert "then" in as_markdown.read_text()


def test_an_error_within_a_run_is_not_taken_for_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_suite(*_: Any, **__: Any) -> SuiteResult:
        raise KeyError("something else")

    monkeypatch.setattr(cli, "run_suite", run_suite)
    monkeypatch.setattr("sys.argv", ["benchmarks", "counter"])
    with pytest.raises(KeyError, match="something else"):
        cli.main()


def test_soak_by_name_gets_the_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def main(arguments: list[str]) -> None:
        given.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(soak, "main", main)
    for options in ([], ["--json", str(tmp_path / "soak.json")]):
        monkeypatch.setattr("sys.argv", ["benchmarks", "soak", *options])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
    assert given == [[], ["--json", str(tmp_path / "soak.json")]]


def test_folders_of_killed_runs_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("b-killed", "b-of another program", "c-killed"):
        (tmp_path / name / "sockets").mkdir(parents=True)
    for name in ("b-killed", "c-killed"):
        (tmp_path / name / "benchmark").touch()
    (tmp_path / "b-link").symlink_to(tmp_path / "c-killed")
    with locked_folder() as one, locked_folder() as other:
        left = {one.name, other.name, "b-of another program", "c-killed", "b-link"}
        assert {path.name for path in tmp_path.iterdir()} == left
        assert sweep_stale_folders() == []
        with (one / "benchmark").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert {path.name for path in tmp_path.iterdir()} == left - {one.name, other.name}
