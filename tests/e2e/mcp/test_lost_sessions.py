"""What the callers of the official MCP clients see when the worker that held their session is gone.

docs/tools-over-mcp.md tells it to users. One session is shared by all clients of a test, so that one worker's death
is seen by all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.mcp.callers import KINDS, LEGACY, Caller, Kind, Outcome, call
from tests.e2e.mcp.clients import calling
from tests.e2e.mcp.episodes import Episode, episode
from tests.e2e.mcp.python_caller import PythonCaller
from tests.e2e.session_routing.processes import Servers, client_connections, until

AT_ONCE = 10.0
"""Seconds; time for a loaded machine, and less than a client's own limit."""
GONE = "The worker that held this session is no longer running; its state is lost. Start a new session."
MAY_HAVE_RUN = " This request may have run before the worker was lost."
FIELDS = {"reason": "worker_gone", "new_session_may_be_seeded": True, "may_have_run": False}

TOLD = ("python-legacy", "python-auto", "typescript-1", "typescript-2-legacy", "typescript-2-auto")
# What each client makes of a plain refusal: the Python one keeps status and text to itself.
REFUSED = {
    "python": ("MCPError", "Server returned an error response"),
    "sdk1.mjs": ("StreamableHTTPError", GONE),
    "sdk2.mjs": ("SdkHttpError", GONE),
}
TOLD_AS = {"python": "MCPError", "sdk1.mjs": "McpError", "sdk2.mjs": "ProtocolError"}


@asynccontextmanager
async def clients_of(session: Episode, scripts: Path) -> AsyncIterator[dict[str, Caller]]:
    """Connect one client of each kind to the same session."""
    async with AsyncExitStack() as stack:
        callers = {}
        for name in TOLD:
            callers[name] = await stack.enter_async_context(calling(KINDS[name], session.target, scripts))
            assert (await callers[name].connect()).error is None
            assert (await call(callers[name], "add", amount=1)).text
            await until_idle(callers[name], KINDS[name])
        yield callers


async def until_idle(caller: Caller, kind: Kind) -> None:
    """Wait until a client is done: a legacy one also asks, unbidden and when it likes, for a stream it does not get."""

    async def is_idle() -> bool:
        exchanges = await caller.exchanges()
        has_asked = kind.version != LEGACY or any(it.method == "GET" for it in exchanges)
        return has_asked and all(it.status is not None for it in exchanges)

    async with asyncio.timeout(AT_ONCE):
        while not await is_idle():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)


async def orders_after_loss(caller: Caller, kind: Kind) -> list[Outcome]:
    """Try all that a caller could. Each order is one HTTP request, at once answered: no hanging and no looping."""
    before = len(await caller.exchanges())
    outcomes = [await call(caller, "add", amount=1), await call(caller, "add", amount=1), await caller.do("list")]
    if kind.version == LEGACY:
        outcomes.append(await caller.do("ping"))
    exchanges = (await caller.exchanges())[before:]
    assert [it.method for it in exchanges] == ["POST"] * len(outcomes)
    assert max(outcome.seconds for outcome in outcomes) < AT_ONCE
    return outcomes


async def connected_late(session: Episode, kind: Kind, scripts: Path) -> Outcome:
    """Connect once more, with the token of the lost session."""
    async with calling(kind, session.target, scripts) as late:
        connected = await late.connect()
        # A modern client asks in the new way first, then in the old.
        assert len(await late.exchanges()) <= 2
    assert connected.seconds < AT_ONCE
    return connected


def assert_refused(outcome: Outcome, kind: Kind) -> None:
    error, text = REFUSED[kind.sdk]
    assert outcome.error == error, outcome
    assert text in outcome.message


def assert_told(outcome: Outcome, kind: Kind) -> None:
    assert outcome.error == TOLD_AS[kind.sdk], outcome
    may_have_run = outcome.data["may_have_run"]
    assert outcome.message.removeprefix("MCP error -32010: ") == GONE + MAY_HAVE_RUN * may_have_run
    assert outcome.data == {**FIELDS, "may_have_run": may_have_run}


