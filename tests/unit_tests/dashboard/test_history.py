"""The history stays small, and its rates stay exact, whatever is dropped from it."""

from __future__ import annotations

import pytest

from nemo_gym.dashboard.history import COARSE_STEP_S, FINE_S, WHOLE_S, History, RequestCount, Sample
from nemo_gym.server.figures import ServerFigures, WorkerFigures


def sample(requests: int = 0, sessions: int = 0) -> Sample:
    return Sample(sessions=sessions, in_flight=0, requests=requests)


def figures(*workers: tuple[int, int | None]) -> ServerFigures:
    """Return figures of workers: each one's process, and what it has handled, None where it is silent."""
    return ServerFigures(
        workers=tuple(
            # Of a silent worker the id is not known.
            WorkerFigures(slot=slot, pid=pid, responding=False)
            if handled is None
            else WorkerFigures(worker_id=f"id of {pid}", slot=slot, pid=pid, requests_handled=handled)
            for slot, (pid, handled) in enumerate(workers)
        )
    )


def test_a_day_of_looks_takes_no_more_room_than_an_hour_and_reaches_an_hour_back() -> None:
    history = History()
    for place in range(24 * 3600 // 2):
        history.add(place * 2.0, {"a": sample()})
    assert len(history) <= FINE_S / 2 + WHOLE_S / COARSE_STEP_S + 3
    at = history.to_json()["at"]
    assert at == sorted(at)
    assert WHOLE_S - COARSE_STEP_S <= at[-1] - at[0] <= WHOLE_S


def test_the_last_minutes_are_kept_as_they_were_seen() -> None:
    history = History()
    for place in range(400):
        history.add(float(place), {"a": sample(sessions=place)})
    assert history.to_json()["servers"]["a"]["sessions"][-int(FINE_S) :] == list(range(100, 400))


def test_a_steady_rate_is_the_same_in_the_thinned_part() -> None:
    history = History()
    for place in range(1000):
        history.add(place * 3.0, {"a": sample(requests=place * 30)})
    rates = history.to_json()["servers"]["a"]["requests_per_s"]
    assert rates[0] is None
    assert set(rates[1:]) == {10.0}


def test_a_server_that_does_not_answer_leaves_a_gap() -> None:
    history = History()
    history.add(0, {"a": sample(), "b": sample()})
    history.add(5, {"a": sample(requests=10)})
    history.add(10, {"a": sample(requests=20), "b": sample(requests=50, sessions=7)})
    history.add(15, {"a": sample(requests=30), "b": sample(requests=60, sessions=8)})
    servers = history.to_json()["servers"]
    assert servers["b"]["sessions"] == [0, None, 7, 8]
    assert servers["b"]["requests_per_s"] == [None, None, None, 2.0]
    assert servers["a"]["requests_per_s"] == [None, 2.0, 2.0, 2.0]


def test_two_looks_at_almost_the_same_time_make_no_rate() -> None:
    history = History()
    history.add(0, {"a": sample()})
    history.add(0.01, {"a": sample(requests=10)})
    assert history.to_json()["servers"]["a"]["requests_per_s"] == [None, None]


def test_history_begins_anew_when_the_clock_is_set_back() -> None:
    history = History()
    history.add(1000, {"a": sample()})
    history.add(1010, {"a": sample()})
    history.add(500, {"a": sample(sessions=3)})
    assert history.to_json() == {
        "at": [500],
        "servers": {"a": {"sessions": [3], "in_flight": [0], "requests_per_s": [None]}},
    }


@pytest.mark.parametrize(
    ("looks", "total"),
    [
        ([figures((1, 100)), figures((1, 130))], 30),
        ([figures((1, 100)), figures((2, 7))], 7),
        ([figures((1, 100)), figures((1, None)), figures((1, None)), figures((1, 120))], 20),
        ([figures((1, 100)), figures(), figures((2, 5))], 5),
        ([figures((1, 5), (2, 5)), figures((1, 6), (3, 2))], 3),
    ],
    ids=["counts on", "replaced", "silent for a while", "gone for a while", "one of two replaced"],
)
def test_requests_are_counted_once_though_workers_come_and_go(looks: list[ServerFigures], total: int) -> None:
    count = RequestCount()
    for look in looks:
        count.add(look)
    assert count.total == total
