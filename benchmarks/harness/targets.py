"""The targets, and what a run says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.harness.results import Check, Outcome

TARGETS: Final = {
    1: "Framework overhead, one worker",
    2: "A foreign client through the router",
    3: "Our own ServerClient",
    4: "Even placement",
    5: "Streaming",
    6: "A cheaper hop than aiohttp's",
    7: "Rollouts through gym eval run",
    8: "Start-up",
    9: "Tail",
    10: "Figures of the workers",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run says of one target.

    Attributes:
        target: Its number.
        title: What it is about.
        outcome: Missed if one of its checks was; not measured if one of them could not be, and none was missed.
        checks: Its checks; none where no benchmark that ran has any.
    """

    target: int
    title: str
    outcome: Outcome
    checks: tuple[Check, ...]


def verdicts_of(checks: Sequence[Check]) -> list[Verdict]:
    """Return the verdict on every target."""
    verdicts = []
    for target, title in TARGETS.items():
        own = tuple(check for check in checks if check.target == target)
        verdicts.append(Verdict(target, title, _overall([check.outcome for check in own]), own))
    return verdicts


def _overall(outcomes: Sequence[Outcome]) -> Outcome:
    if Outcome.MISSED in outcomes:
        return Outcome.MISSED
    if not outcomes or Outcome.NOT_MEASURED in outcomes:
        return Outcome.NOT_MEASURED
    return Outcome.MET
