"""Figures of real workers: counted over all of them, and telling of those that were killed, frozen and replaced."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.server.figures import ServerFigures, WorkerFigures
from tests.server_process import SERVER, WITH_APP, Process, eventually

MODEL = """
import os
from fastapi import Body
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel

class Model(SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig

    async def responses(self, body: dict = Body()) -> dict:
        return {"pid": os.getpid()}

    async def chat_completions(self, body: dict = Body()) -> dict:
        return {"pid": os.getpid()}

if __name__ == "__main__":
    Model.run_webserver()
"""
WORKERS = 3
SESSIONS = 12


def asked(server: Process, path: str = "/workers") -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as reply:
        return json.loads(reply.read())


def figures_when(server: Process, is_so: Callable[[ServerFigures], bool]) -> ServerFigures:
    """Ask until it is so, and return the answer in which it was."""
    found: list[ServerFigures] = []

    def look() -> bool:
        try:
            found.append(ServerFigures.from_json(asked(server)))
        except OSError:  # a worker that is just ending may have taken the connection
            return False
        return is_so(found[-1])

    eventually(look, 60)
    return found[-1]


def all_serve(figures: ServerFigures) -> bool:
    """Tell whether the workers are those that there are to be, and all of them serve."""
    serving = [worker for worker in figures.workers if worker.responding and worker.state == "serving"]
    return len(serving) == len(figures.workers) == figures.num_workers


def figures_of(server: Process) -> ServerFigures:
    """Ask until all workers have answered: on a busy machine one may miss its time."""
    return figures_when(server, all_serve)


def seeded(server: Process) -> dict[str, int]:
    """Begin sessions; return their cookies, each with the process that has the session."""
    owners = {}
    for _ in range(SESSIONS):
        status, body, cookie = server.call("/add")
        assert status == 200
        assert cookie is not None
        owners[cookie] = body["pid"]
    return owners


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with several workers, for all tests of this module; each leaves it with workers that serve."""
    with tempfile.TemporaryDirectory(prefix="ng-") as sockets, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        process = Process(
            tmp_path_factory.mktemp("server"), Path(sockets), SERVER + WITH_APP, num_workers=WORKERS, shutdown_grace_s=1
        )
        try:
            process.wait_until_ready()
            yield process
        finally:
            process.close()


@pytest.fixture
def steady(server: Process) -> Process:
    figures_of(server)
    return server


def test_the_sums_are_right_as_soon_as_the_requests_are_over(steady: Process) -> None:
    before = figures_of(steady)
    owners = seeded(steady)
    for cookie in owners:
        assert steady.call("/add", cookie)[0] == 200
    assert steady.call("/nowhere")[0] == 404
    after = figures_of(steady)
    assert after.requests_handled - before.requests_handled == 2 * SESSIONS + 1
    assert after.replies["2xx"] - before.replies.get("2xx", 0) == 2 * SESSIONS
    assert after.replies["4xx"] - before.replies.get("4xx", 0) == 1
    assert after.sessions_created - before.sessions_created == SESSIONS
    assert after.sessions_open - before.sessions_open == SESSIONS
    assert after.forwarded == sum(worker.forwarded_in for worker in after.workers) > 0
    held = Counter(owners.values())
    opened = {worker.pid: worker.sessions_open for worker in before.workers}
    assert {worker.pid: worker.sessions_open - opened[worker.pid] for worker in after.workers} == {
        pid: held[pid] for pid in opened
    }


def test_whichever_worker_answers_tells_of_all(steady: Process) -> None:
    workers = {worker.worker_id for worker in figures_of(steady).workers}
    answered: set[str] = set()

    def look() -> bool:
        figures = figures_of(steady)
        assert {worker.worker_id for worker in figures.workers} == workers
        answered.add(figures.answered_by)
        return len(answered) > 1

    eventually(look, 60)
    assert answered <= workers
    assert [worker.slot for worker in figures_of(steady).workers] == list(range(WORKERS))


def test_a_killed_worker_is_told_by_its_slot_and_by_the_replies_to_its_sessions(steady: Process) -> None:
    before = figures_of(steady)
    owners = seeded(steady)
    victim = next(worker for worker in figures_of(steady).workers if worker.sessions_open)
    os.kill(victim.pid, signal.SIGKILL)
    after = figures_when(steady, lambda it: all_serve(it) and it.workers[victim.slot].pid != victim.pid)
    heir = after.workers[victim.slot]
    assert (heir.restarts, heir.last_exit) == (victim.restarts + 1, "killed by SIGKILL")
    assert heir.sessions_lost == victim.sessions_lost + victim.sessions_open
    assert after.sessions_lost == before.sessions_lost + victim.sessions_open
    lost = [cookie for cookie, pid in owners.items() if pid == victim.pid]
    told = after.lost_replies.get("worker_gone", 0)
    assert [steady.call("/add", cookie)[0] for cookie in lost] == [410] * len(lost)
    assert figures_of(steady).lost_replies["worker_gone"] == told + len(lost)


def test_a_frozen_worker_is_shown_as_not_responding_and_the_others_answer(steady: Process) -> None:
    frozen = figures_of(steady).workers[1]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        as_wanted = [True, False, True]
        figures = figures_when(steady, lambda it: [worker.responding for worker in it.workers] == as_wanted)
        seen = figures.workers[1]
        assert (seen.pid, seen.responding, seen.state, seen.requests_handled) == (frozen.pid, False, "serving", 0)
        assert seen.started_at == frozen.started_at
    finally:
        os.kill(frozen.pid, signal.SIGCONT)


def test_workers_that_are_added_and_taken_away_come_and_go(steady: Process) -> None:
    first = [worker.pid for worker in figures_of(steady).workers]
    steady.process.send_signal(signal.SIGTTIN)
    more = figures_when(steady, lambda it: it.num_workers == WORKERS + 1 and all_serve(it))
    assert [worker.pid for worker in more.workers[:WORKERS]] == first
    assert [worker.slot for worker in more.workers] == list(range(WORKERS + 1))
    steady.process.send_signal(signal.SIGTTOU)
    fewer = figures_when(steady, lambda it: it.num_workers == WORKERS and all_serve(it))
    assert [worker.pid for worker in fewer.workers] == first


def test_workers_that_are_all_replaced_hand_their_slots_over(steady: Process) -> None:
    seeded(steady)
    before = figures_of(steady)
    old = {worker.pid for worker in before.workers}
    steady.process.send_signal(signal.SIGHUP)

    def are_new(figures: ServerFigures) -> bool:
        return all_serve(figures) and not old & {worker.pid for worker in figures.workers}

    after = figures_when(steady, are_new)
    assert [worker.slot for worker in after.workers] == list(range(WORKERS))
    for now, then in zip(after.workers, before.workers, strict=True):
        assert now.restarts == then.restarts + 1
        assert now.last_exit == "told to stop"
    assert after.sessions_lost == before.sessions_lost + before.sessions_open


def test_a_model_server_of_two_workers_shows_both_and_counts_no_sessions(start: Callable[..., Process]) -> None:
    server = start(MODEL, num_workers=2)
    server.wait_until_ready()
    figures_of(server)
    pids: Counter[int] = Counter()
    while len(pids) < 2:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/responses",
            data=b'{"input": "x"}',
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            pids[json.loads(reply.read())["pid"]] += 1
    figures = figures_of(server)
    assert {worker.pid: worker.requests_handled for worker in figures.workers} == dict(pids)
    assert figures.sessions_created == figures.forwarded == 0
    assert all(handles_nothing_else(worker) for worker in figures.workers)


def handles_nothing_else(worker: WorkerFigures) -> bool:
    return worker.responding and worker.state == "serving" and set(worker.replies) == {"2xx"}
