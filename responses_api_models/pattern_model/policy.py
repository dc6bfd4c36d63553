"""The policy: which calls an instruction asks for, and what to say next.

A pure function of the conversation. The instruction is read clause by clause; each clause is matched with the
offered tools by the words of their names and by the sense of verbs (to raise, to lower, to read). The plan is made
anew at every turn, and the calls already made tell how far it has come. What can't be understood is refused, as a
whole and in words: a wrong call would be worse than none. Lists of changes to files are read by `editing`, and what
is to be done while something holds by `loops`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from responses_api_models.pattern_model.arithmetic import solve_sum
from responses_api_models.pattern_model.conversation import Conversation, Tool
from responses_api_models.pattern_model.editing import asks_for_edits, failure_of, plan_edits
from responses_api_models.pattern_model.loops import Loop, read_loop
from responses_api_models.pattern_model.planning import CannotTellError, Planner, Step
from responses_api_models.pattern_model.reading import Clause, clauses, tokenize
from responses_api_models.pattern_model.tools import ToolShape, shape_of

_INSTRUCTIONS_KEPT: Final = 1024


@dataclass(frozen=True)
class Decision:
    """What the model answers: calls, or else a text."""

    steps: list[Step] = field(default_factory=list)
    text: str = ""


def decide(conversation: Conversation) -> Decision:
    """Return the next turn of `conversation`."""
    failed = next((call for call in conversation.calls if call.error), None)
    if failed is not None:
        return Decision(text=f"I stopped: {failed.name} answered with an error: {failed.error}")
    edits = asks_for_edits(conversation.instruction)
    try:
        if not conversation.tools:
            return Decision(text=_without_tools(conversation))
        if edits:
            plan: Sequence[Step] = plan_edits(conversation.instruction, conversation.tools)
        else:
            asked = _asked_for(conversation.instruction, tuple(conversation.tools))
            if isinstance(asked, Loop):
                step = asked.next(conversation.calls)
                return Decision(steps=[step]) if step else Decision(text=_report(conversation))
            plan = asked
    except CannotTellError as reason:
        return Decision(text=f"I can't work out what to do: {reason}.")
    done = [call.name for call in conversation.calls]
    if done != [step.tool for step in plan[: len(done)]]:
        return Decision(text="I can't work out how to go on from calls that I would not have made.")
    upcoming = plan[len(done) :]
    if edits:
        return _next_edit(conversation, upcoming)
    if not upcoming:
        return Decision(text=_report(conversation))
    batch = 1
    while conversation.parallel and batch < len(upcoming) and upcoming[batch].tool == upcoming[0].tool:
        batch += 1
    return Decision(steps=[*upcoming[:batch]])


def _next_edit(conversation: Conversation, upcoming: Sequence[Step]) -> Decision:
    """Return the next change, as each may build on the one before, or the end."""
    failure = next((told for call in conversation.calls if (told := failure_of(call))), None)
    if failure is not None:
        return Decision(text=f"I stopped: {failure}")
    if upcoming:
        return Decision(steps=[upcoming[0]])
    return Decision(text=f"Done. Changes made: {len(conversation.calls)}.")


@lru_cache(_INSTRUCTIONS_KEPT)
def _asked_for(instruction: str, tools: tuple[Tool, ...]) -> Loop | tuple[Step, ...]:
    """Return what `instruction` asks for; every turn of a conversation asks for it again.

    Raises:
        CannotTellError: As `make_plan` and `read_loop`.
    """
    return read_loop(instruction, _shapes(tools)) or tuple(make_plan(instruction, tools))


def make_plan(instruction: str, tools: Sequence[Tool]) -> list[Step]:
    """Return the calls that `instruction` asks for, in order.

    Raises:
        CannotTellError: If it, or a part of it, is not understood.
    """
    planner = Planner(_shapes(tools))
    found = clauses(tokenize(instruction))
    for at, clause in enumerate(found):
        planner.take(clause, listed=_is_listed(found, at))
    return planner.finish()


def _shapes(tools: Sequence[Tool]) -> list[ToolShape]:
    return [shape for shape in map(shape_of, tools) if shape is not None]


def _is_listed(found: Sequence[Clause], at: int) -> bool:
    """Whether a comma before the clause separates items of a list, which ends in "and": "Paris, Rome and Oslo"."""
    for clause in found[at:]:
        if clause is not found[at] and clause.mark not in ("", ","):
            return False
        if clause.connector == "and":
            return True
    return False


def _without_tools(conversation: Conversation) -> str:
    if conversation.calls:
        return _report(conversation)
    result = solve_sum(conversation.instruction)
    if result is None:
        raise CannotTellError("no tool is offered, and all I do without one is sums written out in digits")
    return f"<answer>{result}</answer>" if "<answer>" in conversation.text else str(result)


def _report(conversation: Conversation) -> str:
    """Say what each tool answered, the last time it was called with these arguments."""
    last: dict[tuple[str, str], str] = {(call.name, call.arguments): call.result or "" for call in conversation.calls}
    told: dict[str, Any] = {}
    for (name, _), result in last.items():
        told.setdefault(name, []).append(_readable(result))
    parts = [f"{name} answered {'; '.join(dict.fromkeys(answers))}." for name, answers in told.items()]
    return " ".join(["Done.", *parts])


def _readable(result: str) -> str:
    try:
        parsed = json.loads(result)
    except ValueError:
        return result.strip().rstrip(".")
    if isinstance(parsed, dict) and parsed:
        return ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in parsed.items())
    return json.dumps(parsed, ensure_ascii=False)
