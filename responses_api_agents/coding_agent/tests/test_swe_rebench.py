"""The agent with a real environment and a real sandbox."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI, Response
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient
from resources_servers.swe_rebench.app import SweRebenchResourcesServer, SweRebenchResourcesServerConfig
from responses_api_agents.coding_agent.tests.stage import Scripted, agent_between, call, outputs, reply
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig

ROWS = PARENT_DIR / "resources_servers" / "swe_rebench" / "data" / "example.jsonl"
(ROW,) = (row for row in map(json.loads, ROWS.read_text("utf-8").splitlines()) if row["repo"] == "example/launch")
CLIENT = ServerClient.from_config(OmegaConf.create({}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def sandboxes_in(folder: Path) -> list[Path]:
    return list((folder / "sandboxes").glob("sb-*"))


@contextmanager
def agent_in_sandboxes(folder: Path, model: FastAPI, **settings: int) -> Iterator[TestClient]:
    config = SweRebenchResourcesServerConfig(
        host="",
        port=0,
        entrypoint="",
        name="environment",
        sandbox_provider={"type": "local", "root_dir": str(folder / "sandboxes")},
        session_end={},
    )
    environment = SweRebenchResourcesServer(config=config, server_client=CLIENT)
    with agent_between(environment.setup_webserver(), model, **settings) as agent:
        yield agent


def test_the_work_done_within_the_budget_is_judged(folder: Path) -> None:
    config = PatternModelConfig(host="", port=0, entrypoint="", name="model")
    model = PatternModel(config=config, server_client=CLIENT).setup_webserver()
    with agent_in_sandboxes(folder, model, max_steps=2) as agent:
        # It takes two changes, and a third step to say so: both are made, and count.
        result = agent.post("/run", json=ROW).json()
        assert sandboxes_in(folder) == []
    assert (result["reward"], result["reason"]) == (1.0, "all 4 tests passed")
    assert result["response"]["incomplete_details"] == {"reason": "max_steps"}
    first, second = map(json.loads, outputs(result["response"]))
    assert first["success"] is True
    assert first["agent_notice"].startswith("1 of your 2 steps left.")
    assert second["return_code"] == 0


def test_a_rollout_that_fails_leaves_no_sandbox(folder: Path) -> None:
    seen: list[int] = []

    def failing() -> Response:
        seen.append(len(sandboxes_in(folder)))
        return Response('{"detail": "the model is down"}', 500)

    model = Scripted({"v1/responses": [reply(call("run_command", command="pwd")), failing]})
    with agent_in_sandboxes(folder, model.app) as agent:
        assert agent.post("/run", json=ROW).status_code == 500
        assert sandboxes_in(folder) == []
    assert seen == [1]
    workdir = json.loads(model.bodies("v1/responses")[1]["input"][-1]["output"])["stdout"].strip()
    assert f"The working directory is {workdir};" in model.bodies("v1/responses")[0]["instructions"]
