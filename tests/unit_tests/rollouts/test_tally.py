from __future__ import annotations

import pytest

from nemo_gym.rollouts.events import (
    CollectionStarted,
    RolloutFailed,
    RolloutFinished,
    RolloutRunAgain,
    RolloutStarted,
)
from nemo_gym.rollouts.tally import RunTally


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tally(clock: Clock) -> RunTally:
    tally = RunTally(clock)
    tally(CollectionStarted(total=1000, already_done=100))
    return tally


def make(tally: RunTally, clock: Clock, count: int, seconds: float) -> None:
    for _ in range(count):
        tally(RolloutStarted(0, 0))
        clock.now += seconds
        tally(RolloutFinished(0, 0, 1.0, seconds))


def test_every_event_is_counted_and_what_has_ended_is_not_running(tally: RunTally, clock: Clock) -> None:
    for row in range(5):
        tally(RolloutStarted(row, 0))
    clock.now += 3
    tally(RolloutRunAgain(0, 0, 1, "gone", "session_lost"))
    tally(RolloutRunAgain(1, 0, 1, "broke", "connection_lost"))
    tally(RolloutFinished(0, 0, 0.25, 3.0))
    tally(RolloutFinished(1, 0, 0.75, 3.0))
    tally(RolloutFailed(2, 0, "timeout", "too long"))
    assert (tally.total, tally.already_done, tally.finished, tally.failed) == (1000, 100, 2, 1)
    assert (tally.run_again, tally.lost_sessions, tally.running, tally.remaining) == (2, 1, 2, 897)
    assert (tally.mean_reward, tally.oldest_s(), tally.seconds) == (0.5, 3.0, 3.0)


def test_rewards_fall_into_the_histogram_by_their_lower_bound(tally: RunTally) -> None:
    for reward in (-1.0, 0.0, 0.05, 0.1, 0.95, 1.0, 7):
        tally(RolloutFinished(0, 0, reward, 1.0))
    assert tally.reward_histogram == [1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 2]


def test_the_rate_is_that_of_the_last_minute(tally: RunTally, clock: Clock) -> None:
    assert tally.rate_per_s() == 0.0
    make(tally, clock, 100, 1.0)
    assert tally.rate_per_s() == pytest.approx(1.0, rel=0.05)
    make(tally, clock, 700, 0.1)
    assert tally.rate_per_s() == pytest.approx(10.0, rel=0.05)


def test_the_rate_of_slow_rollouts_is_that_of_the_whole_run(tally: RunTally, clock: Clock) -> None:
    make(tally, clock, 10, 300.0)
    assert tally.rate_per_s() == pytest.approx(1 / 300)


def test_a_run_that_stands_still_has_a_falling_rate(tally: RunTally, clock: Clock) -> None:
    make(tally, clock, 100, 0.1)
    clock.now += 1_000
    assert tally.rate_per_s() < 0.2


def test_reasons_that_differ_in_numbers_alone_are_one(tally: RunTally) -> None:
    for number in range(3):
        tally(RolloutFailed(number, 0, "http_error", f"http://127.0.0.1:80{number} said 500 of 3fa85f64{number}"))
    tally(RolloutFailed(9, 0, "http_error", "something else"))
    kind = tally.failures["http_error"]
    assert (kind.count, len(kind.reasons)) == (4, 2)
    assert kind.most_frequent_reason == "http://127.0.0.1:800 said 500 of 3fa85f640"


def test_what_is_kept_of_failures_does_not_grow_with_their_number(tally: RunTally) -> None:
    for number in range(1000):
        tally(RolloutFailed(0, 0, "error", chr(0x4E00 + number) * 10_000))
    kind = tally.failures["error"]
    assert kind.count == 1000
    assert len(kind.reasons) == len(kind.examples) <= 50
    assert max(map(len, kind.examples.values())) < 500
