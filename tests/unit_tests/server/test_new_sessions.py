"""Which worker a client lets its new sessions begin at, over the file of loads that workers share."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.server.new_sessions import NewSessions
from nemo_gym.session_routing.held_sessions import Placement
from nemo_gym.session_routing.hop import STRAIGHT_KEY
from nemo_gym.session_routing.loads import SharedLoads
from nemo_gym.session_routing.loads_view import LoadsView
from nemo_gym.session_routing.placement import Placer

STRAIGHT = {STRAIGHT_KEY: True}


class Workers:
    """The loads of some workers, and a client that sees them."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.now = 1000.0
        self.loads: dict[str, SharedLoads] = {}
        for _ in range(number):
            self.join()
        self.view = LoadsView(path, clock=self.clock)
        self.client = NewSessions(self.view)

    def clock(self) -> float:
        return self.now

    def join(self) -> str:
        worker = uuid.uuid4().hex
        self.loads[worker] = SharedLoads(self.path, worker, clock=self.clock)
        self.go_on()
        return worker

    def go_on(self, *, frozen: str | None = None, seconds: float = 1.0) -> None:
        self.now += seconds
        for worker, loads in self.loads.items():
            if worker != frozen:
                loads.beat()

    def hold(self, *sessions: int) -> None:
        for loads, count in zip(self.loads.values(), sessions, strict=True):
            loads.hold(count)

    def chosen(self, number: int = 1) -> Counter[str | None]:
        """Choose for sessions that begin and are answered one after the other, and are not counted as held."""
        return Counter(self.client.choose() for _ in range(number))

    def burst(self, number: int) -> list[int]:
        """Choose for sessions of which none is answered before the last has been sent."""
        begun: Counter[str] = Counter()
        for _ in range(number):
            worker = self.client.choose()
            assert worker is not None
            self.client.sent(worker)
            begun[worker] += 1
        for worker in begun.elements():
            self.client.answered(worker)
        return [begun[worker] for worker in self.loads]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "loads"


@pytest.fixture
def four(path: Path) -> Iterator[Workers]:
    workers = Workers(path, 4)
    yield workers
    workers.view.close()
    for loads in workers.loads.values():
        loads.close()


@pytest.mark.promise("straight-begins")
class TestChoice:
    def test_a_burst_is_spread_before_any_of_it_is_answered(self, four: Workers) -> None:
        assert four.burst(40) == [10, 10, 10, 10]

    def test_a_burst_fills_up_those_that_hold_less(self, four: Workers) -> None:
        four.hold(3, 0, 5, 8)
        assert four.burst(16) == [5, 8, 3, 0]

    def test_what_is_answered_counts_for_this_client_no_longer(self, four: Workers) -> None:
        four.burst(7)
        assert four.burst(8) == [2, 2, 2, 2]

    def test_equal_loads_take_turns(self, four: Workers) -> None:
        four.hold(6, 6, 6, 6)
        assert sorted(four.chosen(40).values()) == [10, 10, 10, 10]

    def test_what_other_workers_have_sent_counts_too(self, four: Workers) -> None:
        first, second, *_ = four.loads.values()
        first.peers()
        first.sent(second.slot)
        first.sent(first.slot)
        assert four.burst(2) == [0, 0, 1, 1]

    def test_a_worker_that_has_just_started_does_not_get_all(self, four: Workers) -> None:
        four.hold(500, 500, 500, 500)
        newcomer = four.join()
        assert four.chosen(50)[newcomer] == 10

    def test_a_worker_that_leaves_is_not_chosen_from_that_moment_on(self, four: Workers) -> None:
        four.hold(9, 0, 9, 9)
        assert four.chosen() == {list(four.loads)[1]: 1}
        list(four.loads.values())[1].leave()
        assert list(four.loads)[1] not in four.chosen(9)
        for loads in four.loads.values():
            loads.leave()
        assert four.client.choose() is None

    def test_a_killed_worker_is_not_chosen_a_moment_later(self, four: Workers) -> None:
        four.hold(9, 0, 9, 9)
        dead = list(four.loads)[1]
        unlock = struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(four.loads[dead].fileno(), fcntl.F_OFD_SETLK, unlock)
        four.go_on()
        assert dead not in four.chosen(9)

    def test_a_worker_whose_event_loop_does_not_run_is_left_out(self, four: Workers) -> None:
        four.hold(9, 0, 9, 9)
        frozen = list(four.loads)[1]
        four.go_on(frozen=frozen)
        assert frozen in four.chosen()
        four.go_on(frozen=frozen, seconds=0.3)
        assert frozen not in four.chosen(9)
        four.now += 60
        assert four.client.choose() is None
        four.go_on()
        assert frozen in four.chosen()

    def test_a_worker_that_was_not_reached_is_left_out_for_a_moment(self, four: Workers) -> None:
        four.hold(9, 0, 9, 9)
        busy = list(four.loads)[1]
        assert busy in four.chosen()
        four.client.leave_out(busy)
        assert busy not in four.chosen(9)
        four.go_on()
        assert busy in four.chosen()

    def test_looking_needs_no_slot_and_changes_nothing(self, four: Workers) -> None:
        before = four.path.read_bytes()
        four.path.chmod(0o400)
        with_another = NewSessions(LoadsView(four.path, clock=four.clock))
        assert with_another.choose() in four.loads
        four.burst(9)
        assert four.path.read_bytes() == before


@pytest.mark.promise("straight-begins-else-by-the-port")
@pytest.mark.parametrize("left", ["nothing", "an empty file", "a directory", "a link", "a pipe"])
def test_without_a_file_of_loads_there_is_no_choice(tmp_path: Path, path: Path, left: str) -> None:
    if left == "an empty file":
        path.touch()
    elif left == "a directory":
        path.mkdir()
    elif left == "a pipe":
        os.mkfifo(path)
    elif left == "a link":
        SharedLoads(tmp_path / "other", uuid.uuid4().hex).close()
        path.symlink_to(tmp_path / "other")
    assert NewSessions.at(tmp_path) is None


@pytest.mark.promise("straight-begins")
@pytest.mark.parametrize(("ahead", "stays"), [(0, True), (20, True), (60, False), (5000, False)])
def test_the_worker_overrules_a_choice_that_is_far_off(four: Workers, ahead: int, stays: bool) -> None:
    four.hold(10 + ahead, 10, 10, 10)
    worker, loads = next(iter(four.loads.items()))
    placer = Placer(Placement(), four.path.parent, worker)
    assert (placer.choose(loads, STRAIGHT) == loads.slot) is stays
    assert placer.choose(loads, {}) != loads.slot or ahead == 0


@pytest.mark.promise("straight-begins")
def test_a_stopping_worker_hands_on_what_comes_straight(four: Workers) -> None:
    worker, loads = next(iter(four.loads.items()))
    loads.leave()
    assert Placer(Placement(), four.path.parent, worker).choose(loads, STRAIGHT) in [
        other.slot for other in list(four.loads.values())[1:]
    ]
