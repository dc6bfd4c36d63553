"""A report's bytes, from files good and bad: what it takes, what it tells, and what it never does."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.main import run as gym
from nemo_gym.errors import DatasetError, NemoGymError, UsageError
from nemo_gym.reports.report import WrittenReport, default_output, write_report
from tests.report_rollouts import failure, many, message, rollout, write

PART = re.compile(r'<script type="application/x-deflate" id="([\w-]+)">([^<]*)</script>')


def unpack(content: str) -> str:
    return zlib.decompress(base64.b64decode(content)).decode()


def parts_of(page: Path) -> dict[str, str]:
    return {name: unpack(content) for name, content in PART.findall(page.read_text(encoding="utf-8"))}


def facts_of(page: Path) -> dict[str, Any]:
    return json.loads(parts_of(page)["facts"])


def records_of(page: Path) -> list[dict[str, Any]]:
    blocks = [text for name, text in parts_of(page).items() if name.startswith("block-")]
    return [json.loads(line) for block in blocks for line in block.split("\n")]


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of characters of another project's code would be compressed for every page."""
    monkeypatch.setattr("nemo_gym.reports.page.get_plotlyjs", lambda: "globalThis.Plotly = {};")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def made(tmp_path: Path, records: list[Any], failures: list[Any] | None = None) -> tuple[WrittenReport, Path]:
    path = write(tmp_path / "rollouts.jsonl", records, failures or ())
    output = tmp_path / "report.html"
    return write_report([path], output), output


def test_every_rollout_and_failure_is_in_the_page_where_the_index_says(tmp_path: Path) -> None:
    records = list(many(300, words=400))
    report, page = made(tmp_path, records, [failure(30), failure(31, kind="session_lost")])
    assert (report.rollouts, report.failed) == ((300,), (2,))
    run = facts_of(page)["runs"][0]
    parts = parts_of(page)
    for at, (block, place) in enumerate(zip(run["rollouts"]["block"], run["rollouts"]["place"], strict=True)):
        record = json.loads(parts[f"block-{block}"].split("\n")[place])
        task = run["tasks"][run["rollouts"]["task"][at]]["index"]
        assert (record["_ng_task_index"], record["_ng_rollout_index"]) == (task, run["rollouts"]["rollout"][at])
        assert at >= 300 or record == records[at]
    assert max(run["rollouts"]["block"]) > 1
    assert run["failures"] == {"timeout": 1, "session_lost": 1}


def test_a_failed_rollout_is_no_reward_and_one_that_succeeded_later_is_no_failure(tmp_path: Path) -> None:
    report, page = made(tmp_path, [rollout(0), rollout(1, reward=0.0)], [failure(0), failure(2), failure(2)])
    run = facts_of(page)["runs"][0]
    assert report.failed == (1,)
    assert run["intervals"]["reward"]["value"] == 0.5
    assert [(task["index"], task["scored"], task["failed"]) for task in run["tasks"]] == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 0, 1),
    ]


def test_the_same_input_makes_the_same_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", many(50))
    write_report([path, path], tmp_path / "one.html")
    write_report([path, path], tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_no_text_of_a_rollout_stands_in_the_html(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028<!--"
    record = rollout(0, asked=hostile, output=[message("assistant", hostile)], id=hostile)
    record["agent_ref"]["name"] = hostile
    _, page = made(tmp_path, [record], [failure(1, kind=hostile, reason=hostile)])
    text = page.read_text(encoding="utf-8")
    assert "alert(" not in PART.sub("", text)
    assert "onerror" not in PART.sub("", text)
    assert "\u2028" not in text
    assert records_of(page)[0]["id"] == hostile


def test_the_policy_allows_the_two_scripts_of_the_page_and_nothing_else(tmp_path: Path) -> None:
    _, page = made(tmp_path, [rollout(0)])
    text = page.read_text(encoding="utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    (program,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in (program, parts_of(page)["plotly"])
    ]
    assert policy == (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"https?://", PART.sub("", text))


def test_token_ids_large_texts_and_deep_nesting_are_told_and_not_embedded(tmp_path: Path) -> None:
    item = message("assistant", "x" * 300_000) | {"prompt_token_ids": list(range(5_000)), "big": 2**60}
    deep: Any = "bottom"
    for _ in range(120):
        deep = [deep]
    _, page = made(tmp_path, [rollout(0, output=[item], deep=deep, note="\ud800")])
    assert page.stat().st_size < 400_000
    (record,) = records_of(page)
    shown = record["response"]["output"][0]
    assert shown["prompt_token_ids"] == "[5,000 numbers in line 1 of rollouts.jsonl]"
    assert shown["content"][0]["text"].endswith("[... 100,000 more characters in line 1 of rollouts.jsonl]")
    assert shown["big"] == str(2**60)
    assert "nested deeper" in json.dumps(record["deep"])
    assert facts_of(page)["runs"][0]["rollouts"]["characters"] == [300_000]


def test_a_line_cut_off_by_a_kill_is_left_out_and_told(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0), rollout(1)])
    path.write_bytes(path.read_bytes()[:-40])
    report = write_report([path], tmp_path / "report.html")
    assert report.rollouts == (1,)
    assert report.notices == (("rollouts.jsonl: left out what can't be read: line 2 is cut off in mid-write",),)


