"""Replies taken apart into their values, and how those of several replays compare.

What differs between two replays on one worker, a session at a time, says nothing about workers: a new id, a time, a
random number. Such values are left out of every comparison, and told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson

Path: TypeAlias = tuple[str | int, ...]

STATUS: Final[Path] = ("status",)
BODY: Final[Path] = ("$",)
REWARD: Final[Path] = ("$", "reward")

_ABSENT: Final = "nothing"
_SHOWN_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request.

    Args:
        status: The HTTP status; 0 when there was no reply.
        text: The body, or why there was no reply.
        cookies: What the reply set, by name.
        session_lost: Whether it is the framework's own 410.
    """

    status: int
    text: str
    cookies: Mapping[str, str] = field(default_factory=dict)
    session_lost: bool = False

    def values(self) -> dict[Path, str]:
        """Return the status and every value of the body as JSON text, by their places."""
        try:
            body = orjson.loads(self.text)
        except orjson.JSONDecodeError:
            body = self.text
        return {STATUS: str(self.status), **dict(_leaves(body, BODY))}

    def __str__(self) -> str:
        return shortened(f"{self.status} {self.text}" if self.status else self.text)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(value, list) and value:
        for position, child in enumerate(value):
            yield from _leaves(child, (*path, position))
    else:
        yield path, json.dumps(value, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a replay's replies are not those of one worker.

    Args:
        position: Which request.
        path: Where in its reply.
        expected: What one worker always answers there.
        reply: The reply that differs.
        answered: What it has there.
    """

    position: int
    path: Path
    expected: str
    reply: Reply
    answered: str


class Expectation:
    """What one worker answers to a script, learned from replays of one session at a time.

    Args:
        length: How many requests the script has.
    """

    def __init__(self, length: int) -> None:
        self._seen: list[dict[Path, set[str]]] = [{} for _ in range(length)]
        self._replies: list[Reply] = []

    def learn(self, replies: Sequence[Reply]) -> None:
        """Take in the replies of one replay."""
        for seen, reply in zip(self._seen, replies, strict=True):
            values = reply.values()
            for path in {**seen, **values}:
                before = {_ABSENT} if self._replies else set()
                seen.setdefault(path, before).add(values.get(path, _ABSENT))
        self._replies = list(replies)

    @property
    def replies(self) -> Sequence[Reply]:
        """The replies of the last replay."""
        return self._replies

    def unstable(self) -> list[tuple[int, Path, list[str]]]:
        """Return each place that has had several values: the request, the path and the values."""
        return [
            (position, path, sorted(values))
            for position, seen in enumerate(self._seen)
            for path, values in seen.items()
            if len(values) > 1
        ]

    def difference(self, replies: Sequence[Reply]) -> Difference | None:
        """Return the first place where a replay answers what one worker never does, or None."""
        for position, (seen, reply) in enumerate(zip(self._seen, replies, strict=True)):
            varying = {path[:-1] for path, values in seen.items() if len(values) > 1 and _ABSENT in values}
            found = reply.values()
            for path in {**found, **seen}:
                expected, answered = seen.get(path, {_ABSENT}), found.get(path, _ABSENT)
                if answered in expected or len(expected) > 1:
                    continue
                # A list or mapping that varies has no fixed places within.
                if _ABSENT in (answered, *expected) and any(path[:end] in varying for end in range(1, len(path))):
                    continue
                return Difference(position, path, self._shown(position, path), reply, _show(reply, path, answered))
        return None

    def _shown(self, position: int, path: Path) -> str:
        (value,) = self._seen[position].get(path, {_ABSENT})
        return _show(self._replies[position], path, value)


def _show(reply: Reply, path: Path, value: str) -> str:
    """Return a value for people; where the status differs, the whole reply tells more."""
    return str(reply) if path == STATUS else shortened(value)


def shortened(text: str) -> str:
    """Return a text without what would make it too long for a report."""
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}... ({len(text)} characters)"


def path_text(path: Path) -> str:
    """Return a place in a reply in the manner of JSONPath; "" for the status."""
    if path == STATUS:
        return ""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
