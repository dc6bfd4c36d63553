"""What a run of a collection has come to so far, counted from its events: for displays, records and the summary.

The event loop tells, any thread may look: what is read is a plain number or copied in one step. Nothing here grows
with the length of the run.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from nemo_gym.rollouts.attempts import SESSION_LOST
from nemo_gym.rollouts.events import (
    CollectionStarted,
    RolloutEvent,
    RolloutFailed,
    RolloutFinished,
    RolloutRunAgain,
    RolloutStarted,
)
from nemo_gym.rollouts.time_left import Durations, seconds_left

REWARD_BOUNDS: Final = tuple(step / 10 for step in range(11))

_SAMPLE_S: Final = 1.0
_SAMPLES: Final = 600
_RECENT_S: Final = 60.0
_ENDED_FOR_A_RATE: Final = 20
_KEPT_REASONS: Final = 50
_REASON_LENGTH: Final = 400
# Ids, ports and counts make each reason a reason of its own.
_VARIABLE: Final = re.compile(r"[0-9a-fA-F]{8,}|\d+")


@dataclass(slots=True)
class FailureKind:
    """Failures of one class, or attempts that came to nothing.

    Args:
        count: How many there are.
        reasons: How often each reason came, numbers in it aside; the first `_KEPT_REASONS` of them.
        examples: The first reason of each, as it was told, shortened.
    """

    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """Count a failure."""
        self.count += 1
        shortened = reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]} ..."
        key = _VARIABLE.sub("#", shortened)
        if key in self.reasons or len(self.reasons) < _KEPT_REASONS:
            self.reasons[key] += 1
            self.examples.setdefault(key, shortened)

    @property
    def most_frequent_reason(self) -> str:
        """The reason that came most often, as it was first told."""
        return self.examples[max(self.reasons, key=self.reasons.__getitem__)]


class RunTally:
    """Counts the events of one run.

    Args:
        clock: Seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = self.already_done = self.finished = self.failed = self.run_again = self.lost_sessions = 0
        self.reward_sum = 0.0
        self.reward_histogram = [0] * (len(REWARD_BOUNDS) + 1)
        self.failures: dict[str, FailureKind] = {}
        self.troubles = FailureKind()
        """What rollouts were run again for, lost sessions aside."""
        self._clock = clock
        self._began = clock()
        self._begun: dict[tuple[int, int], float] = {}
        self._durations = Durations()
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def __call__(self, event: RolloutEvent) -> None:
        """Count an event."""
        match event:
            case RolloutStarted():
                self._begun[event.task_index, event.rollout_index] = self._clock()
            case RolloutFinished():
                self._ended(event.task_index, event.rollout_index)
                self.finished += 1
                self.reward_sum += event.reward
                self.reward_histogram[bisect_right(REWARD_BOUNDS, event.reward)] += 1
            case RolloutFailed():
                self._ended(event.task_index, event.rollout_index)
                self.failed += 1
                self.failures.setdefault(event.failure_class, FailureKind()).add(event.reason)
            case RolloutRunAgain():
                self.run_again += 1
                if event.failure_class == SESSION_LOST:
                    self.lost_sessions += 1
                else:
                    self.troubles.add(event.reason)
            case CollectionStarted():
                self.total, self.already_done = event.total, event.already_done
                self._began = self._clock()

    def _ended(self, task_index: int, rollout_index: int) -> None:
        now = self._clock()
        begun = self._begun.pop((task_index, rollout_index), None)
        if begun is not None:
            self._durations.add(now - begun)
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, self.ended))

    @property
    def ended(self) -> int:
        """Rollouts of this run that have their result or have failed."""
        return self.finished + self.failed

    @property
    def remaining(self) -> int:
        """Rollouts that have neither."""
        return max(0, self.total - self.already_done - self.ended)

    @property
    def running(self) -> int:
        """Rollouts under way."""
        return len(self._begun)

    @property
    def seconds(self) -> float:
        """How long the run has lasted."""
        return self._clock() - self._began

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards so far; None without one."""
        return self.reward_sum / self.finished if self.finished else None

    def oldest_s(self) -> float:
        """Return for how many seconds the rollout that began first, of those under way, has lasted."""
        return max(self._ages(), default=0.0)

    def rate_per_s(self) -> float:
        """Return rollouts that end per second: of the last minute, or longer ago where too few ended in it."""
        now, ended = self._clock(), self.ended
        since, before = self._began, 0
        for at, count in reversed(tuple(self._samples)):
            if now - at >= _RECENT_S and ended - count >= _ENDED_FOR_A_RATE:
                since, before = at, count
                break
        return (ended - before) / (now - since) if now > since else 0.0

    def seconds_left(self) -> float | None:
        """Return how long the run will probably still take; None while too little is known."""
        ages = self._ages()
        return seconds_left(self._durations, ages, max(0, self.remaining - len(ages)))

    def _ages(self) -> list[float]:
        now = self._clock()
        return [max(0.0, now - begun) for begun in list(self._begun.values())]

    def finite_reward_sum(self) -> float:
        """Return the sum of rewards; 0 where no float holds it."""
        return self.reward_sum if math.isfinite(self.reward_sum) else 0.0
