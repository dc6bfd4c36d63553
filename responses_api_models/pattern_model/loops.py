"""Loops: "hit while your sum is below 17, then stick", where what a tool shows decides about the next call.

Such an instruction has one act that is repeated while, or until, a number compares in a given way, and perhaps one act
afterwards. The number is read from the last tool result: the field whose name has the words that the instruction
has for it. The first call is one that only looks.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from responses_api_models.pattern_model.conversation import Call
from responses_api_models.pattern_model.lexicon import FILLERS, REFUSED
from responses_api_models.pattern_model.planning import CannotTellError, Step
from responses_api_models.pattern_model.reading import stem
from responses_api_models.pattern_model.tools import ToolShape

_Compare: TypeAlias = Callable[[float, float], bool]

_BELOW: Final = "(?:below|under|(?:less|lower|smaller|fewer) than)"
_ABOVE: Final = "(?:above|over|(?:more|higher|greater|larger) than)"
_BEFORE_BOUND: Final[tuple[tuple[str, _Compare], ...]] = (
    (f"not {_ABOVE}|no {_ABOVE}|at most", operator.le),
    (f"not {_BELOW}|no {_BELOW}|at least", operator.ge),
    (_BELOW, operator.lt),
    (_ABOVE, operator.gt),
)
_AFTER_BOUND: Final[tuple[tuple[str, _Compare], ...]] = (
    (" or (?:more|higher|above)", operator.ge),
    (" or (?:less|lower|below)", operator.le),
)
_LOOP: Final = re.compile(
    r"""
    \b (?P<act>[a-z]+) (?:\ again)?
    \  (?: (?P<until>until) | while | (?:for\ )?as\ long\ as | so\ long\ as )
    \  (?P<field>[a-z_ ]+?) \ (?:is|are|stays|stands\ at|shows|reaches)
    (?: \ (?P<how>[a-z ]+?) )? \ (?P<bound>-?\d+(?:\.\d+)?) (?P<ending>\ or\ [a-z]+)?
    (?: [,;.]? \ (?:and\ )? (?:then|otherwise|else|afterwards),? \ (?P<after>[a-z]+) )?
    """,
    re.VERBOSE,
)
_OVER: Final = frozenset({"terminated", "truncated", "done", "finished"})
"""Fields of a result that say, when they are true, that nothing more can be done."""


@dataclass(frozen=True)
class Loop:
    """An instruction of this kind.

    Args:
        look: The call that shows how things stand at first.
        act: The call that is repeated.
        after: The call that ends it, if there is one.
        field: The stems of the words for the number.
        goes_on: Whether to act again, by that number.
    """

    look: Step
    act: Step
    after: Step | None
    field: frozenset[str]
    goes_on: Callable[[float], bool]

    def next(self, calls: Sequence[Call]) -> Step | None:
        """Return the next call after those made, or None when there is none.

        Raises:
            CannotTellError: The calls are not of this loop, or the last result does not show the number.
        """
        if not calls:
            return self.look
        if not all(any(_is_of(call, step) for step in (self.look, self.act, self.after)) for call in calls):
            raise CannotTellError("there are calls that I would not have made")
        shown = dict(_leaves(_parsed(calls[-1].result)))
        if any(path and path[-1] in _OVER and value is True for path, value in shown.items()):
            return None
        if _is_of(calls[-1], self.after):
            return None
        return self.act if self.goes_on(self._number_in(shown)) else self.after

    def _number_in(self, shown: Mapping[tuple[str, ...], Any]) -> float:
        found = [
            float(value)
            for path, value in shown.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and self.field <= _stems_of(path)
        ]
        if len(found) != 1:
            raise CannotTellError(f"the last result shows {len(found)} numbers for '{' '.join(sorted(self.field))}'")
        return found[0]


def read_loop(instruction: str, tools: Sequence[ToolShape]) -> Loop | None:
    """Return the loop that `instruction` asks for, or None where it asks for none.

    Raises:
        CannotTellError: It does, and a part of it is not understood.
    """
    text = " ".join(instruction.lower().split())
    match = _LOOP.search(text)
    act = _act_of(match["act"], tools) if match else None
    if match is None or act is None:
        return None
    after = None
    if match["after"]:
        after = _act_of(match["after"], tools)
        if after is None:
            raise CannotTellError(f"no tool seems to '{match['after']}'")
    _check_rest(text[: match.start()], text[match.end() :], tools)
    looks = [tool for tool in tools if _is_plain(tool) and tool.name not in (act.tool, after.tool if after else "")]
    field = frozenset(map(stem, match["field"].replace("_", " ").split())) - FILLERS
    if len(looks) != 1 or not field:
        raise CannotTellError(f"I don't see what shows '{match['field']}'")
    return Loop(Step(looks[0].name, looks[0].arguments((), ())), act, after, field, _condition(match))


def _condition(match: re.Match[str]) -> Callable[[float], bool]:
    bound, until = float(match["bound"]), match["until"] is not None
    how, ending = match["how"], match["ending"]
    table, words = (_AFTER_BOUND, ending) if ending else (_BEFORE_BOUND, how)
    compare = next((compare for pattern, compare in table if words and re.fullmatch(pattern, words)), None)
    if words is None and until:
        # "until it reaches 16": it may be passed.
        compare = operator.ge
    if compare is None or (how and ending):
        raise CannotTellError(f"I don't see when '{match[0]}' ends")
    known: _Compare = compare
    return lambda number: known(number, bound) is not until


def _is_plain(tool: ToolShape) -> bool:
    return not tool.numbers and not tool.texts


def _act_of(word: str, tools: Sequence[ToolShape]) -> Step | None:
    """Return the call that a word names: a tool without arguments, or one of the texts that a tool takes.

    Raises:
        CannotTellError: It names several.
    """
    found = [
        Step(tool.name, tool.arguments((), ())) for tool in tools if _is_plain(tool) and tool.own_name.lower() == word
    ]
    for tool in tools:
        if len(tool.texts) == 1 and not tool.numbers:
            allowed = tool.texts[0].schema.get("enum") or ()
            found += [Step(tool.name, tool.arguments((), (text,))) for text in allowed if str(text).lower() == word]
    if len(found) > 1:
        raise CannotTellError(f"'{word}' could mean several calls")
    return found[0] if found else None


def _check_rest(before: str, behind: str, tools: Sequence[ToolShape]) -> None:
    """Refuse what else is said where it may ask for something; sentences in front that only talk are fine."""
    if behind.strip(" .!"):
        raise CannotTellError(f"I don't see what to do with '{behind.strip(' .!')}'")
    if before and not re.search(r"[.!?:;] \Z", before):
        raise CannotTellError(f"I don't see what to do with '{before.strip()}'")
    acts = {str(text).lower() for tool in tools for param in tool.texts for text in param.schema.get("enum") or ()}
    acts |= {tool.own_name.lower() for tool in tools}
    for word in re.findall(r"[\w'-]+", before):
        if word in REFUSED or word in acts or word in ("while", "until") or word.isdigit():
            raise CannotTellError(f"it says '{word}'")


def _parsed(result: str | None) -> Any:
    try:
        return json.loads(result or "")
    except ValueError as error:
        raise CannotTellError("the last result is no JSON") from error


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what stands in nested objects, each with the names that lead to it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*path, str(key)))
    else:
        yield path, value


def _stems_of(path: tuple[str, ...]) -> frozenset[str]:
    return frozenset(stem(word) for word in re.findall(r"[a-z]+", " ".join(path).lower()))


def _is_of(call: Call, step: Step | None) -> bool:
    try:
        return step is not None and call.name == step.tool and json.loads(call.arguments or "{}") == step.arguments
    except ValueError:
        return False