@pytest.mark.promise("gone-is-410")
async def test_by_default_each_clients_caller_gets_an_error_at_once(servers: Servers, typescript: Path) -> None:
    async with episode(servers) as session, clients_of(session, typescript) as callers:
        await session.lose_owner()
        for name, caller in callers.items():
            kind = KINDS[name]
            for outcome in await orders_after_loss(caller, kind):
                assert_refused(outcome, kind)
            assert {it.status for it in (await caller.exchanges())[-3:]} == {410}
            late = await connected_late(session, kind, typescript)
            assert late.error is not None, name


@pytest.mark.promise("jsonrpc-errors")
async def test_as_a_json_rpc_error_the_text_reaches_every_clients_caller(servers: Servers, typescript: Path) -> None:
    async with episode(servers, "jsonrpc_probe") as session, clients_of(session, typescript) as callers:
        await session.lose_owner()
        for name, caller in callers.items():
            kind = KINDS[name]
            outcomes = await orders_after_loss(caller, kind)
            for outcome in outcomes:
                assert_told(outcome, kind)
            assert outcomes[-1].data == FIELDS
            assert_told(await connected_late(session, kind, typescript), kind)


@pytest.mark.promise("died-after-taking")
async def test_of_a_call_in_flight_the_caller_learns_that_it_may_have_run(servers: Servers, typescript: Path) -> None:
    async with (
        episode(servers, "jsonrpc_probe") as session,
        clients_of(session, typescript) as callers,
        AsyncExitStack() as stack,
    ):
        owner = session.owning_process
        (other,) = set(servers.workers("jsonrpc_probe").values()) - {owner}
        with frozen(owner):
            calls = await stack.enter_async_context(long_calls(callers))
            await until(lambda: client_connections(other) == len(calls))
        await until_all_began(session)
        await session.lose_owner()
        for name, in_flight in calls.items():
            async with asyncio.timeout(AT_ONCE):
                outcome = await in_flight
            assert_told(outcome, KINDS[name])
            assert outcome.data["may_have_run"]
            assert_told(await call(callers[name], "add", amount=1), KINDS[name])


async def test_a_connection_to_the_dead_worker_itself_breaks_whatever_the_setting(
    servers: Servers, typescript: Path
) -> None:
    async with (
        episode(servers, "jsonrpc_probe") as session,
        clients_of(session, typescript) as callers,
        AsyncExitStack() as stack,
    ):
        (other,) = set(servers.workers("jsonrpc_probe").values()) - {session.owning_process}
        with frozen(other):
            calls = await stack.enter_async_context(long_calls(callers))
            await until_all_began(session)
        await session.lose_owner()
        for name, in_flight in calls.items():
            caller = callers[name]
            async with asyncio.timeout(AT_ONCE):
                outcome = await in_flight
            if isinstance(caller, PythonCaller):
                # It does not survive that: its caller is cancelled, and the block ends with a group.
                assert outcome.error == "CancelledError"
                assert type(await caller.end()).__name__ in {"ReadError", "RemoteProtocolError"}
            else:
                assert (outcome.error, outcome.message) == ("TypeError", "fetch failed")
                assert_told(await call(caller, "add", amount=1), KINDS[name])


@asynccontextmanager
async def long_calls(callers: dict[str, Caller]) -> AsyncIterator[dict[str, asyncio.Task[Outcome]]]:
    """Have every client call a tool that outlasts the test; a call still in flight at the end is given up."""
    calls = {name: asyncio.create_task(call(it, "wait", label=name, seconds=600)) for name, it in callers.items()}
    try:
        yield calls
    finally:
        for in_flight in calls.values():
            in_flight.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)


async def until_all_began(session: Episode) -> None:
    for name in TOLD:
        await session.until_written(f"{name} began")


@contextmanager
def frozen(worker: psutil.Process) -> Iterator[None]:
    """Stop a worker for a moment, so that the other one accepts the connections."""
    worker.suspend()
    try:
        yield
    finally:
        worker.resume()
