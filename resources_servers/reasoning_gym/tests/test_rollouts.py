"""Whole runs of `gym eval run` over every dataset, on several workers: right answers score 1, wrong ones 0."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("reasoning_gym")

FOLDER = Path(__file__).parents[1]
CONFIG = FOLDER / "configs" / "reasoning_gym.yaml"
AGENT = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["reasoning_gym_simple_agent"]["responses_api_agents"]
DATASETS = {
    dataset["name"]: FOLDER / "data" / Path(dataset["jsonl_fpath"]).name
    for dataset in AGENT["simple_agent"]["datasets"]
    if dataset["name"] != "example"
}
ROWS_OF_EACH = 5
SERVER = "reasoning_gym.resources_servers.reasoning_gym"
WORKERS = 4


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def all_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "all.jsonl"
    path.write_text("".join(file.read_text(encoding="utf-8") for file in DATASETS.values()), encoding="utf-8")
    return path


def run(folder: Path, rows: Path, *, wrong: bool) -> list[dict[str, Any]]:
    """Have the oracle answer all rows, through the real agent, and return the results."""
    oracle = {"entrypoint": "app.py", "rows_fpath": str(rows), "wrong": wrong}
    config = folder / "oracle.yaml"
    config.write_text(yaml.safe_dump({"policy_model": {"responses_api_models": {"oracle_model": oracle}}}))
    command = [sys.executable, "-m", "nemo_gym.cli", "eval", "run", "--config", str(CONFIG), "--config", str(config)]
    roots = [str(Path(__file__).parent / "components"), *filter(None, [os.environ.get("NEMO_GYM_EXTRA_ROOTS")])]
    environment = {
        **os.environ,
        "NEMO_GYM_EXTRA_ROOTS": os.pathsep.join(roots),
        "NEMO_GYM_STATE_DIR": str(folder / "state"),
    }
    done = subprocess.run(
        [*command, "--input", str(rows), "--output", "out.jsonl", f"{SERVER}.num_workers={WORKERS}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return rows_of(folder / "out.jsonl")


def test_there_are_rows_of_at_least_five_datasets() -> None:
    assert len(DATASETS) >= 5
    for name, path in DATASETS.items():
        rows = rows_of(path)
        assert [row["dataset"]["name"] for row in rows] == [name] * ROWS_OF_EACH
        assert len({row["entry"]["question"] for row in rows}) == ROWS_OF_EACH


@pytest.mark.parametrize(("wrong", "reward"), [(False, 1.0), (True, 0.0)])
def test_answers_are_scored_through_a_whole_run(tmp_path: Path, all_rows: Path, wrong: bool, reward: float) -> None:
    results = run(tmp_path, all_rows, wrong=wrong)
    scored = Counter((result["dataset"]["name"], result["reward"]) for result in results)
    assert scored == {(name, reward): ROWS_OF_EACH for name in DATASETS}
    assert {result["scoring_error"] for result in results} == {None}
