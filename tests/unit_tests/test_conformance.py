"""Scripts, replays and comparisons of the conformance check; tests/e2e/conformance has the whole."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request
from hypothesis import given, strategies as st
from starlette.middleware.sessions import SessionMiddleware

from nemo_gym.conformance import FindingKind
from nemo_gym.conformance.processes import holder_of
from nemo_gym.conformance.replay import INTERLEAVED, Connections, replay, replay_interleaved, session_of
from nemo_gym.conformance.replies import Expectation, Reply, path_text
from nemo_gym.conformance.report import difference_found, unstable_found
from nemo_gym.conformance.scripts import Script, ScriptedRequest, script_of
from nemo_gym.server_utils import SESSION_ID_KEY
from tests.support import serving

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "x"}


def reply(body: Any, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(body).decode())


def expectation(*bodies: Any) -> Expectation:
    """What is expected of one request after replays that answered `bodies`."""
    result = Expectation(1)
    for body in bodies:
        result.learn([reply(body)])
    return result


def test_a_rollout_becomes_seed_tool_calls_and_verify() -> None:
    row = {"id": 7, "responses_create_params": {"input": "hi"}, "goal": 3}
    trajectory = {"output": [call("a", "add", '{"n": 2}'), output("a"), call("b", "show"), output("b")]}
    script = script_of(4, row, {"reward": 1.0, "response": trajectory, "goal": 3})
    assert (script.task_index, script.row_id) == (4, "7")
    seed, add, show, verify = script.requests
    assert (seed.path, seed.body["goal"], seed.body["_ng_task_index"]) == ("/seed_session", 3, 4)
    assert (add.name, add.path, add.body) == ("add (tool call 1)", "/add", {"n": 2})
    assert (show.name, show.path, show.body) == ("show (tool call 2)", "/show", {})
    assert (verify.path, verify.body["goal"], verify.body["response"]) == ("/verify", 3, trajectory)
    assert "reward" not in verify.body


@pytest.mark.parametrize(
    "item",
    [
        call("a", "add", "{"),
        call("a", "add", "[1]"),
        call("a", "../admin"),
        call("a", "verify"),
        {**call("b", "add"), "call_id": "never answered"},
        {"type": "message", "content": []},
    ],
    ids=["no JSON", "no object", "no route", "a framework route", "not run", "a message"],
)
def test_what_an_agent_did_not_send_is_not_replayed(item: dict[str, Any]) -> None:
    script = script_of(0, {}, {"response": {"output": [item, output("a")]}})
    assert [request.path for request in script.requests] == ["/seed_session", "/verify"]


@given(JSON)
def test_the_same_reply_never_differs(body: Any) -> None:
    assert expectation(body, body).difference([reply(body)]) is None


@given(JSON, JSON)
def test_another_reply_differs_unless_it_varies_alone(one: Any, other: Any) -> None:
    if orjson.dumps(one, option=orjson.OPT_SORT_KEYS) == orjson.dumps(other, option=orjson.OPT_SORT_KEYS):
        return
    learned = expectation(one)
    assert learned.difference([reply(other)]) is not None
    learned.learn([reply(other)])
    assert learned.difference([reply(other)]) is None
    assert learned.unstable()


def test_a_difference_says_where_and_what() -> None:
    found = expectation({"items": [{"n": 1}, {"n": 2}]}).difference([reply({"items": [{"n": 1}, {"n": 3}]})])
    assert found is not None
    assert (path_text(found.path), found.expected, found.answered) == ("$.items[1].n", "2", "3")


def test_another_status_is_shown_with_its_whole_reply() -> None:
    found = expectation({"count": 1}).difference([reply({"detail": "gone"}, 410)])
    assert found is not None
    assert (path_text(found.path), found.expected, found.answered) == ("", '200 {"count":1}', '410 {"detail":"gone"}')


def test_what_varies_on_one_worker_is_left_out_and_the_rest_still_compared() -> None:
    learned = expectation({"count": 1, "id": "a"}, {"count": 1, "id": "b"})
    assert [path_text(path) for _, path, _ in learned.unstable()] == ["$.id"]
    assert learned.difference([reply({"count": 1, "id": "c"})]) is None
    found = learned.difference([reply({"count": 2, "id": "c"})])
    assert found is not None
    assert path_text(found.path) == "$.count"


def test_a_list_of_varying_length_has_no_fixed_places() -> None:
    learned = expectation({"found": [1, 1], "count": 3}, {"found": [1, 1, 1], "count": 3})
    assert learned.difference([reply({"found": [1, 1, 1, 1], "count": 3})]) is None
    assert learned.difference([reply({"found": [1], "count": 3})]) is None
    assert learned.difference([reply({"found": [1, 1], "count": 4})]) is not None
    assert learned.difference([reply({"found": [1, 1]})]) is not None


def test_replies_that_are_no_json_are_compared_as_text() -> None:
    learned = Expectation(1)
    learned.learn([Reply(200, "plain")])
    assert learned.difference([Reply(200, "plain")]) is None
    assert learned.difference([Reply(200, "other")]) is not None


SCRIPT = Script(3, "row-3", (ScriptedRequest("look", "/look", {}), ScriptedRequest("verify", "/verify", {})))


def test_an_unstable_reward_is_a_fault_and_an_unstable_id_is_not() -> None:
    learned = Expectation(2)
    learned.learn([reply({"id": 1}), reply({"reward": 1.0})])
    learned.learn([reply({"id": 2}), reply({"reward": 1.0})])
    found = unstable_found(SCRIPT, learned.unstable())
    assert (found.kind, found.is_fault, found.request) == (FindingKind.NOT_DETERMINISTIC, False, "look")
    learned.learn([reply({"id": 3}), reply({"reward": 0.0})])
    found = unstable_found(SCRIPT, learned.unstable())
    assert (found.is_fault, found.request, found.path) == (True, "verify", "$.reward")
    assert (found.task_index, found.row_id) == (3, "row-3")


def test_a_lost_worker_is_not_taken_for_lost_state() -> None:
    learned = Expectation(2)
    learned.learn([reply({}), reply({})])
    lost = Reply(410, '{"detail": "gone"}', session_lost=True)
    difference = learned.difference([lost, reply({})])
    assert difference is not None
    assert difference_found(FindingKind.STATE_LOST, SCRIPT, difference).kind is FindingKind.WORKER_LOST
    difference = learned.difference([reply({}, 410), reply({})])
    assert difference is not None
    assert difference_found(FindingKind.STATE_LOST, SCRIPT, difference).kind is FindingKind.STATE_LOST


class Recorder:
    """A server that keeps the order of requests, and where each session's came from."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.clients: dict[str, list[int]] = {}
        self.app = FastAPI()
        self.app.add_middleware(SessionMiddleware, secret_key="s", session_cookie="c")
        self.app.post("/{number}")(self.take)

    async def take(self, number: int, request: Request, body: dict[str, str]) -> dict[str, Any]:
        assert request.client is not None
        session = request.session.setdefault(SESSION_ID_KEY, body["session"])
        self.order.append((session, number))
        self.clients.setdefault(session, []).append(request.client.port)
        return {"session": session, "number": number}


