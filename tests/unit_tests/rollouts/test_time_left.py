"""The estimate of the time left, in runs that are played through with seeded durations."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nemo_gym.rollouts.time_left import Durations, seconds_left


@dataclass
class Run:
    """A run of rollouts that take the given times, so many at once, the next one as soon as a place is free."""

    begun: list[float]
    ended: list[float]

    @classmethod
    def of(cls, durations: list[float], places: int) -> Run:
        free = [0.0] * places
        begun = []
        for duration in durations:
            begun.append(heapq.heappop(free))
            heapq.heappush(free, begun[-1] + duration)
        return cls(begun, [at + duration for at, duration in zip(begun, durations, strict=True)])

    def left(self, share: float) -> tuple[float | None, float]:
        """What is estimated at a share of the run's length, and what is true."""
        now = share * max(self.ended)
        both = list(zip(self.begun, self.ended, strict=True))
        durations = Durations()
        for begun, ended in both:
            if ended <= now:
                durations.add(ended - begun)
        ages = [now - begun for begun, ended in both if begun <= now < ended]
        return seconds_left(durations, ages, sum(begun > now for begun in self.begun)), max(self.ended) - now


def of(draw: Callable[[random.Random], float], count: int, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [draw(source) for _ in range(count)]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.9])
def test_with_even_durations_it_is_close(share: float) -> None:
    estimate, truth = Run.of(of(lambda source: source.uniform(9, 11), 640), 64).left(share)
    assert estimate is not None
    assert truth / 1.4 < estimate < truth * 1.4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_with_a_long_tail_it_is_within_a_factor_of_three(share: float, seed: int) -> None:
    run = Run.of(of(lambda source: source.expovariate(0.1), 4000, seed), 256)
    estimate, truth = run.left(share)
    assert estimate is not None
    assert truth / 3 < estimate < truth * 3


def test_with_all_under_way_at_once_the_slow_ones_are_not_forgotten() -> None:
    run = Run.of(of(lambda source: source.expovariate(0.1), 2000), 2000)
    estimate, truth = run.left(0.2)
    now = 0.2 * max(run.ended)
    done = sum(ended <= now for ended in run.ended)
    assert estimate is not None
    by_the_rate = (2000 - done) / (done / now)
    assert by_the_rate < truth / 3 < estimate < 3 * truth


def test_one_that_hangs_is_not_taken_to_end_at_once() -> None:
    durations = Durations()
    for _ in range(100):
        durations.add(1.0)
    estimate = seconds_left(durations, [600.0], waiting=0)
    assert estimate is not None
    assert 60 < estimate < 3600


@pytest.mark.parametrize(("ended", "ages"), [(0, [1.0]), (4, [1.0]), (100, [])])
def test_nothing_is_estimated_from_too_little(ended: int, ages: list[float]) -> None:
    durations = Durations()
    for _ in range(ended):
        durations.add(1.0)
    assert seconds_left(durations, ages, waiting=5) is None


def test_what_rollouts_took_lately_counts_more() -> None:
    durations = Durations()
    for _ in range(10_000):
        durations.add(1.0)
    for _ in range(10_000):
        durations.add(10.0)
    estimate = seconds_left(durations, [5.0] * 10, waiting=100)
    assert estimate is not None
    assert 80 < estimate < 150


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-3, 1e9, 1e300])
def test_any_duration_is_taken(seconds: float) -> None:
    durations = Durations()
    for _ in range(10):
        durations.add(seconds)
    estimate = seconds_left(durations, [seconds, 0.0], waiting=10)
    assert estimate is not None
    assert 0 < estimate < 1e12
