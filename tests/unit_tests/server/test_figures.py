"""The figures as values: through JSON and back, by other versions too, and summed up."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given, strategies as st

from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures

BOUNDS = (0.1, 1.0, 10.0)
HISTOGRAM = Histogram(BOUNDS, (1, 2, 0, 1), 13.5)
WORKER = WorkerFigures(
    worker_id="a" * 32,
    slot=1,
    pid=7,
    restarts=2,
    last_exit="killed by SIGKILL",
    sessions_lost=3,
    requests_handled=4,
    replies={"2xx": 3, "4xx": 1},
    lost_replies={"worker_gone": 1},
    request_seconds=HISTOGRAM,
    loop_lag_s=0.25,
)
SERVER = ServerFigures("counter", "resources_servers", 12.5, 2, (WorkerFigures(pid=6), WORKER), "a" * 32, 5)


def test_they_come_back_from_json_as_they_were() -> None:
    assert ServerFigures.from_json(orjson.loads(orjson.dumps(SERVER.to_json()))) == SERVER


def test_another_versions_fields_are_passed_over_and_missing_ones_have_their_defaults() -> None:
    document = {"server": "counter", "moon": 1, "workers": [{"pid": 7, "tide": {}, "hop_seconds": {"bounds": [1]}}]}
    assert ServerFigures.from_json(document) == ServerFigures("counter", workers=(WorkerFigures(pid=7),))
    assert ServerFigures.from_json({}) == ServerFigures()


def test_restarts_count_once_while_one_process_takes_a_slot_over_from_another() -> None:
    leaving, coming = WorkerFigures(slot=1, restarts=1, state="leaving"), WorkerFigures(slot=1, restarts=2)
    assert ServerFigures(workers=(WorkerFigures(restarts=4), leaving, coming)).restarts == 6


def test_a_servers_sums_are_those_of_its_workers() -> None:
    figures = ServerFigures(workers=(WORKER, replace(WORKER, slot=2), WorkerFigures(responding=False)), num_workers=3)
    assert figures.replies == {"2xx": 6, "4xx": 2}
    assert figures.lost_replies == {"worker_gone": 2}
    assert (figures.requests_handled, figures.restarts, figures.sessions_lost) == (8, 4, 6)
    assert figures.request_seconds == Histogram(BOUNDS, (2, 4, 0, 2), 27.0)
    assert SERVER.sessions_lost == 3 + 5


@pytest.mark.parametrize(("part", "seconds"), [(0.0, 0.0), (0.25, 0.1), (0.5, 0.55), (0.75, 1.0), (1.0, 10.0)])
def test_a_quantile_lies_within_the_range_that_holds_it(part: float, seconds: float) -> None:
    assert HISTOGRAM.quantile(part) == pytest.approx(seconds)


def test_of_nothing_every_quantile_is_nothing() -> None:
    assert Histogram().quantile(0.5) == Histogram(BOUNDS, (0, 0, 0, 0)).quantile(1.0) == 0.0


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_part_never_has_a_smaller_quantile(counts: list[int], one: float, other: float) -> None:
    histogram = Histogram(BOUNDS, tuple(counts), 1.0)
    assert histogram.quantile(min(one, other)) <= histogram.quantile(max(one, other)) <= BOUNDS[-1]


def test_histograms_of_other_ranges_are_not_mixed_up() -> None:
    other = Histogram((0.5,), (9, 0), 1.0)
    assert HISTOGRAM + other == other
    assert HISTOGRAM + Histogram() == Histogram() + HISTOGRAM == HISTOGRAM
