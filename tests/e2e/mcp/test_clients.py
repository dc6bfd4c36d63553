"""The official MCP clients on a server with four workers, each request over a connection of its own."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.e2e.mcp.callers import KINDS, LEGACY, Caller, Kind, call
from tests.e2e.mcp.clients import calling
from tests.e2e.mcp.episodes import Target, episode, forwarded_requests
from tests.e2e.session_routing.processes import Servers

EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# In the older versions a cancellation names a call of an MCP session; without one it names none.
CANCELLING = {name: kind for name, kind in KINDS.items() if kind.is_stateful or kind.version != LEGACY}
STATEFUL = {name: kind for name, kind in KINDS.items() if kind.is_stateful}


async def number_after(caller: Caller, amount: int) -> int:
    outcome = await call(caller, "add", amount=amount)
    number: int = json.loads(outcome.text)["number"]
    return number


@EACH
async def test_a_client_lists_and_calls_the_tools_of_its_session(
    servers: Servers, kind: Kind, scripts: Path | None
) -> None:
    async with episode(servers) as session, calling(kind, session.target, scripts) as caller:
        connected = (await caller.connect()).result
        assert connected["version"] == kind.version
        assert bool(connected["sessionId"]) == kind.is_stateful
        tools = {tool["name"]: tool for tool in (await caller.do("list")).result["tools"]}
        assert tools.keys() == {"add", "wait"}
        assert tools["add"]["description"] == "Add to the session's number, and tell it and the process."
        assert tools["add"]["inputSchema"]["properties"]["amount"]["type"] == "integer"
        assert [await number_after(caller, amount) for amount in (1, 2)] == [1, 3]
        assert "amount" in (await call(caller, "add", amount="many")).tool_error
        assert "no tool" in (await call(caller, "seed_session")).tool_error
        if kind.version == LEGACY:
            assert (await caller.do("ping")).error is None
        # The same session, over plain HTTP.
        assert (await session.post("/add", amount=4)).json()["number"] == 7
        exchanges = await caller.exchanges()
    if kind.sdk == "python" and kind.is_stateful:
        assert (exchanges[-1].method, exchanges[-1].status) == ("DELETE", 204)
    sent = {it.session_id for it in exchanges[1:]}
    assert sent == ({connected["sessionId"]} if kind.is_stateful else {None})
    assert {it.status for it in exchanges if it.method == "POST"} <= {200, 202}
    assert {it.status for it in exchanges if it.method == "GET"} <= {405, None}


@pytest.mark.promise("mcp-token", "reaches-its-owner")
@EACH
async def test_a_clients_requests_may_arrive_at_any_worker(servers: Servers, kind: Kind, scripts: Path | None) -> None:
    async with episode(servers) as session, calling(kind, session.target, scripts) as caller:
        owner = session.owning_process.pid
        before = await forwarded_requests(servers, "probe")
        assert (await caller.connect()).error is None
        calls = 0
        async with asyncio.timeout(20):
            while True:
                outcomes = await asyncio.gather(*(call(caller, "add", amount=1) for _ in range(8)))
                results = [json.loads(outcome.text) for outcome in outcomes]
                assert {it["number"] for it in results} == set(range(calls + 1, calls + 9))
                assert {it["pid"] for it in results} == {owner}
                calls += 8
                after = await forwarded_requests(servers, "probe")
                others = [pid for pid in before.keys() - {owner} if after[pid] > before[pid]]
                if len(others) > 1:
                    break


@pytest.mark.parametrize("kind", CANCELLING.values(), ids=CANCELLING)
async def test_a_call_that_is_given_up_ends_its_handler(servers: Servers, kind: Kind, scripts: Path | None) -> None:
    async with episode(servers) as session, calling(kind, session.target, scripts) as caller:
        assert (await caller.connect()).error is None
        waiting = asyncio.create_task(call(caller, "wait", label="long", seconds=600))
        await session.until_written("long began")
        other = asyncio.create_task(call(caller, "wait", label="short", seconds=600))
        await session.until_written("short began")
        await caller.abort()
        assert (await other).error is not None
        await session.until_written("short was cancelled")
        timed_out = await caller.do("call", name="wait", given={"label": "timed", "seconds": 600}, timeout=300)
        assert re.search("timed out", timed_out.message, re.IGNORECASE)
        await session.until_written("timed was cancelled")
        assert not waiting.done()
        assert await number_after(caller, 1) == 1
        assert "long was cancelled" not in await session.diary()
        waiting.cancel()
        await asyncio.wait({waiting})


@pytest.mark.parametrize("kind", STATEFUL.values(), ids=STATEFUL)
async def test_ending_the_mcp_session_ends_its_calls_and_no_others(
    servers: Servers, kind: Kind, scripts: Path | None
) -> None:
    async with episode(servers) as session:
        async with calling(KINDS["python-legacy"], session.target) as bystander:
            assert (await bystander.connect()).error is None
            waiting = asyncio.create_task(call(bystander, "wait", label="bystander", seconds=600))
            await session.until_written("bystander began")
            async with calling(kind, session.target, scripts) as caller:
                assert (await caller.connect()).error is None
                ended = asyncio.create_task(call(caller, "wait", label="mine", seconds=600))
                await session.until_written("mine began")
                await caller.terminate()
                await session.until_written("mine was cancelled")
                exchanges = await caller.exchanges()
                outcome = await ended
            assert exchanges[-1].method == "DELETE"
            # The Python client does not wait for the reply when that of the call meets it on the way out.
            assert exchanges[-1].status in ({204, None} if kind.sdk == "python" else {204})
            assert outcome.error or "cancelled by the client" in outcome.tool_error
            # Gym's session is not the MCP session's to end.
            assert await number_after(bystander, 1) == 1
            assert not waiting.done()
        await waiting


@EACH
async def test_without_a_token_tools_are_listed_and_calls_refused(
    servers: Servers, kind: Kind, scripts: Path | None
) -> None:
    async with episode(servers) as session:
        target = Target(session.target.url, {})
        async with calling(kind, target, scripts) as caller:
            assert (await caller.connect()).error is None
            listed = await asyncio.gather(*(caller.do("list") for _ in range(8)))
            assert [len(outcome.result["tools"]) for outcome in listed] == [2] * 8
            refused = await asyncio.gather(*(call(caller, "add", amount=1) for _ in range(8)))
            assert {"X-NeMo-Gym-Session-Token" in outcome.tool_error for outcome in refused} == {True}
        assert (await session.post("/add", amount=0)).json()["number"] == 0


async def test_many_clients_at_once_keep_their_sessions_apart(servers: Servers, typescript: Path) -> None:
    kinds = [kind for kind in KINDS.values() if kind.sdk == "python"] * 5 + [KINDS["typescript-1"]] * 2

    async def play(number: int, kind: Kind) -> str | None:
        async with episode(servers) as session, calling(kind, session.target, typescript) as caller:
            assert (await caller.connect()).error is None
            await caller.do("list")
            numbers = [await number_after(caller, amount) for amount in (number, 1, 1)]
            assert numbers == [number, number + 1, number + 2]
            return session.owner

    owners = await asyncio.gather(*(play(100 * number, kind) for number, kind in enumerate(kinds)))
    assert len(set(owners)) > 1


async def test_the_seed_reply_fills_in_the_configuration_of_a_command_line_agent(
    servers: Servers, typescript: Path
) -> None:
    async with episode(servers) as session:
        access = session.access
        assert access.keys() == {"server_name", "url_path", "transport", "headers"}
        assert access["transport"] == "streamable_http"
        assert re.fullmatch(r"[A-Za-z0-9_-]+", access["server_name"])
        (header,) = access["headers"].items()
        # Safe in JSON, TOML, a shell's quotes and an environment variable.
        assert re.fullmatch(r"[A-Za-z0-9_.=: -]+", ": ".join(header))
        # What such agents keep in a file of servers: a name, its kind, an address and headers.
        file = {
            "mcpServers": {
                access["server_name"]: {
                    "type": "http",
                    "url": servers.url("probe") + access["url_path"],
                    "headers": access["headers"],
                }
            }
        }
        entry = json.loads(json.dumps(file))["mcpServers"]["probe"]
        async with calling(KINDS["typescript-1"], Target(entry["url"], entry["headers"]), typescript) as caller:
            assert (await caller.connect()).error is None
            assert await number_after(caller, 3) == 3
