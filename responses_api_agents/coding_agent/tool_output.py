"""What the model reads of a tool's answer: shortened in its middle where it is long, with what the agent has to say.

Most answers are JSON objects, and stay such: long texts in them are shortened one by one, and a notice is one more
field. Lengths are in characters.
"""

import json
from typing import Any, Final

NOTICE_KEY: Final = "agent_notice"

_SHORTEST: Final = 20


def shorten(output: str, limit: int) -> str:
    """Return `output`, of which the beginning and the end are kept where it is longer than `limit`.

    Args:
        output: A tool's answer.
        limit: How long it may be; the mark for what is left out comes on top.
    """
    if len(output) <= limit:
        return output
    parsed = _object(output)
    length = limit
    while parsed is not None and length >= _SHORTEST:
        shorter = _json(_with_short_texts(parsed, length))
        if len(shorter) <= limit:
            return shorter
        length = length * 3 // 4
    return _shorten_text(output, limit)


def with_notice(output: str, notice: str) -> str:
    """Return `output` with a notice of the agent."""
    parsed = _object(output)
    if parsed is None:
        return f"{output}\n\n[{NOTICE_KEY}: {notice}]"
    return _json({**parsed, NOTICE_KEY: notice})


def _with_short_texts(value: Any, length: int) -> Any:
    if isinstance(value, str):
        return _shorten_text(value, length)
    if isinstance(value, dict):
        return {key: _with_short_texts(inner, length) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_short_texts(inner, length) for inner in value]
    return value


def _shorten_text(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    begin, end = length - length // 2, length // 2
    return f"{text[:begin]}\n[... {len(text) - length} characters left out ...]\n{text[len(text) - end :]}"


def _object(text: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
