"""Sessions named in the body, on a server with several workers, one of which is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.e2e.session_routing.ledgers import Ledgers, Session, for_all, ledgers_deployed, seeded
from tests.e2e.session_routing.processes import Folders, is_over, until

SESSIONS = 60


@pytest.fixture(scope="module")
async def ledgers(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ledgers]:
    async with ledgers_deployed(folders, tmp_path_factory.mktemp("ids") / "record") as running:
        yield running


@pytest.mark.promise("body-id")
async def test_every_session_is_right_without_cookies_whichever_workers_accept_its_requests(ledgers: Ledgers) -> None:
    sessions = await seeded(ledgers.servers.url("ledger"), SESSIONS)
    assert len({session.pid for session in sessions}) > 1
    for turn in (1, 2, 3):
        numbers = await for_all(sessions, lambda session: session.add(100))
        assert numbers == [number + 100 * turn for number in range(1, SESSIONS + 1)]
    assert await for_all(sessions, Session.verify) == [number + 300 for number in range(1, SESSIONS + 1)]


@pytest.mark.promise("body-id-claimed")
async def test_one_seed_of_a_callers_id_wins_among_all_workers(ledgers: Ledgers) -> None:
    url = ledgers.servers.url("ledger")
    for number in range(10):
        rivals = [Session(url, f"rollout {number}") for _ in range(8)]
        assert Counter(await for_all(rivals, Session.seed)) == {200: 1, 409: 7}


@pytest.mark.promise("body-id", "body-id-callers", "body-id-claimed")
async def test_a_killed_workers_ids_are_lost_and_a_callers_may_be_seeded_again(ledgers: Ledgers) -> None:
    workers = await ledgers.servers.all_workers("ledger")
    url = ledgers.servers.url("ledger")
    made = await seeded(url, SESSIONS)
    own = [Session(url, f"own {number}") for number in range(SESSIONS)]
    assert await for_all(own, Session.seed) == [200] * SESSIONS
    victim = next(process for process in workers.values() if process.pid == made[0].pid)
    assert {session.pid for session in made} > {victim.pid}
    victim.kill()
    await until(lambda: is_over(victim))
    answers = await for_all(made, lambda session: session.add(0))
    for number, (session, answer) in enumerate(zip(made, answers, strict=True), 1):
        assert answer == ("worker_gone" if session.pid == victim.pid else number)
    # A caller's id is not routed: what is under way elsewhere says so, and nothing begins anew with an empty state.
    pids = {session.name: session.pid for session in own}
    assert set(await for_all(own, lambda session: session.add(1))) <= {1, 409, "session_ended"}
    for session, status in zip(own, await for_all(own, Session.seed), strict=True):
        assert status == (200 if pids[session.name] == victim.pid else 409)
    await ledgers.servers.all_workers("ledger")