def scripts(count: int, length: int) -> list[Script]:
    return [
        Script(i, None, tuple(ScriptedRequest(f"{n}", f"/{n}", {"session": f"s{i}"}) for n in range(length)))
        for i in range(count)
    ]


@asynccontextmanager
async def connected(recorder: Recorder) -> AsyncIterator[Connections]:
    async with serving(recorder.app, lifespan="auto") as url, Connections(url, 2) as connections:
        yield connections


async def test_sessions_are_woven_together_and_change_connections() -> None:
    recorder = Recorder()
    count = INTERLEAVED + 2
    async with connected(recorder) as connections:
        replies = await replay_interleaved(scripts(count, 4), connections)
    assert [[orjson.loads(one.text) for one in session] for session in replies] == [
        [{"session": f"s{i}", "number": n} for n in range(4)] for i in range(count)
    ]
    first = [session for session, _ in recorder.order[: INTERLEAVED * 4]]
    assert all(
        {first[position * INTERLEAVED + i] for i in range(INTERLEAVED)} == {f"s{i}" for i in range(INTERLEAVED)}
        for position in range(4)
    )
    for ports in recorder.clients.values():
        assert all(one != next_one for one, next_one in pairwise(ports))


async def test_a_server_that_goes_away_is_a_reply_too() -> None:
    recorder = Recorder()
    async with connected(recorder) as connections:
        async with serving(recorder.app, lifespan="auto") as url:
            gone = Connections(url, 1)
            await gone.__aenter__()
        try:
            (broken,) = await asyncio.wait_for(replay(scripts(1, 1)[0], gone), 30)
        finally:
            await gone.close()
        assert (broken.status, broken.text[:8]) == (0, "no reply")
        (fine,) = await replay(scripts(1, 1)[0], connections)
        assert fine.status == 200
        assert session_of(fine.cookies) == {SESSION_ID_KEY: "s0"}


@pytest.mark.parametrize("value", ["", "no-base64.x.y", "W10=.x.y", "eyJhIjoxfQ==.x.y", "bnVsbA=="])
def test_a_cookie_without_session_holds_none(value: str) -> None:
    assert session_of({"other": value}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a connection")
def test_the_process_that_holds_a_connection_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listening.accept()
            client_port = client.getsockname()[1]
            group = os.getpgid(0)
            assert holder_of(group, port, client_port) == str(os.getpid())
            assert holder_of(group + 1, port, client_port) is None
            accepted.close()
        assert holder_of(group, port, client_port + 1) is None
