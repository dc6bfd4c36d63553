"""Whole rollouts with a model server in its own process, as the framework starts it, before the fake backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.deployment import Deployment
from nemo_gym.global_config import load_global_config
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseFunctionToolCall
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient, close_client, get_response_json, raise_for_status
from tests.fake_backend import FakeBackend, running_fake_backend

COUNTER = PARENT_DIR / "resources_servers" / "example_session_state_mgmt"


def counter_row() -> dict[str, Any]:
    """Return a row of the counter environment that the fake's policy solves: it adds 1 and 2 whatever is asked."""
    with (COUNTER / "data" / "example.jsonl").open(encoding="utf-8") as file:
        row: dict[str, Any] = json.loads(file.readline())
    return row | {"initial_count": 4, "expected_count": 7}


async def run_counter(kind: str, base_url: str, folder: Path) -> dict[str, Any]:
    configs = [
        COUNTER / "configs" / "example_session_state_mgmt.yaml",
        PARENT_DIR / "responses_api_models" / kind / "configs" / f"{kind}.yaml",
    ]
    overrides = [
        f"policy_base_url={base_url}",
        "policy_api_key=sk-secret",
        "policy_model_name=the-model",
        f"policy_model.responses_api_models.{kind}.num_workers=2",
    ]
    config = load_global_config(configs, overrides, working_dir=folder)
    async with Deployment(config):
        client = ServerClient.from_config(config.config_dict)
        try:
            reply = await client.post(
                server_name="example_session_state_mgmt_simple_agent", url_path="/run", json=counter_row()
            )
            await raise_for_status(reply)
            result: dict[str, Any] = await get_response_json(reply)
        finally:
            await close_client()
    return result


@pytest.mark.parametrize("kind", ["openai_model", "vllm_model"])
async def test_a_rollout_reaches_the_backend_and_is_rewarded(kind: str, tmp_path: Path) -> None:
    with running_fake_backend() as fake:
        fake.script("503:0.01", "close")  # Failures that pass are not the rollout's concern.
        result = await run_counter(kind, fake.base_url, tmp_path)
        assert_rollout(result)
        assert_calls(fake)


def assert_rollout(result: dict[str, Any]) -> None:
    response = NeMoGymResponse.model_validate(result["response"])
    assert result["reward"] == 1.0
    assert response.output_text.startswith("The counter says")
    assert [item.name for item in response.output if isinstance(item, NeMoGymResponseFunctionToolCall)] == [
        "increment_counter",
        "increment_counter",
        "get_counter_value",
    ]
    assert response.usage is not None
    assert response.usage.total_tokens == 4 * 15


def assert_calls(fake: FakeBackend) -> None:
    calls = fake.calls()
    assert len(calls) == 4 + 2
    assert all(call["headers"]["Authorization"] == "Bearer sk-secret" for call in calls)
    assert all(call["body"]["model"] == "the-model" for call in calls)
