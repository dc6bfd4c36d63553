"""Reads rows as the public dataset's exports write them, and builds the example rows' repositories."""

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from resources_servers.swe_rebench import prepare_rows, repositories
from resources_servers.swe_rebench.app import SweRebenchVerifyRequest
from resources_servers.swe_rebench.rows import SweRebenchRow
from resources_servers.swe_rebench.tests.serving import RESPONSE
from resources_servers.swe_rebench.tools import TOOLS

FOLDER = Path(__file__).parents[1]
ROWS = [json.loads(line) for line in (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
PLAIN: dict[str, Any] = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "base_commit": "0123456789abcdef0123456789abcdef01234567",
    "image_name": "registry.example/name:1",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "",
    "problem_statement": "It is broken.",
    "install_config": {"install": "make", "test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "no_use": 1},
    "FAIL_TO_PASS": ["a.py::t"],
    "PASS_TO_PASS": [],
    "created_at": "2024-01-01",
}


def row(**changes: Any) -> SweRebenchRow:
    return SweRebenchRow.model_validate({**PLAIN, **changes})


def test_the_forms_of_the_datasets_exports_mean_the_same() -> None:
    config = {**PLAIN["install_config"], "install": ["make", " "], "test_cmd": ["pytest -rA"]}
    other = row(install_config=json.dumps(config), FAIL_TO_PASS=json.dumps(PLAIN["FAIL_TO_PASS"]), PASS_TO_PASS="[]")
    assert other == row()
    assert (other.install_config.install, other.install_config.test_cmd) == (["make"], ["pytest -rA"])
    assert other.install_config.parser.name == "pytest"
    assert other.repository_name == "name"
    assert row(install_config={"test_cmd": "x", "log_parser": "go", "install": None}).install_config.install == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"base_commit": "main; rm -rf /"}, "base_commit.*hexadecimal name of a commit.*'main; rm -rf /'"),
        ({"FAIL_TO_PASS": "a.py::t"}, "FAIL_TO_PASS.*list of test names or its JSON text, not 'a.py::t'"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS.*names no test"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS.*valid string"),
        ({"install_config": "{"}, "install_config.*object or its JSON text, not '{'"),
        ({"install_config": {"test_cmd": "", "log_parser": "go"}}, "no test command"),
        ({"install_config": {"test_cmd": {"a": 1}, "log_parser": "go"}}, "a shell command or a list of them"),
        ({"install_config": {"test_cmd": "x", "log_parser": "nose"}}, "no log parser 'nose'; there are: cargo"),
        ({"install_config": {"test_cmd": "x"}}, "log_parser.*Field required"),
        ({"image_name": ""}, "image_name.*at least 1 character"),
    ],
)
def test_a_row_that_can_not_be_used_is_refused_with_the_reason(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){problem}"):
        row(**changes)


def test_the_example_rows_are_as_their_script_writes_them() -> None:
    script = importlib.import_module("resources_servers.swe_rebench.create_examples")
    assert script.main(["--check"]) == 0
    assert len({row["instance_id"] for row in ROWS}) == len(ROWS) >= 8
    assert [row["instance_id"] for row in ROWS if not row["golden_patch_resolves"]] == ["example__money-1"]
    for it in ROWS:
        assert SweRebenchRow.model_validate(it).instance_id == it["instance_id"]
        assert it["problem_statement"] in it["responses_create_params"]["input"][0]["content"]


def test_images_are_built_once_with_the_commits_of_the_rows(tmp_path: Path) -> None:
    commits = repositories.build_images(tmp_path)
    assert commits == {row["image_name"]: row["base_commit"] for row in ROWS}
    image = tmp_path / ROWS[0]["image_name"]
    built = image.stat().st_ino
    assert repositories.build_images(tmp_path) == commits
    assert image.stat().st_ino == built
    history = ["git", "log", "--all", "--format=%s"]
    done = subprocess.run(history, cwd=image, check=True, capture_output=True, text=True)
    assert "Fix what was wrong" in done.stdout
    assert repositories.sources_fingerprint() == repositories.sources_fingerprint()


def test_bare_rows_of_the_dataset_get_a_prompt_and_the_tools(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    whole = {**PLAIN, "responses_create_params": {"input": "mine"}}
    source.write_text(f"{json.dumps(PLAIN)}\n\n{json.dumps(whole)}\n", encoding="utf-8")
    assert prepare_rows.main([str(source), str(target)]) == 0
    first, second = map(json.loads, target.read_text(encoding="utf-8").splitlines())
    params = first.pop("responses_create_params")
    assert (first, second) == (PLAIN, whole)
    assert "owner/name" in params["input"][0]["content"]
    assert params["input"][0]["content"].endswith("\n\nIt is broken.")
    request = SweRebenchVerifyRequest.model_validate({**first, "responses_create_params": params, "response": RESPONSE})
    assert request.responses_create_params.model_dump(exclude_unset=True)["tools"] == TOOLS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "in.jsonl, line 1: no JSON"),
        ("[1]", "in.jsonl, line 1: expected an object, not [1]"),
        (json.dumps({**PLAIN, "problem_statement": " "}), "owner__name-1 has no problem_statement"),
        (json.dumps({**PLAIN, "FAIL_TO_PASS": []}), "owner__name-1 can't be judged: FAIL_TO_PASS: "),
        ("{}", "a row without instance_id can't be judged: instance_id: Field required"),
    ],
)
def test_rows_that_can_not_be_prepared_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, problem: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text, encoding="utf-8")
    assert prepare_rows.main([str(source), str(target)]) == 1
    assert problem in caplog.text
    assert not target.exists()
