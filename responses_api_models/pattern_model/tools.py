"""What a tool's name and JSON Schema tell the policy: the sense of its verb, and which arguments it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from nemo_gym.tool_names import normalize_tool_name
from responses_api_models.pattern_model.conversation import Tool
from responses_api_models.pattern_model.lexicon import LOWER, RAISE, READ
from responses_api_models.pattern_model.reading import stem

_NAME_PART: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_SHAPES_KEPT: Final = 256


@dataclass(frozen=True)
class Parameter:
    """One required argument of a tool; `required` is False for one that may be null."""

    name: str
    types: tuple[str, ...]
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class ToolShape:
    """A tool, as the policy reads it.

    Args:
        name: Its name.
        own_name: Its name without that of the MCP server it is served by: `add` of `mcp__calculator__add`.
        verb: The stem of the word in its own name that tells what it does.
        nouns: The stems of the other words in its own name.
        sense: The sense of the verb, where it is known.
        described: The stems of the words in its description and parameter names.
        numbers: The parameters to be filled with numbers.
        texts: The parameters to be filled with texts.
        nulls: The required parameters that may be null, and stay so.
    """

    name: str
    own_name: str
    verb: str
    nouns: frozenset[str]
    sense: Literal["raise", "lower", "read", ""]
    described: frozenset[str]
    numbers: tuple[Parameter, ...]
    texts: tuple[Parameter, ...]
    nulls: tuple[str, ...]

    def arguments(self, numbers: Sequence[int | float], texts: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a call, by position within their kind."""
        filled: dict[str, Any] = {param.name: value for param, value in zip(self.numbers, numbers, strict=True)}
        filled |= {param.name: value for param, value in zip(self.texts, texts, strict=True)}
        return filled | dict.fromkeys(self.nulls)

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what the schema does not allow about `arguments`, or None."""
        for param in (*self.numbers, *self.texts):
            value = arguments[param.name]
            if isinstance(value, float) and "number" not in param.types:
                return f"{self.name} takes whole numbers, not {value}"
            if "enum" in param.schema and value not in param.schema["enum"]:
                return f"{self.name} does not take {value!r}"
            if isinstance(value, int | float) and not _in_range(value, param.schema):
                return f"{value} is out of the range that {self.name} takes"
        return None


@lru_cache(_SHAPES_KEPT)
def shape_of(tool: Tool) -> ToolShape | None:
    """Return the shape of `tool`; None where it needs arguments of a kind that the policy can't fill."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    numbers: list[Parameter] = []
    texts: list[Parameter] = []
    nulls: list[str] = []
    for name in tool.parameters.get("required") or ():
        schema = properties.get(name) or {}
        param = Parameter(name, types_of(schema), schema)
        if "null" in param.types:
            nulls.append(name)
        elif {"integer", "number"} & {*param.types}:
            numbers.append(param)
        elif "string" in param.types:
            texts.append(param)
        else:
            return None
    own_name = normalize_tool_name(tool.name)
    parts = [stem(part) for part in name_parts(own_name)]
    verb = next((part for part in parts if _sense(part)), parts[0] if parts else "")
    described = " ".join([tool.description, *properties]).replace("_", " ").lower()
    return ToolShape(
        name=tool.name,
        own_name=own_name,
        verb=verb,
        nouns=frozenset(parts) - {verb},
        sense=_sense(verb),
        described=frozenset(stem(word) for word in re.findall(r"[^\W\d]+", described)),
        numbers=tuple(numbers),
        texts=tuple(texts),
        nulls=tuple(nulls),
    )


def name_parts(name: str) -> list[str]:
    """Return the words of a name in lower case: `["edit", "file"]` of `edit_file` and `editFile`."""
    return [part.lower() for part in _NAME_PART.findall(name)]


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, also where they stand under `anyOf`."""
    if "anyOf" in schema:
        return tuple(kind for part in schema["anyOf"] for kind in types_of(part))
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _sense(root: str) -> Literal["raise", "lower", "read", ""]:
    if root in RAISE:
        return "raise"
    if root in LOWER:
        return "lower"
    return "read" if root in READ else ""


def _in_range(value: float, schema: Mapping[str, Any]) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and not value <= schema.get("exclusiveMinimum", value - 1)
        and not value >= schema.get("exclusiveMaximum", value + 1)
    )
