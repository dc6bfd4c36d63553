"""Tool calls over MCP are requests of their session: they keep it from ending, and are refused when it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.ending_server import VERIFY, Client, Ledger, clients, make, until
from tests.support import serving


@asynccontextmanager
async def exposed(session_end: dict[str, Any]) -> AsyncIterator[tuple[Any, Client, dict[str, str]]]:
    """Serve a ledger over MCP; yields a client that has seeded a session, and the headers of its token."""
    server = make(Ledger, session_end, expose_tools_over_mcp=True)
    app = server.setup_webserver()
    server.expose(app)
    async with asyncio.timeout(20), serving(app) as url, clients(url) as (client,):
        status, seeded = await client.post("/seed_session")
        assert status == 200
        yield server, client, seeded["mcp"]["headers"]


async def call(client: Client, tool: str, token: dict[str, str]) -> tuple[int, str]:
    headers = {**token, "accept": "application/json, text/event-stream"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": {}}}
    status, reply = await client.post("/mcp", message, headers=headers)
    assert status == 200, reply
    result = reply["result"]
    return result["_meta"]["nemo-gym/http-status"], result["content"][0]["text"]


async def test_a_tool_call_of_an_ended_session_is_a_tool_error_that_says_so() -> None:
    async with exposed({"after_verify": True}) as (server, client, token):
        assert (await call(client, "add", token))[0] == 200
        assert (await client.post("/verify", VERIFY))[1]["reward"] == 1
        status, text = await call(client, "add", token)
        assert status == 410
        assert "session_ended" in text
        assert [reason for _, reason in server.ended] == ["verified"]


async def test_a_session_with_a_tool_call_in_flight_is_not_idle_and_its_end_waits_for_it() -> None:
    async with exposed({"idle_timeout_s": 0.1}) as (server, client, token):
        slow = asyncio.create_task(call(client, "slow", token))
        await server.gate("slow").reached.wait()
        await asyncio.sleep(0.3)
        assert server.ended == []
        closing = asyncio.create_task(client.post("/close_session"))
        await asyncio.sleep(0.05)
        assert not closing.done()
        server.gate("slow").open.set()
        assert (await slow)[0] == 200
        assert await closing == (200, {"closed": True})
    assert server.log == ["slow is over", "ended: closed"]


async def test_calls_over_mcp_are_uses_of_the_session() -> None:
    async with exposed({"idle_timeout_s": 0.3}) as (server, client, token):
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 0.9:
            assert (await call(client, "add", token))[0] == 200
            await asyncio.sleep(0.02)
        assert server.ended == []
        await until(lambda: server.ended)
