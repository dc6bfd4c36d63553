"""What the dashboard says of servers that answer, hang, hide their figures, or are no longer there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from nemo_gym.config_types import ServerInstance
from nemo_gym.dashboard import board as board_module
from nemo_gym.dashboard.board import Board
from nemo_gym.dashboard.watch import Event, ServerWatch
from nemo_gym.global_config import find_open_port
from nemo_gym.rollouts.progress_record import ProgressRecord, RunProgress
from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures
from tests.figures_server import FiguresServer, instance
from tests.support import serving

HEAD = "http://127.0.0.1:11000"


class Looking:
    """A board that looks as fast as it can, and what it shows."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def shown(self) -> Any:
        return json.loads(self.board.look()[1])

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(20):
            while True:
                shown = self.shown()
                if condition(shown):
                    return shown
                await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def looking_at(*instances: ServerInstance) -> AsyncIterator[Looking]:
    board = Board(instances, HEAD, Path("/work"))
    task = asyncio.create_task(board.run())
    try:
        yield Looking(board)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "LOOKED_AT_S", 0.01)
    monkeypatch.setattr(board_module, "LONGEST_WAIT_S", 0.05)


def states(shown: Any) -> dict[str, str]:
    return {server["name"]: server["state"] for server in shown["servers"]}


async def test_a_server_that_answers_is_shown_with_its_workers() -> None:
    server = FiguresServer()
    server.change(1, sessions_open=7, requests_handled=40)
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        shown = await looking.until(lambda shown: states(shown) == {"counter": "ok"})
    (counter,) = shown["servers"]
    assert counter["totals"]["sessions_open"] == 7
    workers = [(one["slot"], one["sessions_open"], one["handled"]) for one in counter["workers"]]
    assert workers == [(0, 0, 0), (1, 7, 40)]
    assert shown["findings"] == shown["events"] == []


async def test_workers_that_were_added_or_taken_away_by_signals_count() -> None:
    server = FiguresServer(workers=3)
    async with serving(server.app) as url, looking_at(instance("counter", url, workers=2)) as looking:
        shown = await looking.until(lambda shown: states(shown) == {"counter": "ok"})
    (counter,) = shown["servers"]
    assert (counter["totals"]["responding"], counter["num_workers"]) == (3, 3)


async def test_rates_and_latencies_are_those_of_the_last_seconds() -> None:
    server = FiguresServer(workers=1)
    bounds = (0.01, 0.1)
    server.change(0, requests_handled=1000, request_seconds=Histogram(bounds, (0, 0, 1000), 5000.0))
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        await looking.until(lambda shown: states(shown) == {"counter": "ok"})
        server.change(0, requests_handled=1300, request_seconds=Histogram(bounds, (300, 0, 1000), 5001.0), cpu_s=15.0)
        shown = await looking.until(lambda shown: shown["servers"][0]["totals"]["requests_per_s"])
    totals = shown["servers"][0]["totals"]
    assert (totals["requests_per_s"], totals["cpu"]) == (10.0, 0.5)
    assert totals["request_p99_ms"] <= 10


async def test_a_server_that_hangs_keeps_no_other_back() -> None:
    quick, slow = FiguresServer("quick"), FiguresServer("slow")
    slow.free.clear()
    async with serving(quick.app) as one, serving(slow.app) as other:
        async with looking_at(instance("slow", other), instance("quick", one)) as looking:
            shown = await looking.until(lambda shown: states(shown)["quick"] == "ok")
            assert states(shown)["slow"] == "starting"
            quick.change(0, sessions_open=3)
            await looking.until(lambda shown: shown["servers"][1]["totals"]["sessions_open"] == 3)
            slow.free.set()
            await looking.until(lambda shown: states(shown)["slow"] == "ok")


async def test_a_server_that_stops_answering_is_told_once_and_so_is_its_return() -> None:
    server = FiguresServer()
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        await looking.until(lambda shown: states(shown) == {"counter": "ok"})
        server.reply, server.health = (lambda: Response(status_code=404)), 500
        shown = await looking.until(lambda shown: states(shown) == {"counter": "silent"})
        assert [one["text"] for one in shown["findings"]] == ["does not answer: /health answered 500"]
        assert shown["history"]["servers"]["counter"]["sessions"][-1] is None
        (counter,) = shown["servers"]
        assert (counter["totals"], counter["workers"]) == (None, []), "what it said last is not the present"
        server.reply, server.health = (lambda: JSONResponse(server.figures.to_json())), 200
        shown = await looking.until(lambda shown: states(shown) == {"counter": "ok"})
    assert [one["text"] for one in shown["events"]] == ["answers again", "does not answer: /health answered 500"]


@pytest.mark.parametrize(
    "reply",
    [Response(status_code=404), JSONResponse({"people": 3}), JSONResponse([1]), Response("no JSON"), Response(b"\xff")],
    ids=["hidden", "a route of its own", "a list", "text", "bytes"],
)
async def test_a_server_without_figures_is_no_problem(reply: Response) -> None:
    server = FiguresServer()
    server.reply = lambda: reply
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        shown = await looking.until(lambda shown: states(shown) == {"counter": "hidden"})
    assert shown["findings"] == []
    assert shown["servers"][0]["workers"] == []


async def test_a_server_that_was_never_there_is_starting() -> None:
    async with looking_at(instance("counter", f"http://127.0.0.1:{find_open_port()}")) as looking:
        shown = await looking.until(lambda shown: shown["servers"][0]["problem"])
    assert (states(shown), shown["servers"][0]["problem"]) == ({"counter": "starting"}, "not listening")
    assert shown["findings"] == shown["events"] == []


