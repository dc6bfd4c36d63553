"""`gym env test --num-workers`: what a call means, and how an outcome is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_gym.cli.conformance import SHOWN_FINDINGS, plan_check, show_report
from nemo_gym.cli.main import run
from nemo_gym.cli.selection import Components
from nemo_gym.conformance import ConformanceReport, Finding, FindingKind
from nemo_gym.errors import UsageError

COUNTER = "example_session_state_mgmt"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finding(kind: FindingKind = FindingKind.STATE_LOST, row: int = 0, *, is_fault: bool = True) -> Finding:
    return Finding(
        kind, is_fault, "What to do.", row, f"id-{row}", "look (tool call 1)", "$.count", "3", "410 [no] state"
    )


def report(*findings: Finding, workers_reached: int | None = 4, unexamined: int = 0) -> ConformanceReport:
    return ConformanceReport("mine", 4, 5, 8, workers_reached, findings, unexamined, ["/logs/1", "/logs/2"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num-workers", "2"], "goes with one --resources-server"),
        (["-r", COUNTER, "-r", "reasoning_gym", "--num-workers", "2"], "goes with one --resources-server"),
        (["-r", COUNTER, "-a", "one", "-a", "two", "--num-workers", "2"], "at most one agent"),
        (["--all", "--num-workers", "2"], "--all goes without it"),
        (["-r", COUNTER, "--num-workers", "1"], "num-workers"),
        (["-r", COUNTER, "--json"], "go with --num-workers"),
        (["-r", COUNTER, "--num-workers", "2", "--input", "gone.jsonl"], "there is no such file"),
        (["-r", COUNTER + "x", "--num-workers", "2"], f"Did you mean '{COUNTER}'?"),
        (["-r", COUNTER, "-m", "patern_model", "--num-workers", "2"], "Did you mean 'pattern_model'?"),
        (["-r", COUNTER, "--num-workers", "2", "nonsense"], "key.sub=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_exits_with_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in " ".join(captured.err.replace("│", " ").split())
    assert captured.out == ""


def test_rows_that_cannot_be_read_exit_with_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = here / "rows.jsonl"
    for text, problem in (("{}\n[1]\n", "line 2"), ("", "no rows to replay")):
        rows.write_text(text)
        assert run(["env", "test", "-r", COUNTER, "--num-workers", "2", "--input", "rows.jsonl"]) == 2
        assert problem in capsys.readouterr().err


def test_a_call_means_the_server_its_agent_and_its_examples() -> None:
    job = plan_check(Components((COUNTER,)), 4, None, 50)
    assert (job.server, job.agent, job.num_workers, job.limit) == (COUNTER, f"{COUNTER}_simple_agent", 4, 50)
    assert job.input_path.name == "example.jsonl"
    assert job.config.instances["policy_model"].implementation == "pattern_model"


def test_which_agent_must_be_clear(here: Path) -> None:
    (here / "two.yaml").write_text(
        "other:\n  responses_api_agents:\n    simple_agent:\n      entrypoint: app.py\n"
        f"      resources_server: {{type: resources_servers, name: {COUNTER}}}\n"
        "      model_server: {type: responses_api_models, name: policy_model}\n"
    )
    (here / "rows.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="--agent NAME"):
        plan_check(Components((COUNTER,), configs=("two.yaml",)), 2, Path("rows.jsonl"), 50)
    assert plan_check(Components((COUNTER,), "other", configs=("two.yaml",)), 2, None, 50).agent == "other"


def test_a_pass_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(report(), as_json=False)
    assert capsys.readouterr().out == (
        "mine answers the same with 4 workers (4 of them were reached) as with one: 5 rows, 8 sessions.\n"
    )


def test_a_fault_shows_where_what_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(report(finding(), unexamined=2), as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "State lost",
        "  row 0 (id-0), look (tool call 1), $.count",
        "    one worker, a session at a time: 3",
        "    answered: 410 [no] state",
        "  What to do.",
        "",
        "2 more rows differ.",
        "",
        "Logs: /logs/1, /logs/2",
        "mine does not keep its sessions right, or it could not be found out.",
    ]


def test_many_findings_of_a_kind_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = [finding(FindingKind.NOT_DETERMINISTIC, row, is_fault=False) for row in range(SHOWN_FINDINGS + 3)]
    show_report(report(*notes, workers_reached=None), as_json=False)
    out = capsys.readouterr().out
    assert out.count("Not deterministic") == 1
    assert "  ... and 3 rows more\n" in out
    assert "answered once: 3" in out
    assert out.endswith("mine answers the same with 4 workers as with one: 5 rows, 8 sessions.\n")


def test_a_program_gets_everything(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(report(finding()), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["workers_reached"], shown["server"]) == (False, 4, "mine")
    assert shown["findings"][0]["kind"] == "state_lost"
    assert shown["findings"][0]["answered"] == "410 [no] state"
