"""From clauses to calls: which tool a clause means, and what it fills the tool's arguments with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from responses_api_models.pattern_model.lexicon import (
    BY_ONE,
    FILLERS,
    LIST_WORDS,
    LOWER,
    RAISE,
    READ,
    REFUSED,
    STATES,
    UNSUPPORTED,
    WEAK_LOWER,
    WEAK_RAISE,
)
from responses_api_models.pattern_model.names import name_in
from responses_api_models.pattern_model.reading import Clause, stem
from responses_api_models.pattern_model.tools import ToolShape

_MULTIPLES: Final = {"twice": 2, "thrice": 3}
_CARRIES_ON: Final = FILLERS | WEAK_RAISE | WEAK_LOWER | LIST_WORDS
_ROUNDS: Final = frozenset({"increment", "step", "addition", "jump", "decrement"})


class CannotTellError(Exception):
    """Raised when an instruction asks for something that is not understood; the text says what."""


@dataclass(frozen=True)
class Step:
    """One call to make."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Amounts:
    """The numbers of a clause: amounts, and how many times they are meant."""

    values: list[int | float]
    times: int = 1


class Planner:
    """Takes clauses one by one, and keeps what carries over from one to the next.

    Args:
        tools: The tools that may be called.
    """

    def __init__(self, tools: Sequence[ToolShape]) -> None:
        self._tools = tools
        self._counters = [tool for tool in tools if tool.numbers and not tool.texts]
        self._tellers = [tool for tool in tools if tool.texts]
        self._plain = [tool for tool in tools if not tool.numbers and not tool.texts]
        self._name_stems = frozenset().union(*({tool.verb, *tool.nouns} for tool in tools))
        self._steps: list[Step] = []
        # Where amounts and texts go that stand in a clause without a verb: "add 3, then 4".
        self._counting: tuple[ToolShape, int] | None = None
        self._telling: ToolShape | None = None
        # A clause such as "increment it", which is by one unless an amount follows; and a leading "three times".
        self._by_one: tuple[ToolShape, int] | None = None
        self._times = 1

    def take(self, clause: Clause, *, listed: bool) -> None:
        """Add the steps that `clause` asks for.

        Args:
            clause: The next clause.
            listed: Whether a comma before it separates items of a list.

        Raises:
            CannotTellError: If it is not understood.
        """
        self._refuse(clause)
        state = _is_state(clause)
        counted = not state and self._take_amounts(clause)
        told = self._take_texts(clause, listed=listed)
        read = self._take_plain(clause)
        unused = [token.text for token in clause.tokens if token.kind in ("number", "quote")]
        if unused and not (state or counted or told):
            raise CannotTellError(f"I don't see what to do with '{unused[0]}'")
        if not (counted or told or read) and "again" in clause.words and self._steps:
            self._steps.append(self._steps[-1])

    def finish(self) -> list[Step]:
        """Return the plan.

        Raises:
            CannotTellError: If nothing was asked for, or something was left open.
        """
        self._settle()
        if self._times > 1:
            raise CannotTellError("I don't see what is to be repeated")
        if not self._steps:
            raise CannotTellError(f"none of the tools fits ({', '.join(tool.name for tool in self._tools)})")
        return self._steps

    def _refuse(self, clause: Clause) -> None:
        if clause.connector == "until":
            raise CannotTellError("it says 'until'")
        if clause.words in (["no"], ["no", "wait"], ["wait"]):
            raise CannotTellError("it corrects itself")
        for at, word in enumerate(clause.words):
            if word in REFUSED:
                raise CannotTellError(f"it says '{word}'")
            unknown = stem(word) in UNSUPPORTED or (at == 0 and word == "set")
            if unknown and stem(word) not in self._name_stems:
                raise CannotTellError(f"no tool seems to '{word}'")

    # Amounts

    def _take_amounts(self, clause: Clause) -> bool:
        if not self._counters:
            return False
        amounts = _amounts_in(clause)
        meant = self._counter_meant(clause)
        if meant is not None:
            self._settle()
            self._counting = meant
        if not amounts.values:
            return self._take_without_amount(clause, meant, amounts.times)
        if self._counting is None:
            return False
        self._by_one = None
        tool, sign = self._counting
        if meant is None and clause.stems - _CARRIES_ON - tool.nouns - tool.described:
            raise CannotTellError(f"I don't see whether '{' '.join(token.text for token in clause.tokens)}' carries on")
        size = len(tool.numbers)
        if len(amounts.values) % size:
            raise CannotTellError(f"{tool.name} takes {size} numbers, and I see {len(amounts.values)}")
        times, self._times = amounts.times * self._times, 1
        for start in range(0, len(amounts.values), size):
            values = [sign * value for value in amounts.values[start : start + size]]
            self._add(tool, tool.arguments(values, ()), times)
        return True

    def _take_without_amount(self, clause: Clause, meant: tuple[ToolShape, int] | None, times: int) -> bool:
        if meant is not None and len(meant[0].numbers) == 1 and clause.stems & BY_ONE:
            self._by_one = meant
            self._times *= times
            return True
        if times == 1:
            return False
        if meant is None and clause.mark == "," and self._steps and self._by_one is None:
            self._steps.extend([self._steps[-1]] * (times - 1))
        else:
            self._times *= times
        return True

    def _settle(self) -> None:
        """Make the step that waited for an amount, as none came."""
        if self._by_one is not None:
            (tool, sign), times = self._by_one, self._times
            self._by_one, self._times = None, 1
            self._add(tool, tool.arguments([sign], ()), times)

    def _counter_meant(self, clause: Clause) -> tuple[ToolShape, int] | None:
        """Return the tool that a clause's verb means and the sign of its amounts, or None without a verb."""
        named = self._pick(clause, [tool for tool in self._counters if _named(tool, clause)])
        raises, lowers = _direction(clause)
        if raises and lowers:
            raise CannotTellError("it goes up and down in one breath")
        if named is not None:
            return named, -1 if lowers and named.sense == "raise" else 1
        if not raises and not lowers:
            return None
        same, other = ("raise", "lower") if raises else ("lower", "raise")
        direct = self._pick(clause, [tool for tool in self._counters if tool.sense == same])
        if direct is not None:
            return direct, 1
        opposite = self._pick(clause, [tool for tool in self._counters if tool.sense == other])
        return None if opposite is None else (opposite, -1)

    # Texts

    def _take_texts(self, clause: Clause, *, listed: bool) -> bool:
        named = self._pick(clause, [tool for tool in self._tellers if _named(tool, clause)])
        if named is None:
            named = self._pick(clause, [tool for tool in self._tellers if _described(tool, clause)])
        tool = self._telling = named or self._telling
        if tool is None:
            return False
        texts = [token.text for token in clause.tokens if token.kind == "quote"]
        if not texts:
            known = frozenset({tool.verb}) | tool.nouns | tool.described
            name = name_in(clause, known, alone=named is None and bool(self._steps))
            if name is None:
                return False
            if named is None and clause.mark == "," and not listed and self._qualify(tool, name):
                return True
            texts = [name]
        numbers = _amounts_in(clause).values if tool.numbers else []
        if len(numbers) != len(tool.numbers) or len(texts) % len(tool.texts):
            raise CannotTellError(f"I can't tell what {tool.name} is to be called with")
        for start in range(0, len(texts), len(tool.texts)):
            self._add(tool, tool.arguments(numbers, texts[start : start + len(tool.texts)]), 1)
        return True

    def _qualify(self, tool: ToolShape, name: str) -> bool:
        """Take "France" in "Paris, France" into the call that was about to be made for "Paris"."""
        if not self._steps or self._steps[-1].tool != tool.name or len(tool.texts) != 1:
            return False
        key = tool.texts[0].name
        last = self._steps[-1]
        self._steps[-1] = replace(last, arguments={**last.arguments, key: f"{last.arguments[key]}, {name}"})
        return True

    # Tools without arguments

    def _take_plain(self, clause: Clause) -> bool:
        tool = self._pick(clause, [tool for tool in self._plain if _named(tool, clause)])
        asked = clause.stems & READ or self._is_bare_question(clause)
        if tool is None and asked:
            tool = self._pick(clause, [tool for tool in self._plain if tool.sense == "read"])
        if tool is None:
            return False
        self._settle()
        step = Step(tool.name, tool.arguments((), ()))
        if tool.sense != "read" or not self._steps or self._steps[-1] != step:
            self._steps.append(step)
        return True

    def _is_bare_question(self, clause: Clause) -> bool:
        """Whether the clause is no more than what a tool without arguments reads: "final value?"."""
        others = frozenset().union(*(tool.nouns for tool in (*self._counters, *self._tellers)))
        nouns = frozenset().union(*(tool.nouns for tool in self._plain)) - others
        does_something = any(token.kind != "word" for token in clause.tokens) or any(_direction(clause))
        return not does_something and not _is_state(clause) and bool(clause.stems & nouns)

    def _pick(self, clause: Clause, tools: list[ToolShape]) -> ToolShape | None:
        """Return the one of `tools` that shares most words with the clause, or None if there are none."""
        if len(tools) < 2:
            return tools[0] if tools else None
        scores = [2 * len(clause.stems & tool.nouns) + bool(clause.stems & tool.described) for tool in tools]
        best = [tool for tool, score in zip(tools, scores, strict=True) if score == max(scores)]
        if len(best) > 1:
            raise CannotTellError(f"it could mean {' or '.join(tool.name for tool in best)}")
        return best[0]

    def _add(self, tool: ToolShape, arguments: dict[str, Any], times: int) -> None:
        problem = tool.refusal(arguments)
        if problem is not None:
            raise CannotTellError(problem)
        self._steps.extend([Step(tool.name, arguments)] * times)