async def test_a_worker_that_is_replaced_is_told_with_what_was_lost() -> None:
    server = FiguresServer()
    server.change(1, sessions_open=5)
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        await looking.until(lambda shown: states(shown) == {"counter": "ok"})
        server.change(
            1, worker_id="new", pid=300, restarts=1, last_exit="killed by SIGKILL", sessions_open=0, sessions_lost=5
        )
        shown = await looking.until(lambda shown: shown["events"])
    (event,) = shown["events"]
    assert event["text"] == "worker 1 was replaced (killed by SIGKILL); 5 sessions lost with it"
    assert [(one["server"], one["worker"]) for one in shown["findings"]] == [("counter", 1)]


def events_of(*looks: tuple[WorkerFigures, ...]) -> list[tuple[str, str]]:
    events: list[Event] = []
    watch = ServerWatch(instance("counter", "http://127.0.0.1:1"), events.append)
    for at, workers in enumerate(looks):
        watch.answered(at, ServerFigures(server="counter", at=at, workers=workers))
    return [(event.level, event.text) for event in events]


OLD = WorkerFigures(worker_id="old", slot=0, pid=1)
KILLED = replace(OLD, worker_id="new", pid=2, restarts=1, last_exit="killed by SIGKILL", sessions_lost=1)
EMPTY = replace(KILLED, worker_id="", pid=0, restarts=0, responding=False, state="ended")
IN_ORDER = replace(OLD, worker_id="new", pid=2, restarts=1)
TOLD = ("error", "worker 0 was replaced (killed by SIGKILL); 1 session lost with it")


@pytest.mark.parametrize(
    ("looks", "events"),
    [
        ([(OLD,), (OLD,)], []),
        ([(KILLED,), (KILLED,)], []),
        ([(OLD,), (), (KILLED,), (KILLED,)], [TOLD]),
        ([(OLD,), (OLD, KILLED), (OLD, KILLED), (KILLED, OLD), (KILLED,)], [TOLD]),
        ([(OLD,), (replace(KILLED, responding=False),), (KILLED,)], [TOLD]),
        (
            [(OLD,), (replace(KILLED, last_exit="told to stop", sessions_lost=0),)],
            [("note", "worker 0 was replaced (told to stop)")],
        ),
        (
            [(OLD,), (replace(OLD, responding=False),), (replace(OLD, responding=False),), (OLD,)],
            [("error", "worker 0 does not respond"), ("good", "worker 0 responds again")],
        ),
        (
            [(OLD,), (replace(KILLED, last_exit="ended with exit code 3", sessions_lost=0),)],
            [("error", "worker 0 was replaced (ended with exit code 3)")],
        ),
        ([(OLD,), (EMPTY,), (EMPTY,), (KILLED,)], [TOLD]),
        (
            [(OLD,), (OLD, IN_ORDER), (replace(IN_ORDER, last_exit="told to stop", sessions_lost=4),)],
            [
                ("note", "worker 0 was replaced (told to stop)"),
                ("error", "worker 0 took over from one that has ended; 4 sessions lost with it"),
            ],
        ),
        (
            [(OLD,), (replace(KILLED, restarts=3, deaths=2, last_exit="told to stop", sessions_lost=5),)],
            [("error", "worker 0 was replaced 3 times, the last one (told to stop); 5 sessions lost with it")],
        ),
    ],
    ids=[
        "nothing",
        "before the first look",
        "gone in between",
        "both there",
        "begins slowly",
        "in order",
        "silent",
        "exited",
        "an empty slot in between",
        "lost after all",
        "many between two looks",
    ],
)
def test_what_happens_to_a_worker_is_told_once(
    looks: list[tuple[WorkerFigures, ...]], events: list[tuple[str, str]]
) -> None:
    assert events_of(*looks) == events


async def test_only_runs_that_use_the_deployment_are_shown_those_that_go_on_first() -> None:
    records = [ProgressRecord() for _ in range(4)]
    now = 4e9
    for record, head, at, finished in zip(
        records,
        (HEAD, "http://127.0.0.1:12000", HEAD, HEAD),
        (now, now, now + 1, 10.0),
        (None, None, "completed", "completed"),
        strict=True,
    ):
        record.write(RunProgress(record.run_id, head_url=head, started_at=at, updated_at=at, finished=finished))
    async with looking_at() as looking:
        shown = await looking.until(lambda shown: shown["runs"])
    for record in records:
        record.close()
    assert [run["run_id"] for run in shown["runs"]] == [records[0].run_id, records[2].run_id]


async def test_a_number_that_json_does_not_have_does_not_stop_the_page() -> None:
    record = ProgressRecord()
    board = Board([], HEAD, Path("/work"))
    board._runs = [RunProgress(record.run_id, reward_sum=float("nan"))]
    board._publish(1.0)
    assert json.loads(board.look()[1])["runs"][0]["reward_sum"] is None


async def test_nobody_looks_so_servers_are_asked_seldom_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "UNSEEN_S", 3600.0)
    server = FiguresServer()
    asked = asyncio.Event()

    def reply() -> Response:
        asked.set()
        return JSONResponse(server.figures.to_json())

    server.reply = reply
    async with serving(server.app) as url, looking_at(instance("counter", url)) as looking:
        await asyncio.wait_for(asked.wait(), 20)
        # Until a server has first answered, it is asked often.
        await until(lambda: looking.board.has_seen_all)
        asked.clear()
        looking.shown()
        await asyncio.wait_for(asked.wait(), 20)
