"""The environments' own metrics of a rollouts file: each agent sums up its results by its `/aggregate_metrics`.

A result is slimmed before it is sent. It loses `responses_create_params` and all of `response` but its `usage`;
what the verifier found out (reward, extracted answer, scores, ...) stays. An environment's `compute_metrics` that
needs more of a response has to put it into a field of its verify response.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from pydantic import ValidationError

from nemo_gym.config_types import AggregateMetrics
from nemo_gym.errors import ServerNotFoundError
from nemo_gym.global_config import AGENT_REF_KEY_NAME
from nemo_gym.rollouts.io import iter_results
from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status

logger = logging.getLogger(__name__)


async def fetch_agent_metrics(client: ServerClient, output: Path) -> dict[str, AggregateMetrics]:
    """Have every agent of a rollouts file sum up its results.

    Args:
        client: Knows the agents.
        output: The rollouts file.

    Returns:
        The metrics by agent. An agent that can't tell them is left out, with a warning in the log: by then the
        rollouts are made, and no metric is worth losing them.

    Raises:
        DatasetError: The file can't be read.
    """
    by_agent: dict[str, list[dict[str, Any]]] = {}
    for result in iter_results(output):
        reference = result.get(AGENT_REF_KEY_NAME)
        if isinstance(reference, dict) and isinstance(reference.get("name"), str):
            by_agent.setdefault(reference["name"], []).append(slim(result))
    metrics: dict[str, AggregateMetrics] = {}
    for agent, results in by_agent.items():
        try:
            response = await client.post(
                server_name=agent, url_path="/aggregate_metrics", json={"verify_responses": results}
            )
            await raise_for_status(response)
            metrics[agent] = AggregateMetrics.model_validate(await get_response_json(response))
        except (
            aiohttp.ClientError,
            ServerNotFoundError,
            orjson.JSONDecodeError,
            orjson.JSONEncodeError,
            ValidationError,
        ) as error:
            logger.warning("agent %s could not sum up its results: %s", agent, error)
    return metrics


def slim(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the bodies of request and response, but with the response's usage."""
    slimmed = {key: value for key, value in result.items() if key not in ("responses_create_params", "response")}
    response = result.get("response")
    if isinstance(response, dict) and response.get("usage") is not None:
        slimmed["response"] = {"usage": response["usage"]}
    return slimmed
