"""`gym env test --num-workers`: right servers pass, and each kind of wrong one is told by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GYM = [sys.executable, "-m", "nemo_gym.cli"]
NAME = "tally"

SERVER = """\
import random

from fastapi import FastAPI, Request
from pydantic import BaseModel

from nemo_gym.base_resources_server import (
    BaseSeedSessionRequest, BaseSeedSessionResponse, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
)
from nemo_gym.server_utils import SESSION_ID_KEY

TALLIES = {{}}


def key_of(request):
    return {key}


class Seed(BaseSeedSessionRequest):
    start: int


class Add(BaseModel):
    count: int


class Verify(BaseVerifyRequest):
    model_config = {{"extra": "allow"}}

    expected: int


class Tally(SimpleResourcesServer):
    {class_body}

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/increment_counter")(self.increment_counter)
        app.post("/get_counter_value")(self.get_counter_value)
        return app

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        TALLIES[key_of(request)] = body.start
        return BaseSeedSessionResponse()

    async def increment_counter(self, request: Request, body: Add) -> dict:
        TALLIES[key_of(request)] = TALLIES.get(key_of(request), 0) + body.count
        return {{"success": True}}

    async def get_counter_value(self, request: Request) -> dict:
        return {{"count": TALLIES.get(key_of(request), 0), "noise": {noise}}}

    async def verify(self, request: Request, body: Verify) -> BaseVerifyResponse:
        right = TALLIES.get(key_of(request), 0) == body.expected
        return BaseVerifyResponse(**{{**dict(body), "reward": {reward}}})


if __name__ == "__main__":
    Tally.run_webserver()
"""
CONFIG = """\
tally:
  resources_servers:
    tally: {entrypoint: app.py}
tally_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: tally}
      model_server: {type: responses_api_models, name: policy_model}
      datasets:
        - {name: example, type: example, jsonl_fpath: resources_servers/tally/data/example.jsonl}
"""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": name, "description": name.replace("_", " "), "parameters": parameters}


TOOLS = [tool("increment_counter", count={"type": "integer", "description": "The amount."}), tool("get_counter_value")]


def row(number: int) -> dict[str, Any]:
    start, added = 10 * number, number + 1
    text = f"Add {added} to the counter, then get the count."
    return {
        "id": f"tally-{number}",
        "responses_create_params": {"input": [{"role": "user", "content": text}], "tools": TOOLS},
        "start": start,
        "expected": start + added,
    }


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def write_server(
    here: Path,
    *,
    key: str = "request.session[SESSION_ID_KEY]",
    class_body: str = "pass",
    noise: str = "0",
    reward: str = "float(right)",
    rows: int = 4,
) -> None:
    folder = here / "resources_servers" / NAME
    (folder / "configs").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "app.py").write_text(SERVER.format(key=key, class_body=class_body, noise=noise, reward=reward))
    (folder / "configs" / f"{NAME}.yaml").write_text(CONFIG)
    lines = [json.dumps(row(number)) for number in range(rows)]
    (folder / "data" / "example.jsonl").write_text("\n".join(lines))


def env_test(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    call = [*GYM, "env", "test", *arguments]
    result = subprocess.run(call, cwd=here, capture_output=True, text=True, timeout=240)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def report_of(here: Path, code: int, name: str = NAME, *arguments: str) -> dict[str, Any]:
    result = env_test(here, "-r", name, "--num-workers", "2", "--json", *arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert report["passed"] == (code == 0)
    return report


def kinds(report: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in report["findings"]}


def test_the_counter_passes_on_four_workers(here: Path) -> None:
    result = env_test(here, "--resources-server", "example_session_state_mgmt", "--num-workers", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == (
        "example_session_state_mgmt answers the same with 4 workers (4 of them were reached) as with one: "
        "50 rows, 50 sessions.\n"
    )


def test_a_server_without_state_passes(here: Path) -> None:
    report = report_of(here, 0, "example_single_tool_call", "--limit", "3")
    assert report["findings"] == []
    assert (report["rows"], report["replayed"], report["workers_reached"]) == (3, 6, 2)


def test_state_in_a_module_global_is_told_as_sessions_that_mix(here: Path) -> None:
    write_server(here, key="'all'")
    report = report_of(here, 1)
    assert kinds(report) == {"sessions_mix"}
    finding = report["findings"][0]
    assert finding["row_id"] == f"tally-{finding['task_index']}"
    assert (finding["request"], finding["path"]) == ("get_counter_value (tool call 2)", "$.count")
    assert finding["expected"] == str(row(finding["task_index"])["expected"])
    assert finding["answered"] != finding["expected"]
    assert "SESSION_ID_KEY" in finding["hint"]


def test_state_per_session_that_is_not_routed_is_told_as_lost(here: Path) -> None:
    write_server(here, class_body="routes_sessions = False", rows=8)
    result = env_test(here, "-r", NAME, "--num-workers", "2")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "State lost\n  row " in result.stdout
    assert "one worker, a session at a time: " in result.stdout
    assert "Leave routes_sessions at True" in result.stdout
    assert "Not deterministic" not in result.stdout


def test_no_routing_is_right_for_a_server_without_state(here: Path) -> None:
    write_server(here, key="'none'", class_body="routes_sessions = False", rows=1)
    app = here / "resources_servers" / NAME / "app.py"
    app.write_text(app.read_text().replace("TALLIES.get(key_of(request), 0)", "7"))
    report = report_of(here, 0)
    assert [(finding["kind"], finding["is_fault"]) for finding in report["findings"]] == [("not_routed", False)]


@pytest.mark.parametrize("noise", ["random.random()", "random.choice([1, 2])"])
def test_noise_beside_the_state_is_told_and_left_out(here: Path, noise: str) -> None:
    write_server(here, noise=noise)
    report = report_of(here, 0)
    assert kinds(report) <= {"not_deterministic"}
    assert all(finding["path"] == "$.noise" for finding in report["findings"])
    assert report["findings"] or "choice" in noise


def test_a_random_reward_is_no_fault_of_workers(here: Path) -> None:
    write_server(here, reward="random.random()")
    report = report_of(here, 1)
    assert kinds(report) == {"not_deterministic"}
    assert {(finding["request"], finding["path"]) for finding in report["findings"]} == {("verify", "$.reward")}


def test_a_server_without_session_cookie_is_told(here: Path) -> None:
    no_sessions = "routes_sessions = False\n\n    def setup_session_middleware(self, app: FastAPI) -> None: pass"
    write_server(here, key="'none'", class_body=no_sessions, rows=1)
    app = here / "resources_servers" / NAME / "app.py"
    app.write_text(app.read_text().replace("TALLIES.get(key_of(request), 0)", "7"))
    assert "no_session" in kinds(report_of(here, 1))


def test_a_row_that_has_no_rollout_is_told(here: Path) -> None:
    write_server(here, rows=2)
    data = here / "resources_servers" / NAME / "data" / "example.jsonl"
    data.write_text(data.read_text().replace('"expected": 12', '"expected": "many"'))
    report = report_of(here, 1)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["row_id"]) == ("not_recorded", "tally-1")
    assert "expected" in finding["answered"]
    assert report["replayed"] == 4
