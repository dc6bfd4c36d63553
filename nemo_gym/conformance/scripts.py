"""A recorded rollout as the requests that it made of the resources server: what a replay sends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym.base_resources_server import is_tool_name
from nemo_gym.global_config import ATTEMPT_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One request of a session.

    Args:
        name: What it is, for people.
        path: The route that it is posted to.
        body: Its JSON body.
    """

    name: str
    path: str
    body: Any


@dataclass(frozen=True, slots=True)
class Script:
    """The requests of one session, in order: seed, the tool calls, verify.

    Args:
        task_index: The row's place in its file, from 0.
        row_id: The row's `id`, where it has one.
        requests: What is sent.
    """

    task_index: int
    row_id: str | None
    requests: tuple[ScriptedRequest, ...]


def script_of(task_index: int, row: Mapping[str, Any], reply: Mapping[str, Any]) -> Script:
    """Return the requests behind a rollout.

    Args:
        task_index: The row's place in its file, from 0.
        row: The dataset row.
        reply: What the agent's `/run` answered; the trajectory is its `response`.
    """
    row = {**row, TASK_INDEX_KEY_NAME: task_index, ROLLOUT_INDEX_KEY_NAME: 0, ATTEMPT_INDEX_KEY_NAME: 0}
    response = reply.get("response") or {}
    calls = [
        ScriptedRequest(f"{name} (tool call {number})", f"/{name}", arguments)
        for number, (name, arguments) in enumerate(_tool_calls(response.get("output") or ()), start=1)
    ]
    seed = ScriptedRequest("seed_session", "/seed_session", row)
    verify = ScriptedRequest("verify", "/verify", {**row, "response": response})
    return Script(task_index, row_id_of(row), (seed, *calls, verify))


def row_id_of(row: Mapping[str, Any]) -> str | None:
    """Return a row's `id` as text, or None where it has none."""
    return None if row.get("id") is None else str(row["id"])


def _tool_calls(output: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and arguments of the calls that an agent can have made; those it answered by itself are left out."""
    answered = {item.get("call_id") for item in output if item.get("type") == "function_call_output"}
    for item in output:
        if item.get("type") != "function_call" or item.get("call_id") not in answered:
            continue
        try:
            arguments = json.loads(item.get("arguments") or "{}")
        except ValueError:
            continue
        name = str(item.get("name"))
        if isinstance(arguments, dict) and is_tool_name(name):
            yield name, arguments
