"""The loads that workers share, and the worker that is chosen by them: many workers, simulated over one file."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nemo_gym.session_routing.held_sessions import HeldSessions, Placement
from nemo_gym.session_routing.loads import SharedLoads
from nemo_gym.session_routing.loads_file import SLOTS
from nemo_gym.session_routing.placement import Placer


class Clock:
    """A clock that goes on when it is told to, and by more than a look's interval."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float = 1.0) -> None:
        self.now += seconds


class Member:
    """One worker: its loads, its choice, and the sessions that it holds."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.worker_id = uuid.uuid4().hex
        self.loads = SharedLoads(path, self.worker_id, clock=clock)
        self.placer = Placer(Placement(), path.parent, self.worker_id)
        self.held = 0

    def hold(self, sessions: int) -> None:
        self.held = sessions
        self.loads.hold(sessions)

    def end(self) -> None:
        self.hold(self.held - 1)
        self.loads.note_end()

    def take(self, sender: Member) -> None:
        """Begin to handle a request of `sender`."""
        self.loads.taken(sender.loads.sender)

    def begin(self) -> None:
        """Answer such a request: a session begins with it."""
        self.hold(self.held + 1)
        self.loads.replied()

    def answer(self, sender: Member) -> None:
        self.take(sender)
        self.begin()

    def kill(self) -> None:
        """Let go of the lock and leave all else as it is, as the kernel does with a killed worker."""
        unlock = struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(self.loads.fileno(), fcntl.F_OFD_SETLK, unlock)


class Members:
    """The workers of one server."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.clock = Clock()
        self.all = [Member(path, self.clock) for _ in range(number)]
        self.go_on()

    def join(self) -> Member:
        self.all.append(Member(self.path, self.clock))
        self.go_on()
        return self.all[-1]

    def go_on(self, seconds: float = 1.0, *, frozen: Member | None = None) -> None:
        """Let time pass, in which all event loops run but that of a frozen worker."""
        self.clock.go_on(seconds)
        for member in self.all:
            if member is not frozen:
                member.loads.beat()

    def at(self, slot: int) -> Member:
        (found,) = (member for member in self.all if member.loads.slot == slot)
        return found

    def chosen_by(self, member: Member) -> Member:
        return self.at(member.placer.choose(member.loads, {}))

    def place(self, member: Member) -> Member:
        """Let a session that `member` accepts begin, and be answered."""
        chosen = self.chosen_by(member)
        chosen.hold(chosen.held + 1)
        return chosen

    def held(self) -> list[int]:
        return [member.held for member in self.all]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "loads"


@pytest.fixture
def four(path: Path) -> Iterator[Members]:
    members = Members(path, 4)
    yield members
    for member in members.all:
        member.loads.close()


def test_each_worker_sees_the_loads_of_all(four: Members) -> None:
    for load, member in enumerate(four.all):
        member.hold(load)

    seen = [member.loads.snapshot() for member in four.all]

    assert seen == [{member.worker_id: load for load, member in enumerate(four.all)}] * 4


