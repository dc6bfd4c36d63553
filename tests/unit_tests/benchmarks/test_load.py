"""What the load generators make of answers, and what a run makes of them."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections import Counter
from typing import Any

import pytest

from benchmarks.cli import SUITE, chosen
from benchmarks.load.counting import CounterSession, owner_in, session_maker
from benchmarks.load.sessions import Driver
from benchmarks.load.wire import Connection, post
from benchmarks.suite.placement import evenness


class Counters:
    """The counter server as far as a session sees it."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.counts: dict[bytes, int] = {}
        self.forgets = forgets

    def answer(self, request: bytes) -> tuple[int, bytes, list[bytes]]:
        head, _, body = request.partition(b"\r\n\r\n")
        path = head.split()[1].decode()
        content: dict[str, Any] = json.loads(body)
        cookie = next((line for line in head.split(b"\r\n") if line.startswith(b"Cookie: ")), None)
        if path == "/seed_session":
            name = b"counter=%d" % len(self.counts)
            self.counts[b"Cookie: " + name] = content["initial_count"]
            return 200, b"{}", [name + b"; path=/; httponly"]
        assert cookie is not None
        if path == "/increment_counter":
            self.counts[cookie] += 0 if self.forgets else content["count"]
            return 200, b'{"success":true}', []
        count = self.counts[cookie]
        reward = float(count == content["expected_count"])
        return 200, json.dumps({"reward": reward, "final_count": count}).encode(), []


def play(session: CounterSession, server: Counters) -> int:
    requests = 1
    while session.answered(*server.answer(session.request())):
        requests += 1
    return requests


def test_a_session_is_right_when_all_its_answers_are() -> None:
    session = CounterSession("host", 5, increments=3)
    assert play(session, Counters()) == 5
    assert session.right


def test_a_session_whose_count_is_lost_is_wrong_and_does_all_its_work() -> None:
    session = CounterSession("host", 5)
    assert play(session, Counters(forgets=True)) == 4
    assert not session.right


def test_a_refused_request_makes_its_session_wrong() -> None:
    session = CounterSession("host", 5)
    session.request()
    assert session.answered(410, b"{}", [])
    assert not session.right


def test_the_owner_is_read_from_the_cookie() -> None:
    value = b64encode(json.dumps({"session_id": "s", "owner": "w1"}).encode()) + b".time.signature"
    assert owner_in({b"other": b"nothing", b"counter": value}, "owner") == "w1"
    assert owner_in({b"counter": b"!"}, "owner") is None


def test_lengths_are_within_their_bounds_and_mostly_short() -> None:
    make = session_maker({"host": "h", "port": 1, "increments": [1, 40]})
    lengths = [play(make(number), Counters()) - 2 for number in range(300)]  # type: ignore[arg-type]
    assert min(lengths) >= 1
    assert max(lengths) <= 40
    assert sorted(lengths)[150] < 12


def test_a_request_has_its_length_and_its_cookies() -> None:
    request = post("h:1", "/path", b"{}", {b"a": b"1", b"b": b"2"}, b"X-One: 1\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == b"{}"
    assert set(head.split(b"\r\n")) >= {b"POST /path HTTP/1.1", b"Content-Length: 2", b"Cookie: a=1; b=2", b"X-One: 1"}


class AnsweringConnection(Connection):
    """A connection that is answered at some time, when the test lets it."""

    def __init__(self, server: Counters, pending: list[AnsweringConnection]) -> None:
        super().__init__(lambda _: None, lambda _: None)
        self.server = server
        self.pending = pending
        self.sessions: list[Any] = []

    def send(self, request: bytes) -> None:
        self.sessions.append(self.session)
        self.status, self.body, self.cookies = self.server.answer(request)
        self.pending.append(self)


async def test_a_sessions_requests_change_connections() -> None:
    pending: list[AnsweringConnection] = []
    server = Counters()
    connections = [AnsweringConnection(server, pending) for _ in range(8)]
    driver = Driver(session_maker({"host": "h", "port": 1}), connections, total=100, live=16)
    order = random.Random(1)

    import asyncio

    running = asyncio.create_task(driver.run())
    while not running.done():
        await asyncio.sleep(0)
        if pending:
            connection = pending.pop(order.randrange(len(pending)))
            connection.on_reply(connection)
    assert (driver.right, len(driver.latencies)) == (100, 400)
    used = Counter(session for connection in connections for session in set(connection.sessions))
    # By chance alone a session of four requests meets 3.3 of eight connections.
    assert sum(used.values()) / len(used) > 2.8


def test_evenness_is_the_most_loaded_over_the_least_loaded_worker() -> None:
    assert evenness({"a": 100, "b": 80}, 2) == 1.25
    assert evenness({"a": 100}, 2) == 100


def test_benchmarks_are_chosen_by_name_in_the_order_of_the_suite() -> None:
    assert chosen(["all"]) == list(SUITE)
    assert [benchmark.name for benchmark in chosen(["startup", "counter", "startup"])] == ["counter", "startup"]
    with pytest.raises(KeyError, match="nonsense"):
        chosen(["nonsense"])
