"""Instructions that say which files to change and how, sentence by sentence, and the calls that carry them out.

Such an instruction ends with a list under the heading "## What to change". Its sentences have a few fixed forms, and
what stands between backticks is taken as it is. The tools are found by the words of their names and by the names of
their arguments.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nemo_gym.tool_names import normalize_tool_name
from responses_api_models.pattern_model.conversation import Call, Tool
from responses_api_models.pattern_model.planning import CannotTellError, Step
from responses_api_models.pattern_model.tools import name_parts, types_of

_HEADING: Final = "## What to change"
_ITEM: Final = re.compile(r"\d+\. (.*)")
_INDENT: Final = "   "
_FENCE: Final = f"{_INDENT}```"

_REPLACE: Final = re.compile(r"In `(?P<path>[^`]+)` replace `(?P<old>[^`]+)` by `(?P<new>[^`]*)`\.")
_CREATE: Final = re.compile(r"Create the file `(?P<path>[^`]+)` with this content:")
_COMMANDS: Final = (
    (re.compile(r"Delete the file `([^`]+)`\."), "rm -- {}"),
    (re.compile(r"Rename the file `([^`]+)` to `([^`]+)`\."), "mv -- {} {}"),
    (re.compile(r"Make the file `([^`]+)` executable\."), "chmod +x -- {}"),
)
_RUN: Final = re.compile(r"Run the command `([^`]+)`\.")

# What a tool for each purpose is called, by any word of its name, and what the tools call the things they take.
_VERBS: Final[Mapping[str, frozenset[str]]] = {
    "replace text": frozenset({"edit", "replace"}),
    "write a file": frozenset({"write", "create", "save"}),
    "run a command": frozenset({"run", "exec", "execute", "bash", "shell"}),
}
_CALLED: Final[Mapping[str, frozenset[str]]] = {
    "path": frozenset({"path", "file", "file_path", "filename", "file_name"}),
    "old": frozenset({"old", "old_text", "old_string", "old_str", "search"}),
    "new": frozenset({"new", "new_text", "new_string", "new_str", "replacement"}),
    "content": frozenset({"content", "contents", "text", "file_text"}),
    "command": frozenset({"command", "cmd"}),
}


def asks_for_edits(instruction: str) -> bool:
    """Whether an instruction has a list of changes."""
    return _HEADING in instruction.split("\n")


def plan_edits(instruction: str, tools: Sequence[Tool]) -> list[Step]:
    """Return the calls that carry out the list of changes in `instruction`, in order.

    Raises:
        CannotTellError: If a part of the list is not understood, or no tool is offered for it.
    """
    lines = instruction.split("\n")
    lines = lines[len(lines) - lines[::-1].index(_HEADING) :]
    steps = [_step(purpose, values, tools) for purpose, values in _changes(iter(lines))]
    if not steps:
        raise CannotTellError(f"there is nothing under '{_HEADING}'")
    return steps


def failure_of(call: Call) -> str | None:
    """Return how a command failed, where the call's result tells so; the tools' own errors are read elsewhere."""
    try:
        result = json.loads(call.result or "")
    except ValueError:
        return None
    if not isinstance(result, dict):
        return None
    told = " ".join(str(result.get("stderr") or result.get("stdout") or "").split())[-500:]
    if result.get("timed_out"):
        return f"{call.name} ran out of time: {told}"
    code = result.get("return_code", 0)
    if code is None:
        return f"{call.name} was ended for exceeding a limit: {told}"
    return None if code == 0 else f"{call.name} ended with {code}: {told}"


def _changes(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what each sentence of the list is for, and the things it names."""
    for line in lines:
        if not line.strip():
            continue
        item = _ITEM.fullmatch(line)
        sentence = item[1] if item else ""
        if match := _REPLACE.fullmatch(sentence):
            yield "replace text", match.groupdict()
        elif match := _CREATE.fullmatch(sentence):
            yield "write a file", {**match.groupdict(), "content": _fenced(lines, sentence)}
        elif (command := _command(sentence)) is not None:
            yield "run a command", {"command": command}
        else:
            raise CannotTellError(f"I don't understand '{line[:200]}'")


def _command(sentence: str) -> str | None:
    if match := _RUN.fullmatch(sentence):
        return match[1]
    for pattern, command in _COMMANDS:
        if match := pattern.fullmatch(sentence):
            return command.format(*map(shlex.quote, match.groups()))
    return None


def _fenced(lines: Iterator[str], sentence: str) -> str:
    """Take a fenced block off `lines` and return its content."""
    content: list[str] = []
    if next(lines, None) == _FENCE:
        for line in lines:
            if line == _FENCE:
                return "".join(f"{kept}\n" for kept in content)
            content.append(line.removeprefix(_INDENT))
    raise CannotTellError(f"I don't see where the content begins and ends after '{sentence[:200]}'")


def _step(purpose: str, values: Mapping[str, str], tools: Sequence[Tool]) -> Step:
    for tool in tools:
        if _VERBS[purpose] & {*name_parts(normalize_tool_name(tool.name))}:
            arguments = _arguments(tool, values)
            if arguments is not None:
                return Step(tool.name, arguments)
    raise CannotTellError(f"none of the tools is there to {purpose} ({', '.join(tool.name for tool in tools)})")


def _arguments(tool: Tool, values: Mapping[str, str]) -> dict[str, Any] | None:
    """Return `values` under the names that the tool gives them; None where it does not take just them."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    arguments: dict[str, Any] = {}
    for thing, value in values.items():
        name = next((name for name in properties if name in _CALLED[thing]), None)
        if name is None:
            return None
        arguments[name] = value
    for name in tool.parameters.get("required") or ():
        if name not in arguments:
            if "null" not in types_of(properties.get(name) or {}):
                return None
            arguments[name] = None
    return arguments
