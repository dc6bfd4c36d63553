"""What a collector tells while it works, as typed values: whoever shows progress matches on their types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CollectionStarted:
    """Input and output are read; rollouts begin.

    Args:
        total: Rollouts that the whole collection has.
        already_done: How many of them an earlier run finished.
    """

    total: int
    already_done: int


@dataclass(frozen=True, slots=True)
class RolloutStarted:
    """A rollout's first attempt begins."""

    task_index: int
    rollout_index: int


@dataclass(frozen=True, slots=True)
class RolloutRunAgain:
    """An attempt came to nothing and the rollout begins anew from its seed.

    Args:
        task_index: The row.
        rollout_index: Which of the row's rollouts.
        attempt_index: The attempt that begins, from 1.
        reason: What became of the one before.
        failure_class: The same in one word, as for a failure; `session_lost` where its session is gone.
    """

    task_index: int
    rollout_index: int
    attempt_index: int
    reason: str
    failure_class: str = ""


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout has its result, and the result stands in the output file.

    Args:
        task_index: The row.
        rollout_index: Which of the row's rollouts.
        reward: Its reward.
        duration_s: How long its last attempt took, in seconds.
    """

    task_index: int
    rollout_index: int
    reward: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class RolloutFailed:
    """A rollout has no result, and the reason stands in the failures file.

    Args:
        task_index: The row.
        rollout_index: Which of the row's rollouts.
        failure_class: One word for the kind of failure.
        reason: A sentence for people.
    """

    task_index: int
    rollout_index: int
    failure_class: str
    reason: str


RolloutEvent: TypeAlias = CollectionStarted | RolloutStarted | RolloutRunAgain | RolloutFinished | RolloutFailed
EventHandler: TypeAlias = Callable[[RolloutEvent], None]
