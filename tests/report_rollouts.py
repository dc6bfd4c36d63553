"""Rollouts files for the tests of reports: the shape a collector writes, with whatever a test wants in them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


def result_of(output: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def rollout(task: int, index: int = 0, reward: Any = 1.0, **changes: Any) -> dict[str, Any]:
    """A line of a rollouts file; `output`, `asked` and `tokens` go where they belong, other changes on top."""
    output = changes.pop("output", [message("assistant", f"answer {index} to task {task}")])
    tokens = changes.pop("tokens", 10 + index)
    return {
        "responses_create_params": {"input": [message("user", changes.pop("asked", f"question {task}"))]},
        "response": {
            "output": output,
            "usage": {"input_tokens": 5, "output_tokens": tokens, "total_tokens": 5 + tokens},
        },
        "reward": reward,
        "id": f"row-{task}",
        "agent_ref": {"type": "responses_api_agents", "name": "agent"},
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_attempt_index": 0,
        "_ng_duration_s": 1.5,
        "_ng_row_digest": f"{task:016x}",
        **changes,
    }


def failure(task: int, index: int = 0, kind: str = "timeout", reason: str = "it took too long") -> dict[str, Any]:
    """A line of a failures file."""
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": index,
        "_ng_failure_class": kind,
        "reason": reason,
        "status": None,
        "attempts": 1,
        "_ng_duration_s": 2.0,
        "line": task + 1,
        "row": {"id": f"row-{task}", "responses_create_params": {"input": f"question {task}"}},
        "reply": None,
    }


def write(path: Path, records: Iterable[Any], failures: Iterable[Any] = ()) -> Path:
    """Write a rollouts file, and the failures file beside it where there are failures."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    lines = [f"{json.dumps(record)}\n" for record in failures]
    if lines:
        path.with_name(f"{path.stem}_failures.jsonl").write_text("".join(lines), encoding="utf-8")
    return path


def many(rollouts: int, per_task: int = 10, words: int = 150, seed: int = 7) -> Iterable[dict[str, Any]]:
    """Rollouts with calls, results and reasoning; every 1,000th has the word `needle` in a tool's result."""
    chance = random.Random(seed)
    vocabulary = ["river", "stone", "lamp", "count", "seven", "open", "the", "a", "of", "value", "then", "because"]
    for number in range(rollouts):
        task, index = divmod(number, per_task)
        text = " ".join(chance.choices(vocabulary, k=words))
        found = "needle" if number % 1_000 == 999 else text[:80]
        output = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            call("look", json.dumps({"at": number}), f"call_{number}"),
            result_of(json.dumps({"found": found}), f"call_{number}"),
            message("assistant", text[::-1]),
        ]
        reward = float(chance.random() < (task % 10) / 10)
        yield rollout(task, index, reward, output=output, tokens=50 + number % 400)
