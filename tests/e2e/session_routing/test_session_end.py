"""The end of sessions on servers with several workers, one of which is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.session_routing.ledgers import Ledgers, Session, for_all, ledgers_deployed, seeded
from tests.e2e.session_routing.processes import Folders, is_over, until

SESSIONS = 60


@pytest.fixture(scope="module")
async def ledgers(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ledgers]:
    async with ledgers_deployed(folders, tmp_path_factory.mktemp("ends") / "record") as running:
        yield running


@pytest.mark.parametrize("keeps_cookies", [True, False], ids=["cookies", "body ids"])
@pytest.mark.promise("session-ends-once", "ended-is-410")
async def test_each_session_ends_once_with_its_verdict(ledgers: Ledgers, keeps_cookies: bool) -> None:
    sessions = await seeded(ledgers.servers.url("ledger"), SESSIONS, keeps_cookies=keeps_cookies)
    assert len({session.pid for session in sessions}) > 1
    numbers = list(range(1, SESSIONS + 1))
    assert await for_all(sessions, lambda session: session.add(100)) == [100 + number for number in numbers]
    assert await for_all(sessions, Session.verify) == [100 + number for number in numbers]
    assert await for_all(sessions, lambda session: session.add(1)) == ["session_ended"] * SESSIONS
    assert await for_all(sessions, Session.close) == [(200, {"closed": False})] * SESSIONS
    expected = {(session.session_id, "verified") for session in sessions}
    assert {end: times for end, times in ledgers.ends().items() if end in expected} == dict.fromkeys(expected, 1)


@pytest.mark.promise("session-ends-once", "ended-is-410")
async def test_closing_is_routed_and_closes_once_however_often_it_is_asked(ledgers: Ledgers) -> None:
    sessions = await seeded(ledgers.servers.url("ledger"), 20)
    answers = await asyncio.gather(*(session.close() for session in sessions for _ in range(5)))
    assert Counter(answer["closed"] for _, answer in answers) == {True: 20, False: 80}
    assert Counter(ledgers.ends()[session.session_id, "closed"] for session in sessions) == {1: 20}


async def test_idle_sessions_end_in_every_worker_and_busy_ones_go_on(ledgers: Ledgers) -> None:
    sessions = await seeded(ledgers.servers.url("idle_ledger"), 20)
    idle, busy = sessions[:10], sessions[10:]
    ends = {(session.session_id, "idle") for session in idle}
    async with asyncio.timeout(30):
        while not ends <= ledgers.ends().keys():
            assert "session_ended" not in await for_all(busy, lambda session: session.add(1))
            await asyncio.sleep(0.1)
    assert await for_all(idle, lambda session: session.add(1)) == ["session_ended"] * len(idle)
    assert {ledgers.ends()[end] for end in ends} == {1}


@pytest.mark.promise("session-ends-once")
async def test_a_killed_worker_ends_no_session_and_the_others_end_theirs(ledgers: Ledgers) -> None:
    workers = await ledgers.servers.all_workers("ledger")
    sessions = await seeded(ledgers.servers.url("ledger"), SESSIONS)
    victim = next(process for process in workers.values() if process.pid == sessions[0].pid)
    assert {session.pid for session in sessions} > {victim.pid}
    ends_before = ledgers.ends_by_process(victim.pid)
    victim.kill()
    await until(lambda: is_over(victim))
    verdicts = await for_all(sessions, Session.verify)
    for number, (session, verdict) in enumerate(zip(sessions, verdicts, strict=True), 1):
        assert verdict == ("worker_gone" if session.pid == victim.pid else number)
    await until(lambda: all(times_ended(ledgers, one) == (one.pid != victim.pid) for one in sessions))
    assert ledgers.ends_by_process(victim.pid) == ends_before
    await ledgers.servers.all_workers("ledger")


def times_ended(ledgers: Ledgers, session: Session) -> int:
    return sum(times for (session_id, _), times in ledgers.ends().items() if session_id == session.session_id)


@pytest.mark.promise("session-ends-once")
async def test_when_the_servers_stop_every_session_ends_once(folders: Folders, tmp_path: Path) -> None:
    async with ledgers_deployed(folders, tmp_path / "record") as ledgers:
        sessions = await seeded(ledgers.servers.url("ledger"), SESSIONS)
        closed = sessions.pop()
        assert await closed.close() == (200, {"closed": True})
        assert set(ledgers.ends()) == {(closed.session_id, "closed")}
    expected = {(session.session_id, "stopping") for session in sessions} | {(closed.session_id, "closed")}
    assert ledgers.ends() == dict.fromkeys(expected, 1)