def _named(tool: ToolShape, clause: Clause) -> bool:
    """Whether the clause has the tool's name, or the verb in it (other than one as common as "get")."""
    return tool.own_name in clause.words or (tool.sense != "read" and tool.verb in clause.stems)


def _described(tool: ToolShape, clause: Clause) -> bool:
    """Whether the clause speaks of what the tool is about."""
    return bool(clause.stems & (tool.nouns | tool.described) - READ - FILLERS)


def _is_state(clause: Clause) -> bool:
    """Whether the clause says how things are ("the counter starts at 10") and asks for nothing."""
    return bool(clause.stems & STATES) and not clause.stems & (RAISE | LOWER | READ)


def _direction(clause: Clause) -> tuple[bool, bool]:
    """Return whether the clause's verbs go up, and whether they go down."""
    strong = bool(clause.stems & RAISE), bool(clause.stems & LOWER)
    return strong if any(strong) else (bool(clause.stems & WEAK_RAISE), bool(clause.stems & WEAK_LOWER))


def _amounts_in(clause: Clause) -> _Amounts:
    """Return the numbers that a clause asks to use; "from 10" only tells where it starts, "twice" how often."""
    values: list[int | float] = []
    times = 1
    tokens = clause.tokens
    for at, token in enumerate(tokens):
        before = tokens[at - 1].word if at else ""
        after = tokens[at + 1 : at + 3]
        if token.word in _MULTIPLES:
            times *= _MULTIPLES[token.word]
        if token.value is None or before == "from":
            continue
        if before == "to":
            raise CannotTellError(f"it asks for a target, {token.text}, and I only know amounts")
        counts = bool(after) and (
            after[0].word in ("times", "time")
            or (len(after) == 2 and stem(after[0].word) in _ROUNDS and after[1].word == "of")
        )
        if not counts:
            values.append(token.value)
        elif isinstance(token.value, int) and token.value > 0:
            times *= token.value
        else:
            raise CannotTellError(f"I can't do anything '{token.text} {after[0].text}'")
    if len(values) > 1 and "each" in clause.words:
        raise CannotTellError("it says 'each'")
    return _Amounts(values, times)
