"""How far a rollout has come: what it has used of its budgets, and whether the model goes round in circles."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from nemo_gym.openai_utils import NeMoGymResponseFunctionToolCall
from responses_api_agents.simple_agent.app import MAX_STEPS_REASON

TOOL_OUTPUT_REASON: Final = "tool_output_budget"

_LONGEST_CIRCLE: Final = 4
_ROUNDS: Final = 3


@dataclass
class Progress:
    """What has been done in one rollout.

    Args:
        max_steps: How many times the model may be asked; None for no limit.
        tool_output_budget: How many characters of tool output it may be given; None for no limit.
    """

    max_steps: int | None
    tool_output_budget: int | None
    steps: int = 0
    output_used: int = 0
    _calls: list[str] = field(default_factory=list)

    def add(self, calls: Sequence[NeMoGymResponseFunctionToolCall], outputs: Sequence[str]) -> None:
        """Count the calls of one step, and what the model is given of their answers."""
        self._calls.extend(map(_signature, calls))
        self.output_used += sum(map(len, outputs))

    def used_up(self) -> str | None:
        """Return the reason for which the rollout has to end now, or None."""
        if self.max_steps is not None and self.steps >= self.max_steps:
            return MAX_STEPS_REASON
        if self.tool_output_budget is not None and self.output_used >= self.tool_output_budget:
            return TOOL_OUTPUT_REASON
        return None

    def notice(self) -> str:
        """Return what the model should be told before its next step; empty where there is nothing to tell."""
        return " ".join(self._notices())

    def _notices(self) -> Iterator[str]:
        circle, rounds = repeated(self._calls)
        if circle == 1:
            yield f"You have made this very call {rounds} times in a row. If it tells you nothing new, try another way."
        elif circle:
            yield f"You have made the same {circle} calls {rounds} times in a row. Try another way."
        if self.max_steps is not None:
            left = self.max_steps - self.steps
            if left <= min(10, max(1, self.max_steps // 5)):
                yield f"{left} of your {self.max_steps} steps left. Finish the work, and end with a message."
        if self.tool_output_budget is not None and self.output_used >= 0.8 * self.tool_output_budget:
            yield (
                f"You have read {self.output_used} of the {self.tool_output_budget} characters of tool output that you "
                "may read. Read parts of files and the ends of logs only, and finish the work."
            )


def repeated(calls: Sequence[str]) -> tuple[int, int]:
    """Return how many calls make up the circle at the end of `calls`, and how often it was gone round.

    (0, 0) where there is none. The shortest circle counts, from three rounds on.
    """
    for circle in range(1, _LONGEST_CIRCLE + 1):
        pairs = zip(reversed(calls), reversed(calls[:-circle]), strict=False)
        rounds = 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // circle
        if rounds >= _ROUNDS:
            return circle, rounds
    return 0, 0


def _signature(call: NeMoGymResponseFunctionToolCall) -> str:
    """Return what is the same for the same call, however its arguments are written."""
    try:
        arguments = json.dumps(json.loads(call.arguments), sort_keys=True)
    except ValueError:
        arguments = call.arguments
    return f"{call.name} {arguments}"