def test_what_is_on_its_way_counts_at_once_until_it_is_answered(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    counted = [sender.loads.sent(target.loads.slot) for _ in range(3)]

    assert other.loads.load(target.loads.slot) == 3
    for worker in counted:
        sender.loads.answered(target.loads.slot, worker)
    assert other.loads.load(target.loads.slot) == 0


def test_a_session_counts_once_however_late_its_sender_hears_of_it(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    counted = [sender.loads.sent(slot) for _ in range(3)]

    seen = []
    for _ in counted:
        target.answer(sender)
        seen.append(other.loads.load(slot))
    for worker in counted:
        sender.loads.answered(slot, worker)
        seen.append(other.loads.load(slot))
    assert seen == [3] * 6


def test_what_a_worker_handles_counts_whatever_becomes_of_its_sender(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    counted = sender.loads.sent(target.loads.slot)
    target.take(sender)
    sender.loads.answered(target.loads.slot, counted)
    assert other.loads.load(target.loads.slot) == 1
    sender.kill()
    four.all.remove(sender)
    four.go_on()
    target.loads.peers()
    assert other.loads.load(target.loads.slot) == 1
    target.loads.replied()
    assert other.loads.load(target.loads.slot) == 0


def test_what_comes_after_its_sender_has_given_it_up_is_put_right_while_more_is_under_way(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    sender.loads.answered(slot, sender.loads.sent(slot))
    sender.loads.sent(slot)
    for _ in range(2):
        target.take(sender)
    assert other.loads.load(slot) == 2

    four.go_on()
    sender.loads.peers()
    sender.loads.sent(slot)
    assert other.loads.load(slot) == 3


def test_answers_to_what_was_sent_before_the_file_was_damaged_leave_no_count_behind(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    counted = [sender.loads.sent(slot) for _ in range(2)]
    with four.path.open("r+b") as file:
        file.write(bytes(four.path.stat().st_size))
    for member in (sender, target, sender):
        four.go_on()
        member.loads.peers()
    for worker in counted:
        sender.loads.answered(slot, worker)

    sender.loads.answered(slot, sender.loads.sent(slot))
    assert other.loads.load(slot) == 0


def test_what_was_lost_on_its_way_counts_until_its_sender_waits_for_no_answer(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    lost, late = sender.loads.sent(slot), sender.loads.sent(slot)

    sender.loads.answered(slot, lost)
    assert other.loads.load(slot) == 2
    target.answer(sender)
    sender.loads.answered(slot, late)
    assert other.loads.load(slot) == 1


def test_what_in_the_end_was_not_sent_counts_no_longer(four: Members) -> None:
    sender, target, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    unsent, _ = sender.loads.sent(slot), sender.loads.sent(slot)
    sender.loads.answered(slot, unsent, was_sent=False)
    assert other.loads.load(slot) == 1


def test_an_answer_to_a_sender_that_has_left_is_not_counted_for_its_successor(four: Members) -> None:
    target, sender, *_, other = four.all
    sender.loads.peers()
    slot = target.loads.slot
    sender.loads.sent(slot)
    sender.loads.leave()
    four.all.remove(sender)
    successor = four.join()
    assert successor.loads.slot == sender.loads.slot
    successor.loads.peers()
    successor.loads.sent(slot)
    target.answer(sender)
    sender.loads.close()
    assert other.loads.load(slot) == 2


@pytest.mark.promise("placement-forgets-the-dead")
def test_a_killed_worker_leaves_nothing_behind(four: Members) -> None:
    victim, sender, *others = four.all
    for member in four.all:
        member.loads.peers()
    victim.hold(50)
    victim.loads.sent(sender.loads.slot)
    counted = sender.loads.sent(victim.loads.slot)
    victim.kill()

    assert sender.loads.snapshot() == {member.worker_id: 0 for member in (sender, *others)}
    replacement = four.join()
    assert replacement.loads.slot == victim.loads.slot
    assert others[0].loads.snapshot()[replacement.worker_id] == 0
    # The answer to what was on its way to the dead one comes late.
    sender.loads.answered(victim.loads.slot, counted)
    assert others[0].loads.snapshot()[replacement.worker_id] == 0


@pytest.mark.promise("placement-forgets-the-dead")
def test_a_worker_that_has_just_died_is_not_taken_for_one_that_runs(four: Members) -> None:
    here, there, *_ = four.all
    assert there.loads.slot in here.loads.peers()

    there.kill()

    assert here.loads.worker_at(there.loads.slot) is None
    assert there.loads.slot not in here.loads.peers()


def test_a_worker_that_leaves_is_not_chosen_and_chooses_others(four: Members) -> None:
    here, leaving, *_ = four.all
    for member in four.all:
        member.hold(10)
    leaving.hold(0)
    assert four.chosen_by(here) is leaving

    leaving.loads.leave()

    assert here.loads.worker_at(leaving.loads.slot) is None
    assert four.chosen_by(here) is not leaving
    assert four.chosen_by(leaving) is not leaving
    assert leaving.worker_id not in leaving.loads.snapshot()


def test_a_worker_that_can_not_be_reached_stays_out(four: Members) -> None:
    here, there, *_ = four.all

    here.loads.unreachable(there.worker_id)

    assert there.loads.slot not in here.loads.peers()
    four.go_on()
    assert there.loads.slot not in here.loads.peers()


def test_more_workers_than_slots(path: Path) -> None:
    members = Members(path, SLOTS)
    try:
        with pytest.raises(OSError, match="all 64 slots"):
            Member(path, members.clock)
        members.all[7].loads.close()
        assert members.join().loads.slot == 7
    finally:
        for member in members.all:
            member.loads.close()


@pytest.mark.promise("placement-even")
def test_the_first_of_many_are_spread_before_one_of_them_is_answered(four: Members) -> None:
    acceptor = four.all[2]
    for _ in range(400):
        acceptor.loads.sent(acceptor.placer.choose(acceptor.loads, {}))

    loads = acceptor.loads.snapshot().values()
    assert sum(loads) == 400
    assert max(loads) < 1.1 * min(loads)


@pytest.mark.promise("placement-even")
@pytest.mark.parametrize("weights", [(1, 0, 0, 0), (1, 47, 11, 6), (1, 1, 1, 1)])
@pytest.mark.parametrize("at_once", [1, 3, 40, 400])
def test_sessions_of_uneven_length(four: Members, weights: tuple[int, ...], at_once: int) -> None:
    random = Random(at_once)
    under_way: list[tuple[float, Member]] = []
    begun = {member.worker_id: 0 for member in four.all}
    now = 0.0
    for _ in range(1200):
        if len(under_way) == at_once:
            under_way.sort(key=lambda session: session[0])
            now, ending = under_way.pop(0)
            ending.end()
        chosen = four.place(random.choices(four.all, weights)[0])
        begun[chosen.worker_id] += 1
        under_way.append((now + random.choice([1, 2, 3, 5, 10, 30, 100]) * random.uniform(0.8, 1.2), chosen))

    assert max(begun.values()) < 1.25 * min(begun.values())
    if at_once > 40:
        assert max(four.held()) < 1.25 * min(four.held())
    assert max(four.held()) - min(four.held()) <= 4 + at_once // 32


@pytest.mark.promise("placement-even")
def test_with_an_even_load_every_session_stays(four: Members) -> None:
    random = Random(4)
    for _ in range(200):
        for member in random.sample(four.all, 4):
            assert four.place(member) is member
        if four.all[0].held > 20:
            for member in four.all:
                member.end()


@pytest.mark.promise("placement-even")
@pytest.mark.parametrize("number", [4, 16])
def test_a_worker_that_has_just_started_is_not_flooded(path: Path, number: int) -> None:
    members = Members(path, number)
    for member in members.all[1:]:
        member.hold(10_000)
    begun = 200 * number
    random = Random(number)

    chosen = [members.place(random.choice(members.all)) for _ in range(begun)]

    share = chosen.count(members.all[0]) / begun
    assert 1.5 / number < share < 2.5 / number
    for member in members.all:
        member.loads.close()


def test_ends_of_long_ago_count_no_longer(four: Members) -> None:
    here, *others = four.all
    here.hold(100)
    for _ in range(100):
        here.end()
    assert four.chosen_by(here) in others

    four.go_on(60)

    assert four.chosen_by(here) is here


@pytest.mark.promise("placement-avoids-the-silent")
def test_a_worker_whose_event_loop_does_not_run_is_not_chosen(four: Members) -> None:
    here, frozen, *_ = four.all
    for member in four.all:
        member.hold(10)
    frozen.hold(0)
    assert four.chosen_by(here) is frozen

    four.go_on(1.0, frozen=frozen)
    assert four.chosen_by(here) is frozen
    four.go_on(0.1, frozen=frozen)
    assert here.loads.worker_at(frozen.loads.slot) is None
    assert four.chosen_by(here) is here
    # It runs all the same, and counts again as soon as its loop goes on.
    assert here.loads.snapshot()[frozen.worker_id] == 0
    four.go_on(0.2)
    assert four.chosen_by(here) is frozen


@pytest.mark.promise("placement-avoids-the-silent")
def test_where_all_others_are_silent_sessions_stay(four: Members) -> None:
    here = four.all[0]
    here.hold(100)
    four.clock.go_on(60)

    assert four.chosen_by(here) is here


@pytest.mark.promise("placement-forgets-the-dead")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_a_worker_forked_does_not_keep_its_slot(path: Path) -> None:
    ids = [uuid.uuid4().hex for _ in range(2)]
    here = SharedLoads(path, ids[0])
    listening, speaking = os.pipe()
    dying = os.fork()
    if not dying:
        # The worker, which forks a process that outlives it.
        try:
            worker = SharedLoads(path, ids[1])
            child = os.fork()
            if child:
                os.write(speaking, b"%d\n" % child)
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
            assert worker
        finally:
            os._exit(1)
    os.waitpid(dying, 0)
    child = int(os.read(listening, 20))
    try:
        give_up_at = time.monotonic() + 20
        while len(here.snapshot()) > 1 and time.monotonic() < give_up_at:
            time.sleep(0.001)
        assert list(here.snapshot()) == ids[:1]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(listening)
        os.close(speaking)
        here.close()


@pytest.mark.parametrize("damage", ["ones", "zeros", "noise"])
def test_a_damaged_file_heals(four: Members, damage: str) -> None:
    here, *others = four.all
    for member in four.all:
        member.hold(5)
        member.loads.peers()
    counted = here.loads.sent(others[0].loads.slot), here.loads.sent(here.loads.slot)
    size = four.path.stat().st_size
    with four.path.open("r+b") as file:
        file.write({"ones": b"\xff" * size, "zeros": bytes(size), "noise": Random(3).randbytes(size)}[damage])

    for member in four.all:
        assert four.chosen_by(member) in four.all
        for target in four.all:
            member.loads.answered(target.loads.slot, member.loads.sent(target.loads.slot))
    here.loads.answered(others[0].loads.slot, counted[0])
    here.loads.answered(here.loads.slot, counted[1])
    for _ in range(3):
        four.go_on()
        for member in four.all:
            member.loads.note_end()
            member.loads.peers()

    held = {member.worker_id: 5 for member in four.all}
    assert [member.loads.snapshot() for member in four.all] == [held] * 4


def test_a_file_that_is_too_short(path: Path) -> None:
    path.write_bytes(b"short")
    with pytest.raises(OSError, match="no file of loads"):
        SharedLoads(path, uuid.uuid4().hex)


def test_a_worker_alone_keeps_all(path: Path) -> None:
    members = Members(path, 1)
    assert members.place(members.all[0]) is members.all[0]
    members.all[0].loads.close()


def test_a_file_that_can_not_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedLoads(tmp_path / "missing" / "loads", uuid.uuid4().hex)
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        SharedLoads(tmp_path / "a folder", uuid.uuid4().hex)


def test_thousands_of_sessions_held_at_once_are_counted_to_half_a_percent() -> None:
    held, begun, ended = HeldSessions(), 0, 0
    for number in range(20_000):
        begun += held.begin(str(number))
        ended += number >= 4_000 and held.end(str(number - 4_000))
    assert begun == pytest.approx(20_000, rel=0.005)
    assert ended == pytest.approx(16_000, rel=0.005)
    assert len(held) == begun - ended == pytest.approx(4_000, rel=0.01)


def test_a_session_that_begins_or_ends_twice_counts_once() -> None:
    held = HeldSessions()
    for session in ("a", "b", "a"):
        held.begin(session)
    assert len(held) == 2
    assert [held.end("a"), held.end("a"), held.end("never begun")] == [True, False, False]
    assert len(held) == 1


def test_a_session_without_an_end_is_forgotten() -> None:
    held = HeldSessions()
    held.begin("old")
    held.forget()
    held.begin("young")
    assert len(held) == 2
    held.forget()
    assert len(held) == 1
    assert held.end("young")
    held.forget()
    assert len(held) == 0


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "send", "send", "take", "take", "begin", "hear", "keep", "end", "join", "kill", "leave", "look"]
        ),
        st.integers(0),
    ),
    max_size=60,
)


@pytest.mark.promise("placement-forgets-the-dead")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events)
def test_the_loads_are_what_a_simple_count_says(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    members = Members(tmp_path / uuid.uuid4().hex, 3)
    # Who sent to whom, and what has to be given back for it.
    on_the_way: list[tuple[Member, Member, str | None]] = []
    taken: list[tuple[Member, Member, str | None]] = []
    answered: list[tuple[Member, Member, str | None]] = []
    gone: list[Member] = []
    for kind, number in events:
        if kind == "join" and len(members.all) < 6:
            members.join()
        if not members.all:
            continue
        member = members.all[number % len(members.all)]
        if kind == "send":
            chosen = members.chosen_by(member)
            if chosen is member:
                chosen.take(member)
                taken.append((member, chosen, None))
            else:
                on_the_way.append((member, chosen, member.loads.sent(chosen.loads.slot)))
        elif kind == "take" and on_the_way:
            sender, chosen, counted = on_the_way.pop(number % len(on_the_way))
            if chosen in members.all:
                chosen.take(sender)
            taken.append((sender, chosen, counted))
        elif kind == "begin" and taken:
            sender, chosen, counted = taken.pop(number % len(taken))
            if chosen in members.all:
                chosen.begin()
            answered.append((sender, chosen, counted))
        elif kind == "hear" and answered:
            sender, chosen, counted = answered.pop(number % len(answered))
            if sender in members.all:
                sender.loads.answered(chosen.loads.slot, counted)
        elif kind == "keep" and on_the_way:
            sender, chosen, counted = on_the_way.pop(number % len(on_the_way))
            if sender in members.all:
                sender.loads.answered(chosen.loads.slot, counted, was_sent=False)
        elif kind == "end" and member.held:
            member.end()
        elif kind in ("kill", "leave"):
            member.kill() if kind == "kill" else member.loads.leave()
            members.all.remove(member)
            gone.append(member)
        members.go_on()
        expected = {
            one.worker_id: one.held
            + sum(s in members.all and to is one for s, to, _ in on_the_way)
            + sum(to is one for _, to, _ in taken)
            for one in members.all
        }
        for one in members.all:
            one.loads.peers()
        for one in members.all:
            assert one.loads.snapshot() == expected
    for member in members.all:
        member.loads.close()
