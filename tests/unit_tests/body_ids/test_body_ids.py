"""Sessions named in the body, on one worker, over real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

import pytest
from itsdangerous import TimestampSigner

from nemo_gym.server.body_ids import body_id_field
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import SESSION_OWNER_KEY
from tests.ending_server import VERIFY, Ledger, NamedLedger, clients, make, running, until
from tests.support import serving

FIELD = "resources_session_id"


def named(session: str, **body: Any) -> dict[str, Any]:
    return {FIELD: session, **body}


async def test_an_id_of_the_server_names_its_session_without_a_cookie() -> None:
    server = make(NamedLedger)
    async with running(server, 2, keeps_cookies=False) as (one, other):
        ids = [(await client.post("/seed_session"))[1] for client in (one, other)]
        for number in (1, 2):
            for client, seeded in zip((one, other), ids, strict=True):
                status, reply = await client.post("/add", named(seeded[FIELD]))
                assert (status, reply) == (200, {"number": number, "session_id": seeded["session_id"]})
        assert ids[0]["session_id"] != ids[1]["session_id"]
        assert quote(ids[0][FIELD], safe="") == ids[0][FIELD]


async def test_the_cookie_and_the_id_of_one_session_go_together() -> None:
    server = make(NamedLedger)
    async with running(server) as (client,):
        seeded = (await client.post("/seed_session"))[1]
        assert (await client.post("/add"))[1]["number"] == 1
        assert (await client.post("/add", named(seeded[FIELD])))[1]["number"] == 2


async def test_a_cookie_and_an_id_of_two_sessions_are_a_conflict() -> None:
    server = make(NamedLedger)
    async with running(server, 2) as (one, other):
        first = (await one.post("/seed_session"))[1][FIELD]
        await other.post("/seed_session")
        status, reply = await other.post("/add", named(first))
        assert (status, "names two sessions" in reply["detail"]) == (409, True)
        assert (await other.post("/seed_session", named("mine")))[0] == 409


async def test_a_second_seed_without_an_id_is_a_session_of_its_own_whatever_the_cookie() -> None:
    server = make(NamedLedger)
    async with running(server) as (client,):
        first, second = [(await client.post("/seed_session"))[1] for _ in range(2)]
        assert first["session_id"] != second["session_id"]
        assert (await client.post("/add", named(first[FIELD])))[0] == 409
        assert (await client.post("/add", named(second[FIELD])))[0] == 200


async def test_an_id_of_the_caller_begins_a_session_by_a_seed_only() -> None:
    server = make(NamedLedger)
    async with running(server, 2, keeps_cookies=False) as (client, other):
        status, reply = await client.post("/add", named("rollout 7"))
        assert (status, reply["reason"]) == (410, "session_ended")
        assert server.numbers == {}
        session_id = await client.seed(**named("rollout 7"))
        assert session_id.startswith("body-")
        assert (await other.post("/add", named("rollout 7")))[1] == {"number": 1, "session_id": session_id}
        assert (await other.post("/add", named("rollout 8")))[0] == 410


@pytest.mark.parametrize("session_end", [None, {}])
async def test_a_second_seed_of_a_session_under_way_is_a_conflict(session_end: Any) -> None:
    server = make(NamedLedger, session_end)
    async with running(server, keeps_cookies=False) as (client,):
        await client.seed(**named("mine"))
        made = (await client.post("/seed_session"))[1][FIELD]
        for session in ("mine", made):
            assert (await client.post("/add", named(session)))[1]["number"] == 1
            status, reply = await client.post("/seed_session", named(session))
            assert (status, "is under way" in reply["detail"]) == (409, True)
            assert (await client.post("/add", named(session)))[1]["number"] == 2


@pytest.mark.parametrize("session_end", [None, {}])
async def test_of_seeds_of_one_id_at_once_one_begins_it(session_end: Any) -> None:
    server = make(NamedLedger, session_end)
    async with running(server, keeps_cookies=False) as (client,):
        seeds = [asyncio.create_task(client.post("/seed_session", named("mine", slow=True))) for _ in range(10)]
        await server.gate("seed").reached.wait()
        await until(lambda: sum(seed.done() for seed in seeds) == 9)
        server.gate("seed").open.set()
        assert sorted([(await seed)[0] for seed in seeds]) == [200] + [409] * 9


@pytest.mark.parametrize("session_end", [None, {}])
async def test_an_id_whose_seed_failed_can_be_seeded_again(session_end: Any) -> None:
    server = make(NamedLedger, session_end)
    async with running(server, keeps_cookies=False) as (client,):
        assert (await client.post("/seed_session", named("mine", fails=True)))[0] == 503
        assert (await client.post("/add", named("mine")))[0] == 410
        await client.seed(**named("mine"))
        assert (await client.post("/add", named("mine")))[1]["number"] == 1


async def test_a_session_named_in_the_body_ends_like_any_other_and_may_begin_anew() -> None:
    server = make(NamedLedger, {"after_verify": True})
    app = server.setup_webserver()
    async with serving(app) as url, clients(url, keeps_cookies=False) as (client,):
        made = (await client.post("/seed_session"))[1][FIELD]
        await client.seed(**named("mine"))
        for session in ("mine", made):
            await client.post("/add", named(session))
            assert (await client.post("/verify", named(session, **VERIFY)))[1]["reward"] == 1
            assert (await client.post("/add", named(session)))[1]["reason"] == "session_ended"
            assert (await client.post("/seed_session", named(session)))[0] == 200
            assert (await client.post("/add", named(session)))[1]["number"] == 1
            assert await client.post("/close_session", named(session)) == (200, {"closed": True})
            assert await client.post("/close_session", named(session)) == (200, {"closed": False})
        assert [reason for _, reason in server.ended] == ["verified", "closed"] * 2
        assert app.state.body_sessions._seeded == {}


async def test_a_seed_of_an_id_whose_session_is_ending_waits_for_the_end() -> None:
    server = make(NamedLedger, {"after_verify": True})
    async with running(server, keeps_cookies=False) as (client,):
        await client.seed(**named("mine"))
        hook = server.gate("hook")
        await client.post("/verify", named("mine", **VERIFY))
        await hook.reached.wait()
        seeding = asyncio.create_task(client.seed(**named("mine")))
        await asyncio.sleep(0.05)
        assert not seeding.done()
        hook.open.set()
        await seeding
        assert (await client.post("/add", named("mine")))[1]["number"] == 1


async def test_an_id_of_an_earlier_process_is_lost() -> None:
    async with running(make(NamedLedger), keeps_cookies=False) as (client,):
        made = (await client.post("/seed_session"))[1][FIELD]
    server = make(NamedLedger)
    async with running(server, keeps_cookies=False) as (client,):
        status, reply = await client.post("/add", named(made))
        assert (status, reply["reason"]) == (410, "worker_gone")
        assert (await client.post("/seed_session", named(made)))[0] == 410
    assert server.numbers == {}


async def test_an_id_out_of_its_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make(NamedLedger)
    async with running(server, keeps_cookies=False) as (client,):
        with monkeypatch.context() as patch:
            patch.setattr(TimestampSigner, "get_timestamp", lambda _: int(time.time()) - 15 * 24 * 3600)
            made = (await client.post("/seed_session"))[1][FIELD]
        status, reply = await client.post("/add", named(made))
        assert (status, reply["reason"]) == (410, "session_expired")


async def test_a_forged_id_is_one_of_the_callers_and_never_that_session() -> None:
    server = make(NamedLedger)
    async with running(server, keeps_cookies=False) as (client,):
        seeded = (await client.post("/seed_session"))[1]
        payload = {"sid": seeded["session_id"], SESSION_OWNER_KEY: "0" * 32}
        forged = [
            SessionSerializer(["another key"], salt="nemo_gym.body_session_id").dumps(payload),
            SessionSerializer(server.session_keys(), salt="another salt").dumps(payload),
            seeded[FIELD][:-1],
            seeded["session_id"],
            "body-" + "0" * 64,
        ]
        for value in forged:
            assert (await client.post("/add", named(value)))[0] == 410
            session_id = await client.seed(**named(value))
            assert session_id != seeded["session_id"]
            assert session_id.startswith("body-")


async def test_an_older_key_still_reads_the_ids_it_signed() -> None:
    old = body_id_field(FIELD, ["old"])
    value = old.serializer.dumps({"sid": "a"})  # type: ignore[attr-defined]
    assert body_id_field(FIELD, ["new", "old"]).serializer.loads(value) == {"sid": "a"}


@pytest.mark.parametrize("value", [7, ["mine"], {"id": "mine"}, "", True])
async def test_what_is_no_text_is_refused(value: Any) -> None:
    async with running(make(NamedLedger), keeps_cookies=False) as (client,):
        status, reply = await client.post("/seed_session", {FIELD: value})
        assert (status, FIELD in reply["detail"]) == (422, True)


async def test_null_is_no_id() -> None:
    async with running(make(NamedLedger), keeps_cookies=False) as (client,):
        assert not (await client.seed(**{FIELD: None})).startswith("body-")


async def test_a_server_without_the_field_reads_no_ids_and_can_make_none() -> None:
    server = make(Ledger)
    app = server.setup_webserver()
    assert server.session_routing_options().get("body_ids") is None
    assert not hasattr(app.state, "body_sessions")
    async with serving(app) as url, clients(url, keeps_cookies=False) as (client,):
        first, second = [await client.seed(**named("mine")) for _ in range(2)]
        assert first != second
    request = type("Request", (), {"app": app})()
    with pytest.raises(TypeError, match="Ledger has no body_session_field"):
        server.new_body_session_id(request)
