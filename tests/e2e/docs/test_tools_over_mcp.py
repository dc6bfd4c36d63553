"""What the page on tools over MCP shows is run as it says, and both agents score the same over either transport."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "tools-over-mcp.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
GYM = [sys.executable, "-m", "nemo_gym.cli"]
COUNTER = "example_session_state_mgmt"
SETTINGS = f"{COUNTER}.resources_servers.{COUNTER}"


def test_a_stock_client_connects_as_the_page_shows(tmp_path: Path) -> None:
    blocks = {title: text for _, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if title}
    shown = 'tools: increment_counter get_counter_value\nresult: {"count":5}\n'
    assert shown in PAGE.read_text(encoding="utf-8")
    for name in ("counter.yaml", "connect.py"):
        (tmp_path / name).write_text(blocks[name], encoding="utf-8")
    command = [*GYM, "env", "start", "--config", "counter.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as servers:
        try:
            assert servers.stdout is not None
            told = ""
            while "Ready" not in told:
                line = servers.stdout.readline()
                assert line, told
                told += line
            (url,) = re.findall(r"counter ready .* at (http://\S+)", told)
            connect = [sys.executable, "connect.py", url]
            result = subprocess.run(connect, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert (result.returncode, result.stdout) == (0, shown), result.stderr
        finally:
            servers.send_signal(signal.SIGINT)


def rollouts(folder: Path, agent: str, workers: int) -> list[dict[str, Any]]:
    """Run the counter's rows with an agent; of each rollout what both transports must agree on."""
    output = folder / f"{agent}-{workers}.jsonl"
    flags = ["--resources-server", COUNTER, "--agent", agent, "--output", str(output)]
    overrides = [f"{SETTINGS}.num_workers={workers}", f"{SETTINGS}.expose_tools_over_mcp=true"]
    command = [*GYM, "eval", "run", *flags, *overrides]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["_ng_task_index"])
    return [
        {
            "reward": line["reward"],
            "final_count": line["final_count"],
            "calls": [
                (item["type"], item.get("name"), item.get("arguments"), item.get("output"))
                for item in line["response"]["output"]
            ],
        }
        for line in lines
    ]


@pytest.mark.parametrize("workers", [1, 4])
def test_a_rollout_is_the_same_over_mcp_and_over_http(tmp_path: Path, workers: int) -> None:
    over_mcp = rollouts(tmp_path, "mcp_agent", workers)
    assert len(over_mcp) == 50
    assert {rollout["reward"] for rollout in over_mcp} == {1.0}
    assert over_mcp == rollouts(tmp_path, "simple_agent", workers)
