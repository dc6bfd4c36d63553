"""What a report keeps of one rollout: numbers for figures, a line for lists, and a record small enough to embed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from nemo_gym.reward_profile import turns_and_calls
from nemo_gym.rollouts.io import DURATION_KEY
from nemo_gym.wire.items import TOKEN_METADATA_FIELDS

SECONDS_KEY: Final = "_ng_rollout_seconds"
"""In a result: how long the rollout's parts took, as far as its agent tells."""

PARTS: Final = ("seed", "model", "tools", "verify")

MAX_TEXT: Final = 200_000
MAX_IMAGE: Final = 2_000_000
_MAX_DEPTH: Final = 60
_MAX_NUMBERS: Final = 64
_PREVIEW: Final = 120
LARGEST_EXACT: Final = 2**53 - 1
"""The largest whole number that a browser keeps as it is."""

_LARGEST: Final = 1e100
_LABEL_KEYS: Final = ("id", "task_id", "instance_id")


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers of one rollout; NaN where it does not tell.

    Args:
        reward: Its reward, where that is a number of a size that occurs.
        input_tokens: Of all its turns, as `response.usage` tells.
        output_tokens: As above.
        total_tokens: As above.
        characters: Characters the model wrote: messages, reasoning, arguments of calls.
        turns: Times the model was asked.
        tool_calls: Calls it made.
        seconds: How long its last attempt took.
        parts: Seconds by part (`PARTS`); empty where they are not told.
        task_text: What was asked, on one line.
        label: The row's own name, where it has one.
        answer: What the model said last, on one line.
    """

    reward: float = math.nan
    input_tokens: float = math.nan
    output_tokens: float = math.nan
    total_tokens: float = math.nan
    characters: float = math.nan
    turns: float = math.nan
    tool_calls: float = math.nan
    seconds: float = math.nan
    parts: dict[str, float] = field(default_factory=dict)
    task_text: str = ""
    label: str = ""
    answer: str = ""


def result_facts(result: dict[str, Any]) -> Facts:
    """Return the facts of a line of a rollouts file."""
    response = _dict(result.get("response"))
    usage = _dict(response.get("usage"))
    output = response.get("output")
    items = output if isinstance(output, list) else []
    turns, calls = turns_and_calls(output)
    told = _dict(result.get(SECONDS_KEY))
    parts = {part: number(told.get(part)) for part in PARTS}
    seconds = number(result.get(DURATION_KEY))
    return Facts(
        reward=number(result.get("reward")),
        input_tokens=number(usage.get("input_tokens")),
        output_tokens=number(usage.get("output_tokens")),
        total_tokens=number(usage.get("total_tokens")),
        characters=sum(map(len, written(items))) if isinstance(output, list) else math.nan,
        turns=turns,
        tool_calls=calls,
        seconds=number(told.get("total")) if math.isnan(seconds) else seconds,
        parts={part: value for part, value in parts.items() if not math.isnan(value)},
        task_text=_one_line(_asked(_dict(result.get("responses_create_params")))),
        label=_label(result),
        answer=_one_line(_answer(items)),
    )


def failure_facts(failure: dict[str, Any]) -> Facts:
    """Return the facts of a line of a failures file."""
    row = _dict(failure.get("row"))
    return Facts(
        seconds=number(failure.get(DURATION_KEY)),
        task_text=_one_line(_asked(_dict(row.get("responses_create_params")))),
        label=_label(row),
        answer=_one_line(str(failure.get("reason") or "")),
    )


def number(value: Any) -> float:
    """Return a number as a float, and NaN for anything else, also for one so large that sums of it overflow."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    return math.nan


def written(items: Iterable[Any]) -> Iterator[str]:
    """Yield the texts in output items that the model wrote."""
    for item in items:
        if not isinstance(item, dict):
            continue
        kind = str(item.get("type", "message"))
        if kind == "message" and item.get("role", "assistant") == "assistant":
            yield from texts_of(item.get("content"))
        elif kind == "reasoning":
            yield from texts_of(item.get("summary"))
            yield from texts_of(item.get("content"))
        elif kind.endswith("_call"):
            yield from (item[key] for key in ("arguments", "input", "code") if isinstance(item.get(key), str))


def texts_of(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content: a string, or parts."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            yield from (part[key] for key in ("text", "refusal") if isinstance(part.get(key), str))


def slimmed(value: Any, where: str, *, key: str = "", depth: int = 0) -> Any:
    """Return a copy of a JSON value that is fit for a page: what is too much for people is told instead of shown.

    Args:
        value: The value.
        where: Where the whole of it can be read, for the notes that stand in for what is left out.
        key: The key under which it stands.
        depth: How deep it stands.
    """
    if isinstance(value, str):
        limit = MAX_IMAGE if value.startswith("data:image/") else MAX_TEXT
        if len(value) <= limit:
            return value
        return f"{value[:MAX_TEXT]}\n[... {len(value) - MAX_TEXT:,} more characters in {where}]"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_EXACT:
        return str(value)  # browsers would round it
    if not isinstance(value, dict | list):
        return value
    if depth >= _MAX_DEPTH:
        return f"[nested deeper than a report shows, see {where}]"
    if isinstance(value, dict):
        return {name: slimmed(part, where, key=name, depth=depth + 1) for name, part in value.items()}
    is_tokens = key in TOKEN_METADATA_FIELDS or key == "logprobs"
    if len(value) > _MAX_NUMBERS and (is_tokens or all(isinstance(part, int | float) for part in value)):
        return f"[{len(value):,} {'entries' if key == 'logprobs' else 'numbers'} in {where}]"
    return [slimmed(part, where, depth=depth + 1) for part in value]


def _asked(params: dict[str, Any]) -> str:
    """Return the last thing a user said in a request."""
    asked = params.get("input")
    if isinstance(asked, str):
        return asked
    for item in reversed(asked if isinstance(asked, list) else []):
        if isinstance(item, dict) and item.get("role") == "user":
            return " ".join(texts_of(item.get("content")))
    return ""


def _answer(items: list[Any]) -> str:
    for item in reversed(items):
        if isinstance(item, dict) and item.get("type", "message") == "message":
            return " ".join(texts_of(item.get("content")))
    return ""


def _label(row: dict[str, Any]) -> str:
    for key in _LABEL_KEYS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)[:_PREVIEW]
    return ""


def _one_line(text: str) -> str:
    shown = " ".join(text[: 8 * _PREVIEW].split())
    return shown if len(shown) <= _PREVIEW else shown[: _PREVIEW - 1] + "…"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
