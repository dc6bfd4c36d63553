"""How long a run will still take, from how long its rollouts have taken and how long others have been under way.

Remaining rollouts over the rate would be wrong twice: early, when only the quick ones have ended, and at the end,
when nothing is left to begin and the slowest decide. So the chance that a rollout lasts longer than t is estimated from
both, those that ended and those that have lasted so long already (the life table of actuaries, which is the estimator
of Kaplan and Meier 1958, doi:10.1080/01621459.1958.10501452, on intervals). The time left is then what it takes
to begin the rollouts that wait, as places become free, and until the last of those under way has probably ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

_SHORTEST_S: Final = 1e-3
_GROWTH: Final = 1.15
_BUCKETS: Final = 160  # up to 50 days
_BOUNDS: Final = tuple(_SHORTEST_S * _GROWTH**power for power in range(_BUCKETS))
_LOG_GROWTH: Final = math.log(_GROWTH)
_LOG_SHORTEST: Final = math.log(_SHORTEST_S)
_REMEMBERED: Final = 4_000
_LATELY: Final = 5  # buckets: the time from half of the longest on
_ENOUGH: Final = 5
_PROBABLY: Final = math.log(2)
"""With so many expected still under way, all have ended with a probability of a half (a Poisson number of them)."""


class Durations:
    """How long rollouts have taken, as counts on logarithmic bounds; what is long past weighs less."""

    def __init__(self) -> None:
        self.counts = [0.0] * _BUCKETS
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a rollout that has ended."""
        self.counts[bucket_of(seconds)] += 1
        self.total += 1
        if self.total >= _REMEMBERED:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration: the last bound that it does not exceed ends it."""
    if seconds <= _SHORTEST_S:
        return 0
    return min(_BUCKETS - 1, math.ceil((math.log(seconds) - _LOG_SHORTEST) / _LOG_GROWTH))


def seconds_left(durations: Durations, ages: Iterable[float], waiting: int) -> float | None:
    """Estimate how long a run will still take.

    Args:
        durations: How long rollouts have taken.
        ages: Seconds for which each of those under way has lasted.
        waiting: Rollouts that have not begun.

    Returns:
        Seconds, or None while too little is known: few rollouts have ended, or none is under way.
    """
    under_way: dict[int, int] = {}
    places = 0
    for age in ages:
        bucket = bucket_of(age)
        under_way[bucket] = under_way.get(bucket, 0) + 1
        places += 1
    if durations.total < _ENOUGH or not places:
        return None
    survival = _Survival(durations.counts, under_way)
    return waiting * survival.mean / places + _until_the_last(survival, under_way)


class _Survival:
    """The share of rollouts that last longer than a time.

    Beyond the longest that was seen it falls as fast, in proportion, as it lately did. Where too few ended lately to
    tell, those under way are taken to end within twice the time that the longest has lasted.
    """

    def __init__(self, ended: list[float], under_way: dict[int, int]) -> None:
        self._longest = max(*(place for place, count in enumerate(ended) if count), *under_way)
        self._shares: list[float] = []
        at_risk = sum(ended) + sum(under_way.values())
        share, before, self.mean = 1.0, 0.0, 0.0
        ended_lately = exposure = 0.0
        for place in range(self._longest + 1):
            leaving = under_way.get(place, 0)
            exposed = at_risk - leaving / 2
            last = share
            share *= max(0.0, 1 - ended[place] / exposed) if exposed > 0 else 1.0
            self._shares.append(share)
            width = _BOUNDS[place] - before
            self.mean += (last + share) / 2 * width
            if place > self._longest - _LATELY:
                ended_lately += ended[place]
                exposure += (at_risk - (leaving + ended[place]) / 2) * width
            at_risk -= ended[place] + leaving
            before = _BOUNDS[place]
        self._hazard = ended_lately / exposure if exposure > 0 else 0.0
        if ended_lately < _ENOUGH:
            self._hazard = max(self._hazard, math.log(2 + sum(under_way.values())) / (2 * before))
        self.mean += share / self._hazard

    def __call__(self, seconds: float) -> float:
        beyond = seconds - _BOUNDS[self._longest]
        if beyond > 0:
            return self._shares[-1] * math.exp(-self._hazard * beyond)
        place = bucket_of(seconds)
        end, begin = _BOUNDS[place], _BOUNDS[place - 1] if place else 0.0
        last = self._shares[place - 1] if place else 1.0
        return last + (self._shares[place] - last) * min(1.0, (seconds - begin) / (end - begin))


def _until_the_last(survival: _Survival, under_way: dict[int, int]) -> float:
    """Return in how many seconds the last of those under way has probably ended."""
    groups = [(_BOUNDS[place], count, survival(_BOUNDS[place])) for place, count in under_way.items()]

    def expected(seconds: float) -> float:
        return sum(count * survival(age + seconds) / share for age, count, share in groups if share > 0)

    later = _SHORTEST_S
    while expected(later) > _PROBABLY:
        later *= 2
    earlier = later / 2
    for _ in range(6):
        middle = (earlier + later) / 2
        if expected(middle) > _PROBABLY:
            earlier = middle
        else:
            later = middle
    return later
