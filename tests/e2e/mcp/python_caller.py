"""The official Python client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from tests.e2e.mcp.callers import LIMIT, SESSION_ID_HEADER, Exchange, Kind, Outcome, within_limit
from tests.e2e.mcp.episodes import Target


class PythonCaller:
    """The Python client as its users have it: within `async with`, the calls in tasks of that block."""

    def __init__(self, kind: Kind, target: Target) -> None:
        self._exchanges: list[Exchange] = []
        self.ended_with: Exception | None = None
        self._kind = kind
        self._target = target
        self._orders: asyncio.Queue[tuple[str, dict[str, Any], asyncio.Future[Outcome]] | None] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None
        self._call = anyio.CancelScope()
        self._session_id: str | None = None

    async def connect(self) -> Outcome:
        connected: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(connected))
        return await within_limit(connected)

    async def do(self, order: str, **details: Any) -> Outcome:
        assert self._life is not None
        assert not self._life.done(), self.ended_with
        reply: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((order, details, reply))
        return await within_limit(reply)

    async def abort(self) -> None:
        self._call.cancel()

    async def terminate(self) -> None:
        await self.close()

    async def end(self) -> BaseException:
        """Wait until the block ends by itself, and return the one error that it ends with."""
        assert self._life is not None
        await within_limit(self._life)
        assert self.ended_with is not None
        return cause_of(self.ended_with)

    async def exchanges(self) -> list[Exchange]:
        return self._exchanges

    async def close(self) -> None:
        if self._life is not None:
            self._orders.put_nowait(None)
            await within_limit(self._life)

    async def _live(self, connected: asyncio.Future[Outcome]) -> None:
        began = time.monotonic()
        try:
            async with self._connected_client() as client, anyio.create_task_group() as orders:
                connected.set_result(Outcome({"sessionId": self._session_id, "version": client.protocol_version}))
                while (order := await self._orders.get()) is not None:
                    orders.start_soon(self._carry_out, client, *order)
                orders.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - whatever a user of the client would see
            self.ended_with = error
            if not connected.done():
                connected.set_result(outcome_of_error(cause_of(error), began))

    @asynccontextmanager
    async def _connected_client(self) -> AsyncIterator[Client]:
        hooks: dict[str, list[Callable[..., Any]]] = {
            "request": [self._note_request],
            "response": [self._note_response],
        }
        # Each request over a connection of its own, which any worker may accept.
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            headers=self._target.headers, event_hooks=hooks, limits=limits, timeout=LIMIT
        ) as http:
            async with Client(
                streamable_http_client(self._target.url, http_client=http), mode=self._kind.mode
            ) as client:
                yield client

    async def _note_request(self, request: httpx2.Request) -> None:
        exchange = Exchange(request.method, request.headers.get(SESSION_ID_HEADER))
        self._exchanges.append(exchange)
        request.extensions["exchange"] = exchange

    async def _note_response(self, response: httpx2.Response) -> None:
        response.request.extensions["exchange"].status = response.status_code
        if not self._kind.keeps_session_id:
            response.headers.pop(SESSION_ID_HEADER, None)
        self._session_id = response.headers.get(SESSION_ID_HEADER, self._session_id)

    async def _carry_out(
        self, client: Client, order: str, details: dict[str, Any], reply: asyncio.Future[Outcome]
    ) -> None:
        began = time.monotonic()
        outcome = Outcome(error="Aborted")
        try:
            with anyio.CancelScope() as scope:
                if order == "call":
                    self._call = scope
                result = await perform(client, order, **details)
                outcome = Outcome(result, seconds=time.monotonic() - began)
        except MCPError as error:
            outcome = outcome_of_error(error, began)
        except asyncio.CancelledError as error:
            outcome = outcome_of_error(error, began)
            raise
        finally:
            if not reply.done():
                reply.set_result(outcome)


async def perform(client: Client, order: str, **details: Any) -> Any:
    if order == "list":
        tools = await client.list_tools(cache_mode="bypass")
        return tools.model_dump(mode="json", by_alias=True)
    if order == "ping":
        pong = await client.session.send_ping()
        return pong.model_dump(mode="json", by_alias=True)
    assert order == "call"
    seconds = details["timeout"] / 1000 if "timeout" in details else None
    result = await client.call_tool(details["name"], details["given"], read_timeout_seconds=seconds)
    return result.model_dump(mode="json", by_alias=True)


def outcome_of_error(error: BaseException, began: float) -> Outcome:
    data = error.error.data if isinstance(error, MCPError) else None
    return Outcome(None, type(error).__name__, str(error), data, time.monotonic() - began)


def cause_of(error: BaseException) -> BaseException:
    """Return the one error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error
