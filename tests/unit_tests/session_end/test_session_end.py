"""When sessions end, as a client and the server's hook see it, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from nemo_gym.errors import ConfigError
from nemo_gym.server.session_end import check_close_route
from tests.ending_server import VERIFY, Agent, Ledger, clients, make, running, until
from tests.support import serving

ENDED = "session_ended"


def lost_reason(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 410, answer
    assert body["new_session_may_be_seeded"] is True
    assert "Start a new session" in body["detail"]
    reason: str = body["reason"]
    return reason


async def test_without_the_setting_there_is_no_route_no_end_and_no_bookkeeping() -> None:
    server = make(Ledger)
    app = server.setup_webserver()
    assert not hasattr(app.state, "session_lives")
    assert "SessionEndMiddleware" not in [entry.cls.__name__ for entry in app.user_middleware]
    async with running(server) as (client,):
        await client.seed()
        assert (await client.post("/verify", VERIFY))[0] == 200
        assert (await client.post("/close_session"))[0] == 404
        assert (await client.post("/add"))[1]["number"] == 1
    assert server.ended == []


@pytest.mark.promise("ended-is-410")
async def test_close_ends_a_session_once_and_its_next_requests_are_410() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        session_id = await client.seed()
        assert await client.post("/close_session") == (200, {"closed": True})
        assert server.ended == [(session_id, "closed")]
        assert await client.post("/close_session") == (200, {"closed": False})
        async with client.http.post("/add", json={}) as reply:
            assert reply.headers["x-nemo-gym-session-lost"] == ENDED
            assert lost_reason((reply.status, await reply.json())) == ENDED
        assert lost_reason(await client.post("/verify", VERIFY)) == ENDED
    assert server.ended == [(session_id, "closed")]


@pytest.mark.promise("ended-is-410")
async def test_closing_what_never_began_is_harmless_and_begins_nothing() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        async with client.http.post("/close_session") as reply:
            assert (await reply.json(), reply.headers.get("set-cookie")) == ({"closed": False}, None)
    assert server.ended == []


async def test_a_seed_begins_an_ended_session_anew() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        session_id = await client.seed()
        await client.post("/add")
        await client.post("/close_session")
        assert await client.seed() == session_id
        assert (await client.post("/add"))[1]["number"] == 1
        await client.post("/close_session")
    assert server.ended == [(session_id, "closed")] * 2


async def test_a_seed_waits_for_the_end_of_what_it_begins_anew() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        hook = server.gate("hook")
        closing = asyncio.create_task(client.post("/close_session"))
        await hook.reached.wait()
        seeding = asyncio.create_task(client.seed())
        await asyncio.sleep(0.05)
        assert not seeding.done()
        hook.open.set()
        assert await closing == (200, {"closed": True})
        await seeding
        assert (await client.post("/add"))[1]["number"] == 1


async def test_a_good_verdict_ends_the_session_and_does_not_wait_for_the_hook() -> None:
    server = make(Ledger, {"after_verify": True})
    async with running(server) as (client,):
        session_id = await client.seed()
        await client.post("/add")
        hook = server.gate("hook")
        status, verdict = await client.post("/verify", VERIFY)
        assert (status, verdict["reward"]) == (200, 1.0)
        await hook.reached.wait()
        assert lost_reason(await client.post("/add")) == ENDED
        hook.open.set()
        assert await client.post("/close_session") == (200, {"closed": False})
    assert server.ended == [(session_id, "verified")]


@pytest.mark.parametrize("body", [{**VERIFY, "fails": True}, {"response": 3}])
async def test_a_failed_verify_ends_nothing(body: Any) -> None:
    server = make(Ledger, {"after_verify": True})
    async with running(server) as (client,):
        await client.seed()
        assert (await client.post("/verify", body))[0] in (500, 422)
        assert (await client.post("/add"))[1]["number"] == 1
        assert server.ended == []


async def test_a_verdict_ends_nothing_unless_that_is_configured() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        await client.post("/verify", VERIFY)
        assert (await client.post("/add"))[1]["number"] == 1
        assert server.ended == []


async def test_the_end_waits_for_the_requests_in_flight_and_refuses_new_ones() -> None:
    server = make(Ledger, {"after_verify": True})
    async with running(server) as (client,):
        await client.seed()
        slow = asyncio.create_task(client.post("/slow"))
        await server.gate("slow").reached.wait()
        assert (await client.post("/verify", VERIFY))[0] == 200
        closing = asyncio.create_task(client.post("/close_session"))
        assert lost_reason(await client.post("/add")) == ENDED
        assert server.ended == []
        server.gate("slow").open.set()
        assert (await slow)[0] == 200
        assert await closing == (200, {"closed": False})
    assert server.log == ["slow is over", "ended: verified"]


async def test_background_tasks_and_streams_are_requests_in_flight() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        await client.post("/background")
        async with client.http.post("/stream", json={}) as stream:
            assert await stream.content.readany() == b"begun"
            closing = asyncio.create_task(client.post("/close_session"))
            await asyncio.sleep(0.05)
            server.gate("background").open.set()
            await asyncio.sleep(0.05)
            assert not closing.done()
            server.gate("stream").open.set()
            assert await stream.content.read() == b"done"
        assert await closing == (200, {"closed": True})


async def test_a_client_that_leaves_a_close_does_not_undo_it() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        slow = asyncio.create_task(client.post("/slow"))
        await server.gate("slow").reached.wait()
        with pytest.raises(TimeoutError):
            await client.post("/close_session", timeout=aiohttp.ClientTimeout(total=0.1))
        assert lost_reason(await client.post("/add")) == ENDED
        server.gate("slow").open.set()
        await slow
        await until(lambda: server.ended)
        assert await client.post("/close_session") == (200, {"closed": False})


async def test_a_request_whose_client_has_left_does_not_hold_up_the_end() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        with pytest.raises(TimeoutError):
            await client.post("/slow", timeout=aiohttp.ClientTimeout(total=0.1))
        assert await client.post("/close_session") == (200, {"closed": True})
    assert server.log == ["ended: closed"]


async def test_a_seed_whose_client_has_left_is_released() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        with pytest.raises(TimeoutError):
            await client.post("/seed_session", {"slow": True}, timeout=aiohttp.ClientTimeout(total=0.1))
        await until(lambda: server.ended)
        assert ([reason for _, reason in server.ended], server.numbers) == (["seed_failed"], {})


async def test_of_closes_at_once_one_closes_and_all_wait_for_the_end() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        session_id = await client.seed()
        hook = server.gate("hook")
        closes = [asyncio.create_task(client.post("/close_session")) for _ in range(20)]
        await hook.reached.wait()
        await asyncio.sleep(0.05)
        assert not any(close.done() for close in closes)
        hook.open.set()
        answers = [(await close)[1]["closed"] for close in closes]
    assert sorted(answers) == [False] * 19 + [True]
    assert server.ended == [(session_id, "closed")]


async def test_an_idle_session_ends_and_one_with_a_request_in_flight_does_not() -> None:
    server = make(Ledger, {"idle_timeout_s": 0.15})
    async with running(server, 3) as (idle, busy, waiting):
        idle_id, busy_id, waiting_id = [await client.seed() for client in (idle, busy, waiting)]
        slow = asyncio.create_task(waiting.post("/slow"))
        await server.gate("slow").reached.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 0.6:
            assert (await busy.post("/add"))[0] == 200
            await asyncio.sleep(0.02)
        assert server.ended == [(idle_id, "idle")]
        assert lost_reason(await idle.post("/add")) == ENDED
        server.gate("slow").open.set()
        await slow
        await until(lambda: len(server.ended) == 3)
    assert {(busy_id, "idle"), (waiting_id, "idle")} == set(server.ended[1:])


async def test_a_websocket_keeps_its_session_from_being_idle_and_a_lost_one_is_refused() -> None:
    server = make(Ledger, {"idle_timeout_s": 0.1})
    async with running(server) as (client,):
        await client.seed()
        async with client.http.ws_connect("/socket") as socket:
            await asyncio.sleep(0.3)
            assert server.ended == []
            await socket.send_str("bye")
            await socket.receive()
        await until(lambda: server.ended)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.http.ws_connect("/socket")
        assert refused.value.status == 410


async def test_all_sessions_end_when_the_server_stops() -> None:
    server = make(Ledger, {})
    async with running(server, 5) as several:
        begun = {await client.seed() for client in several}
    assert sorted(server.ended) == sorted((session_id, "stopping") for session_id in begun)


async def test_hooks_that_take_too_long_at_the_stop_are_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    server = make(Ledger, {}, shutdown_grace_s=0)
    async with running(server, 2) as several:
        for client in several:
            await client.seed()
        server.gate("hook")
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 5
    assert len(server.ended) == 2
    assert "2 sessions did not end within 1 s" in caplog.text


async def test_a_failing_hook_is_logged_and_the_session_is_over(caplog: pytest.LogCaptureFixture) -> None:
    server = make(Ledger, {})
    server.hook_error = RuntimeError("no broom")
    async with running(server) as (client,):
        session_id = await client.seed()
        assert await client.post("/close_session") == (200, {"closed": True})
    assert server.ended == [(session_id, "closed")]
    assert f"on_session_end failed for session {session_id} (closed)" in caplog.text
    assert "no broom" in caplog.text


async def test_a_seed_that_fails_begins_nothing_and_what_it_left_is_released() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        assert (await client.post("/seed_session", {"fails": True}))[0] == 503
        await until(lambda: server.ended)
        assert [reason for _, reason in server.ended] == ["seed_failed"]
        assert server.numbers == {}
        assert lost_reason(await client.post("/add")) == ENDED


async def test_of_two_seeds_at_once_the_one_that_succeeds_begins_the_session() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        await client.post("/close_session")
        seeding = asyncio.create_task(client.seed(slow=True))
        await server.gate("seed").reached.wait()
        assert (await client.post("/seed_session", {"fails": True}))[0] == 503
        server.gate("seed").open.set()
        await seeding
        assert (await client.post("/add"))[0] == 200
    assert [reason for _, reason in server.ended] == ["closed", "stopping"]


async def test_a_second_seed_that_fails_leaves_the_session_as_it_is() -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        assert (await client.post("/seed_session", {"fails": True}))[0] == 503
        assert (await client.post("/add"))[0] == 200
        assert server.ended == []


async def test_requests_outside_of_sessions_are_answered_and_kept_nowhere() -> None:
    server = make(Ledger, {})
    app = server.setup_webserver()
    async with serving(app) as url, clients(url, 20, keeps_cookies=False) as strangers:
        for client in strangers:
            assert (await client.post("/add"))[0] == 200
            assert (await client.post("/verify", VERIFY))[0] == 200
        assert app.state.session_lives.statistics().live == 0
    assert server.ended == []


@pytest.mark.parametrize("path", ["/health", "/openapi.json"])
async def test_an_ended_session_may_still_ask_for_what_is_the_same_in_all(path: str) -> None:
    server = make(Ledger, {})
    async with running(server) as (client,):
        await client.seed()
        await client.post("/close_session")
        async with client.http.get(path) as reply:
            assert reply.status == 200


async def test_nothing_grows_with_the_sessions_served() -> None:
    server = make(Ledger, {"after_verify": True, "idle_timeout_s": 100})
    app = server.setup_webserver()
    async with serving(app) as url, clients(url, 5) as several:
        for _ in range(5):
            for client in several:
                await client.seed()
                await client.post("/verify", VERIFY)
        lives = app.state.session_lives
        await until(lambda: lives.statistics().ending == 0)
        statistics = lives.statistics()
        assert (statistics.live, statistics.in_flight, statistics.ended) == (0, 0, 25)
        assert (len(lives._lives), len(lives._idle)) == (0, 0)


async def test_an_agents_session_begins_with_its_first_request() -> None:
    server = make(Agent, {"idle_timeout_s": 0.2})
    async with running(server, 2) as (client, other):
        for turn in (1, 2):
            assert (await client.post("/v1/responses", {"input": "go"}))[1]["id"] == f"resp_{turn}"
        assert (await other.post("/run", {"responses_create_params": {"input": "go"}}))[1]["reward"] == 1
        assert (await other.post("/v1/responses", {"input": "go"}))[1]["id"] == "resp_2"
        await until(lambda: len(server.ended) == 2)
        assert lost_reason(await client.post("/v1/responses", {"input": "go"})) == ENDED
    assert {reason for _, reason in server.ended} == {"idle"}


async def test_an_agent_may_call_itself_within_a_session_that_begins() -> None:
    server = make(Agent, {})
    async with running(server) as (client,):
        for turn in (1, 2):
            assert (await client.post("/relay"))[1]["id"] == f"resp_{turn}"
        assert (await client.post("/v1/responses", {"input": "go"}))[1]["id"] == "resp_3"
    assert [reason for _, reason in server.ended] == ["stopping"]


async def test_an_agents_session_may_end_with_its_run() -> None:
    server = make(Agent, {"after_run": True})
    async with running(server) as (client,):
        assert (await client.post("/run", {"responses_create_params": {"input": "go"}}))[0] == 200
        await until(lambda: server.ended)
        assert [reason for _, reason in server.ended] == ["verified"]
        assert lost_reason(await client.post("/v1/responses", {"input": "go"})) == ENDED


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Ledger, {"after_run": True}), (Agent, {"after_verify": True}), (Ledger, {"idle_timeout_s": 0}), (Ledger, True)],
)
def test_wrong_settings_are_refused(kind: Any, settings: Any) -> None:
    with pytest.raises(ValidationError, match="session_end"):
        make(kind, settings)


def test_a_route_that_session_end_would_hide_is_refused() -> None:
    for session_end in (None, {}):
        app = make(Ledger, session_end).setup_webserver()
        app.add_api_route("/close_session", lambda: {"mine": True}, methods=["POST"])
        if session_end is None:
            check_close_route(app, "it")
        else:
            with pytest.raises(ConfigError, match=r"it\.session_end: the server has a route /close_session of its own"):
                check_close_route(app, "it")


async def test_ordinary_ends_are_no_trouble_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = make(Ledger, {"after_verify": True})
    async with running(server) as (client,):
        await client.seed()
        await client.post("/verify", VERIFY)
        await client.post("/close_session")
    assert caplog.text == ""
