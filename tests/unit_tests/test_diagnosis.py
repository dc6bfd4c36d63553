"""What is said of figures, and that nothing is said of those that chance explains."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.deployment.diagnosis import FindingKind, Severity, diagnose, seconds_text
from nemo_gym.server.figures import ServerFigures, WorkerFigures

NOW = 1_800_000_000.0
HOUR = 3600.0


def worker(slot: int, **values: Any) -> WorkerFigures:
    values = {"worker_id": f"{slot:032x}", "pid": 1000 + slot, "started_at": NOW - HOUR, **values}
    return WorkerFigures(slot=slot, **values)


def server(*workers: WorkerFigures, at: float = NOW, num_workers: int | None = None) -> ServerFigures:
    wanted = len(workers) if num_workers is None else num_workers
    return ServerFigures("counter", "resources_servers", at, wanted, workers, workers[0].worker_id if workers else "")


def kinds(figures: ServerFigures, earlier: ServerFigures | None = None) -> list[FindingKind]:
    return [finding.kind for finding in diagnose(figures, earlier)]


def looked_at_before(figures: ServerFigures, seconds: float, **values: Any) -> ServerFigures:
    """The same workers some time before, with other values."""
    workers = tuple(replace(one, **values) for one in figures.workers)
    return replace(figures, at=figures.at - seconds, workers=workers)


def test_a_server_that_works_gives_no_finding() -> None:
    busy = server(
        *(worker(slot, sessions_open=1000 + slot, requests_handled=10**6, replies={"2xx": 10**6}) for slot in range(4))
    )
    assert diagnose(busy) == []
    assert diagnose(server(worker(0))) == []


def test_a_worker_that_does_not_answer_is_a_warning_and_twice_an_error() -> None:
    figures = server(worker(0), worker(1, responding=False))
    (finding,) = diagnose(figures)
    assert (finding.severity, finding.kind, finding.worker) == (Severity.WARNING, FindingKind.NOT_RESPONDING, 1)
    assert "worker 1 (process 1001) does not answer" in finding.text
    assert "py-spy dump --pid 1001" in finding.text
    (again,) = diagnose(figures, replace(figures, at=NOW - 5))
    assert again.severity is Severity.ERROR
    (held,) = diagnose(figures, looked_at_before(figures, 10, responding=True, sessions_open=12))
    assert held.severity is Severity.WARNING
    assert "What it held waits: 12 sessions." in held.text


def test_what_lasts_is_told_by_the_last_look_and_not_by_the_earlier_one() -> None:
    figures = server(worker(0), worker(1, responding=False))
    answered = looked_at_before(figures, 60, responding=True, sessions_open=12)
    silent = replace(figures, at=NOW - 2)
    (lasts,) = diagnose(figures, answered, silent)
    assert lasts.severity is Severity.ERROR
    assert "What it held waits: 12 sessions." in lasts.text
    (again,) = diagnose(figures, replace(silent, at=NOW - 60), replace(answered, at=NOW - 2))
    assert again.severity is Severity.WARNING
    empty = server(worker(0), worker(1, pid=0, started_at=0.0, responding=False, state="ended"))
    (gone,) = diagnose(empty, replace(answered, at=NOW - 60), replace(empty, at=NOW - 2))
    assert gone.severity is Severity.ERROR


def test_a_worker_that_is_starting_or_leaving_need_not_answer() -> None:
    (finding,) = diagnose(server(worker(0), worker(1, responding=False, state="starting", started_at=NOW - 12)))
    assert (finding.severity, finding.kind) == (Severity.NOTE, FindingKind.STARTING)
    assert "worker 1 (process 1001) has been starting for 12 s" in finding.text
    leaving = worker(1, pid=7, responding=False, state="leaving", restarts=3, last_exit="killed by SIGKILL")
    assert diagnose(server(worker(0), leaving, worker(1), num_workers=2)) == []


def test_fewer_workers_than_there_are_to_be_are_told() -> None:
    (finding,) = diagnose(server(worker(0), num_workers=3))
    assert finding.kind is FindingKind.WORKER_MISSING
    assert "there are 1 of 3 workers" in finding.text


def test_an_empty_place_is_a_warning_and_twice_an_error() -> None:
    gone = worker(1, pid=0, started_at=0.0, responding=False, state="ended", restarts=4, last_exit="killed by SIGKILL")
    figures = server(worker(0), gone)
    (finding,) = diagnose(figures)
    assert (finding.severity, finding.kind, finding.worker) == (Severity.WARNING, FindingKind.NOT_RUNNING, 1)
    assert "worker 1 is not running (killed by SIGKILL; restarts so far: 4)" in finding.text
    (again,) = diagnose(figures, replace(figures, at=NOW - 3))
    assert again.severity is Severity.ERROR


def test_one_death_is_a_warning_that_names_how_and_what_was_lost() -> None:
    died = worker(1, restarts=1, last_exit="killed by SIGKILL", sessions_lost=7, started_at=NOW - 20)
    (finding,) = diagnose(server(worker(0), died))
    assert (finding.severity, finding.kind, finding.worker) == (Severity.WARNING, FindingKind.REPLACED, 1)
    assert "replaced 20 s ago (killed by SIGKILL); 7 sessions lost" in finding.text
    assert "dmesg" in finding.text


def test_a_death_long_ago_is_a_note_of_its_lost_sessions_at_most() -> None:
    died = worker(1, restarts=1, last_exit="killed by SIGKILL", started_at=NOW - HOUR / 2)
    assert diagnose(server(worker(0), died)) == []
    (finding,) = diagnose(replace(server(worker(0), replace(died, sessions_lost=7)), lost_with_removed=2))
    assert (finding.severity, finding.kind) == (Severity.NOTE, FindingKind.SESSIONS_LOST)
    assert "9 sessions lost" in finding.text


def test_a_worker_that_was_replaced_in_good_order_is_no_finding() -> None:
    told = "told to stop; ended with exit code 0"
    assert diagnose(server(worker(0, restarts=5, last_exit=told, started_at=NOW - 5))) == []


def test_many_restarts_in_a_short_time_are_an_error() -> None:
    crashing = worker(1, restarts=4, deaths=3, last_exit="ended with exit code 1", started_at=NOW - 2)
    (finding,) = diagnose(server(worker(0, started_at=NOW - 300), crashing))
    assert (finding.severity, finding.kind) == (Severity.ERROR, FindingKind.RESTARTING)
    assert "worker 1 restarts over and over: 3 times, the last time 2.0 s ago (ended" in finding.text


def test_as_many_restarts_within_days_are_single_deaths() -> None:
    crashed = worker(1, restarts=3, deaths=3, last_exit="ended with exit code 1", started_at=NOW - 2)
    assert kinds(server(worker(0, started_at=NOW - 72 * HOUR), crashed)) == [FindingKind.REPLACED]


def test_replacements_in_good_order_do_not_make_one_death_many() -> None:
    died = worker(1, restarts=9, deaths=1, last_exit="killed by SIGKILL", started_at=NOW - 2)
    assert kinds(server(worker(0, started_at=NOW - 300), died)) == [FindingKind.REPLACED]


def test_a_worker_that_holds_most_sessions_is_named() -> None:
    figures = server(worker(0, sessions_open=300), worker(1, sessions_open=50), worker(2, sessions_open=40))
    (finding,) = diagnose(figures)
    assert (finding.kind, finding.worker) == (FindingKind.UNEVEN, 0)
    assert "worker 0 holds 300 of 390 open sessions on 3 workers (an even share is 130)" in finding.text


@pytest.mark.parametrize("sessions", [(4, 0), (5, 1, 1), (12, 8), (70, 30), (10, 3, 3, 4)])
def test_small_or_slight_differences_are_no_finding(sessions: tuple[int, ...]) -> None:
    assert diagnose(server(*(worker(slot, sessions_open=count) for slot, count in enumerate(sessions)))) == []


@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_sessions_given_out_by_chance_are_no_finding(workers: int) -> None:
    chance = random.Random(workers)
    for total in (20, 60, 250, 1000, 4000):
        for _ in range(8):
            held = [0] * workers
            for slot in chance.choices(range(workers), k=total):
                held[slot] += 1
            assert diagnose(server(*(worker(slot, sessions_open=count) for slot, count in enumerate(held)))) == []


def test_a_newcomer_without_sessions_does_not_make_the_others_look_greedy() -> None:
    newcomer = worker(2, sessions_open=0, started_at=NOW - 30)
    assert diagnose(server(worker(0, sessions_open=500), worker(1, sessions_open=500), newcomer)) == []


def test_while_all_workers_are_replaced_the_last_old_one_is_not_greedy() -> None:
    new = [worker(slot, pid=7 + slot, restarts=1, started_at=NOW - 3) for slot in (0, 1)]
    old = worker(2, sessions_open=50, started_at=NOW - 20)
    assert diagnose(server(*new, old)) == []
    even_again = [replace(one, sessions_open=5) for one in new]
    greedy = worker(2, pid=9, restarts=1, sessions_open=90, started_at=NOW - 2)
    assert kinds(server(*even_again, greedy)) == [FindingKind.UNEVEN]


def test_a_silent_worker_does_not_make_the_others_look_greedy() -> None:
    silent = worker(2, responding=False)
    figures = server(worker(0, sessions_open=500), worker(1, sessions_open=500), silent)
    assert kinds(figures) == [FindingKind.NOT_RESPONDING]


def test_a_blocked_event_loop_is_told_apart_from_a_busy_one() -> None:
    figures = server(worker(0, loop_lag_s=2.5, sessions_open=9, cpu_s=100.0), worker(1, loop_lag_s=0.3))
    (finding,) = diagnose(figures)
    assert (finding.kind, finding.worker) == (FindingKind.LOOP_BLOCKED, 0)
    assert (
        "blocked for 2.5 s in the last seconds, and so was all that it has: 9 sessions, 0 requests in flight."
        in finding.text
    )
    assert "`def` rather than `async def`" in finding.text
    (busy,) = diagnose(figures, looked_at_before(figures, 10, cpu_s=90.5))
    assert "It uses 95% of a processor" in busy.text
    (waiting,) = diagnose(figures, looked_at_before(figures, 10, cpu_s=99.0))
    assert "`def` rather than `async def`" in waiting.text


def test_replies_of_lost_sessions_are_told_with_their_reasons() -> None:
    figures = server(worker(0, replies={"2xx": 500, "4xx": 40}, lost_replies={"worker_gone": 30, "other": 10}))
    (finding,) = diagnose(figures)
    assert finding.kind is FindingKind.LOST_REPLIES
    assert "40 replies since the workers started told of lost sessions (410): 10 other, 30 worker_" in finding.text
    assert diagnose(server(worker(0, replies={"2xx": 5}, lost_replies={"session_ended": 5}))) == []
    assert diagnose(server(worker(0, replies={"2xx": 10**5}, lost_replies={"session_ended": 50}))) == []


def test_what_was_wrong_before_the_earlier_look_is_wrong_no_longer() -> None:
    bad = {"replies": {"2xx": 100, "5xx": 100}, "lost_replies": {"worker_gone": 50}}
    figures = server(worker(0, **bad))
    assert kinds(figures) == [FindingKind.LOST_REPLIES, FindingKind.SERVER_ERRORS]
    assert diagnose(figures, looked_at_before(figures, 30)) == []


def test_server_errors_and_unanswered_requests_count_by_their_share() -> None:
    figures = server(worker(0, replies={"2xx": 300, "5xx": 30, "none": 60}))
    errors, unanswered = diagnose(figures, looked_at_before(figures, 60, replies={"2xx": 100}))
    assert "30 of 290 replies in the last 60 s were server errors" in errors.text
    assert (unanswered.kind, unanswered.severity) == (FindingKind.UNANSWERED, Severity.NOTE)
    assert diagnose(server(worker(0, replies={"2xx": 10_000, "5xx": 30, "none": 60}))) == []
    assert diagnose(server(worker(0, replies={"5xx": 3}))) == []


def test_requests_that_none_ends_for_long_are_a_note() -> None:
    figures = server(worker(0, requests_in_flight=8, replies={"2xx": 10}, requests_handled=10))
    (finding,) = diagnose(figures, looked_at_before(figures, 90))
    assert finding.kind is FindingKind.NO_PROGRESS
    assert "no request was answered in the last 90 s, while 8 are in flight" in finding.text
    assert diagnose(figures, looked_at_before(figures, 10)) == [], "too short a time"
    assert diagnose(figures, looked_at_before(figures, 90, requests_in_flight=0)) == [], "they may have just come"
    assert diagnose(figures, looked_at_before(figures, 90, replies={"2xx": 9})) == [], "one was answered"


def test_the_worst_comes_first() -> None:
    figures = server(
        worker(0, loop_lag_s=3.0), worker(1, responding=False, state="starting"), worker(2, responding=False)
    )
    before = looked_at_before(figures, 5)
    assert [finding.severity for finding in diagnose(figures, before)] == [
        Severity.ERROR,
        Severity.WARNING,
        Severity.NOTE,
    ]


def test_a_server_without_workers_yet_is_no_trouble() -> None:
    assert kinds(server(num_workers=2)) == [FindingKind.WORKER_MISSING]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (12, "12 s"), (300, "5 min"), (3 * HOUR, "3 h"), (90, "90 s")]
)
def test_times_are_said_roughly(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_page_on_status_tells_of_every_finding() -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| (?:error|warning|note) \|", page, re.MULTILINE)) == set(FindingKind)