def test_lines_that_are_no_rollouts_are_left_out_and_told(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0), [1], rollout(1)])
    with path.open("a") as file:
        file.write('not json\n\n{"reward": NaN, "response": {"output": []}}\n')
    report = write_report([path], tmp_path / "report.html")
    assert report.rollouts == (3,)
    (bad, unscored) = report.notices[0]
    assert "line 2 is JSON that is no object, line 4 is invalid JSON" in bad
    assert unscored.startswith("1 of 3 rollouts have no number as their reward")


@pytest.mark.parametrize(
    "records",
    [
        [{"reward": 1}, {"reward": 0.5}],
        [{"response": {"output": []}}],
        [{"response": "text", "reward": None, "_ng_task_index": "one", "responses_create_params": 3}, {"reward": 0}],
        [{"reward": True, "response": {"output": ["text", None, 3, {"type": 5}], "usage": []}, "_ng_task_index": 0}],
        [{"reward": 1e308}, {"reward": -1e308}] + [{"reward": float(at)} for at in range(20)],
        [{"reward": 1, "_ng_task_index": 10**30, "_ng_rollout_index": -4, "id": 10**40}],
    ],
)
def test_rollouts_of_other_tools_are_shown_as_far_as_they_go(tmp_path: Path, records: list[Any]) -> None:
    report, page = made(tmp_path, records)
    assert report.rollouts == (len(records),)
    assert len(records_of(page)) == len(records)


def test_a_report_of_failures_alone_can_be_made(tmp_path: Path) -> None:
    report, page = made(tmp_path, [], [failure(0)])
    assert (report.rollouts, report.failed) == ((0,), (1,))
    assert [figure["id"] for figure in facts_of(page)["figures"]] == ["failures"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "can't read .*rollouts.jsonl: No such file"),
        (b"", "has no rollouts: the file is empty"),
        (b"id,reward\n1,2\n", "line 1: invalid JSON .*expected a rollouts file"),
        (b"\x89PNG\r\n\x1a\n", "line 1: invalid JSON"),
        (b'[{"reward": 1}]\n', "line 1: JSON that is no object"),
        (b'{"name": "package", "version": 1}\n', "no line looks like a rollout"),
        (b"[" * 100_000, "line 1: cut off in mid-write"),
    ],
)
def test_what_is_no_rollouts_file_is_refused_by_name(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=told):
        write_report([path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_nothing_but_an_older_report_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0)], [failure(1)])
    before = path.read_bytes()
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "link.html").symlink_to(path)
    for taken in (path, tmp_path / "rollouts_failures.jsonl", notes, tmp_path / "link.html", tmp_path):
        with pytest.raises(UsageError):
            write_report([path], taken)
    assert (path.read_bytes(), notes.read_text()) == (before, "mine")
    for _ in range(2):
        write_report([path], tmp_path / "report.html")
    assert sorted(file.name for file in tmp_path.iterdir() if not file.is_dir()) == [
        "link.html", "notes.txt", "report.html", "rollouts.jsonl", "rollouts_failures.jsonl",
    ]  # fmt: skip


def test_a_page_that_can_not_be_written_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0)])
    write_report([path], page)
    before = page.read_bytes()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(NemoGymError, match=r"can't write .*report.html: No space left"):
        write_report([path], page)
    assert page.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if "new" in file.name] == []


def test_a_file_whose_name_is_no_text_has_its_report(tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(b"a\xff<b>.jsonl"), [rollout(0)])
    report = write_report([path], default_output([path]))
    assert b"<title>a?&lt;b&gt;.jsonl" in report.path.read_bytes()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", [rollout(0)])
    with pytest.raises(UsageError, match="there is no folder"):
        write_report([path], tmp_path / "nowhere" / "report.html")


def test_the_command_writes_beside_the_rollouts_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a.jsonl", [rollout(task, reward=0.0) for task in range(3)])
    second = write(tmp_path / "b.jsonl", [rollout(task, reward=1.0) for task in range(3)])
    assert gym(["eval", "report", str(first)]) == 0
    assert gym(["eval", "report", str(first), str(second)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"report: {tmp_path / 'a_report.html'}",
        f"report: {tmp_path / 'a_and_b_report.html'}",
    ]
    assert "tasks: 3 better, 0 worse, 0 the same" in told.err
    assert "A: 3 rollouts, 0 failed\nB: 3 rollouts, 0 failed\n" in told.err
    assert default_output([first, second]) == tmp_path / "a_and_b_report.html"
    assert gym(["eval", "report", str(tmp_path / "none.jsonl")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_help_tells_what_holds_unless_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert gym(["eval", "report", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "beside ROLLOUTS, named after it" in told
    assert "the content, where both files tell it" in told


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "nemo_gym.reports.report":
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert gym(["eval", "report", str(write(tmp_path / "a.jsonl", [rollout(0)]))]) == 2
    assert "pip install 'nemo-gym[report]'" in capsys.readouterr().err
