"""The files that the pages on building environments and agents show are written out and run, as a reader would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> dict[str, str]:
    """Return the titled code blocks of a page by title."""
    return dict(BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))


def write_files(page: str, folder: Path) -> None:
    for title, text in blocks_of(page).items():
        if "/" in title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def gym(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "nemo_gym.cli", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"{' '.join(arguments)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def rewards(folder: Path, *arguments: str) -> list[float]:
    output = folder / "rollouts.jsonl"
    gym(folder, "eval", "run", *arguments, "--output", str(output))
    return [json.loads(line)["reward"] for line in output.read_text(encoding="utf-8").splitlines()]


def test_the_environment_of_the_page_passes_its_tests_and_is_solved(tmp_path: Path) -> None:
    write_files("building-an-environment.md", tmp_path)
    gym(tmp_path, "env", "test", "--resources-server", "basket")
    assert rewards(tmp_path, "--resources-server", "basket") == [1.0, 1.0]


def test_the_metrics_of_the_page_are_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of("building-an-environment.md")
    names: dict[str, object] = {"__name__": "page"}
    exec(blocks["resources_servers/basket/app.py"] + blocks["metrics"], names)
    server = names["MeasuredBasketServer"].model_construct()  # type: ignore[attr-defined]
    metrics = server.compute_metrics([[{"items": ["a"]}, {"items": ["a", "b"]}]])
    assert metrics == {"mean/basket_size": 1.5}
    assert server.get_key_metrics({"mean/reward": 1.0, "other": 2, **metrics}) == {"mean/reward": 1.0, **metrics}


@pytest.mark.parametrize(
    ("agent", "environment", "best"),
    [("insisting_agent", "example_single_tool_call", 1.0), ("one_shot_agent", "reasoning_gym", 1.0)],
)
def test_the_agents_of_the_page_run(tmp_path: Path, agent: str, environment: str, best: float) -> None:
    write_files("building-an-agent.md", tmp_path)
    config = tmp_path / "responses_api_agents" / "one_shot_agent" / "configs" / "one_shot_agent.yaml"
    config.parent.mkdir(parents=True)
    template = tmp_path / "responses_api_agents" / "insisting_agent" / "configs" / "insisting_agent.yaml"
    config.write_text(template.read_text(encoding="utf-8").replace("insisting_agent", "one_shot_agent"))
    rows = DOCS.parent / "resources_servers" / environment / "data" / "example.jsonl"
    found = rewards(tmp_path, "--resources-server", environment, "--agent", agent, "--input", str(rows))
    assert len(found) == len(rows.read_text(encoding="utf-8").splitlines())
    assert max(found) == best
