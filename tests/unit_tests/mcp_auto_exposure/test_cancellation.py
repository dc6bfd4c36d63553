"""Calls that are cancelled: by a notification, by DELETE, by a client that leaves, by the server's end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Annotated, Any

import anyio
import httpx2
import pytest
from fastapi import BackgroundTasks, Body, FastAPI

from tests.mcp_support import (
    CLIENT_MODES,
    ERAS,
    LEGACY_VERSIONS,
    Rpc,
    Running,
    in_process,
    make_app,
    make_server,
    new_http,
    running,
)

LEGACY = LEGACY_VERSIONS[-1]
LIMIT = 10


class Waiting:
    """Tools that wait until they are released or cancelled, and what became of them."""

    def __init__(self) -> None:
        self.started: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.release = asyncio.Event()
        self.cancelled: list[str] = []
        self.cleaned_up: list[str] = []

    def add(self, app: FastAPI) -> None:
        @app.post("/wait")
        async def wait(name: Annotated[str, Body(embed=True)]) -> str:
            try:
                await self._wait(name)
            finally:
                self.ended[name].set()
            return name

        @app.post("/clean_up")
        async def clean_up(name: Annotated[str, Body(embed=True)]) -> str:
            try:
                await self._wait(name)
            finally:
                for _ in range(20):
                    await asyncio.sleep(0.001)
                self.cleaned_up.append(name)
                self.ended[name].set()
            return name

        @app.post("/later")
        async def later(name: Annotated[str, Body(embed=True)], tasks: BackgroundTasks) -> str:
            tasks.add_task(self._wait, name)
            return name

    async def _wait(self, name: str) -> None:
        self.started[name].set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def app(waiting: Waiting) -> FastAPI:
    return make_app(make_server(waiting.add))


@pytest.mark.parametrize("keep_alive_s", [15, 0.05])
@pytest.mark.parametrize("setting", ["http", "jsonrpc"])
@pytest.mark.parametrize("version", ERAS)
async def test_a_server_that_stops_says_so_to_calls_in_flight(
    version: str, setting: str, keep_alive_s: float, waiting: Waiting
) -> None:
    app = make_app(make_server(waiting.add, mcp_lost_session=setting), keep_alive_s=keep_alive_s)
    async with new_http() as http:
        async with running(app, timeout_graceful_shutdown=1) as served:
            rpc = await served.rpc(version)
            rpc.http = http
            call = begin(rpc, waiting, "a")
            await soon(waiting.started["a"])
        reply = await call
    assert waiting.cancelled == ["a"]
    if setting == "http" and keep_alive_s > 1:
        assert (reply.status_code, reply.json()) == (503, {"detail": "toolbox is stopping; this request may have run"})
    else:
        error = reply.json()["error"]
        assert (reply.status_code, reply.json()["id"]) == (200, 5)
        assert (error["code"], error["data"]) == (-32011, {"status": 503})
        assert "toolbox is stopping" in error["message"]


def begin(rpc: Rpc, waiting: Waiting, name: str, request_id: Any = 5, tool: str = "wait") -> asyncio.Task[Any]:
    """Begin a call in a task of its own."""
    params = {"name": tool, "arguments": {"name": name}}
    return asyncio.create_task(rpc.send("tools/call", params, id=request_id))


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(LIMIT):
        await event.wait()


async def cancelled(rpc: Rpc, request_id: Any = 5, **fields: Any) -> None:
    """Send the notification that cancels a call."""
    reply = await rpc.send("notifications/cancelled", {"requestId": request_id, **fields})
    assert reply.status_code == 202


async def connected(app: Running, token: str) -> Rpc:
    rpc = await app.rpc(LEGACY, token=token)
    await rpc.initialize()
    return rpc


async def none_left(before: set[asyncio.Task[Any]]) -> None:
    async with asyncio.timeout(LIMIT):
        while left := {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.01)


@pytest.mark.parametrize("request_id", [5, "five", 0, -1])
async def test_a_notification_cancels_the_call_of_its_own_client_only(
    request_id: Any, app: FastAPI, waiting: Waiting
) -> None:
    async with in_process(app) as served:
        token = await served.token()
        mine, other = await connected(served, token), await connected(served, token)
        calls = [begin(mine, waiting, "mine", request_id), begin(other, waiting, "other", request_id)]
        calls.append(begin(mine, waiting, "another", 6))
        for name in ("mine", "other", "another"):
            await soon(waiting.started[name])

        await cancelled(mine, request_id, reason="changed my mind")

        async with asyncio.timeout(LIMIT):
            result = (await calls[0]).json()["result"]
        assert result["isError"]
        assert result["content"][0]["text"] == "The call was cancelled by the client."
        assert result["_meta"]["nemo-gym/http-status"] == 499
        assert waiting.cancelled == ["mine"]
        waiting.release.set()
        texts = [(await call).json()["result"]["content"][0]["text"] for call in calls[1:]]
        assert texts == ['"other"', '"another"']


async def test_nobody_else_can_cancel_a_call(app: FastAPI, waiting: Waiting) -> None:
    async with in_process(app) as served:
        mine = await connected(served, await served.token())
        call = begin(mine, waiting, "mine")
        await soon(waiting.started["mine"])
        stranger = await served.rpc(LEGACY, session_id=mine.session_id)
        nameless = await served.rpc(LEGACY, token=None, session_id=mine.session_id)
        sessionless = await served.rpc(LEGACY, token=mine.token)
        doubled = [("x-nemo-gym-session-token", str(mine.token))]
        for rpc in (stranger, nameless, sessionless):
            await cancelled(rpc)
            assert (await rpc.http.delete(rpc.url, headers=rpc.headers())).status_code == 204
        await mine.send("notifications/cancelled", {"requestId": 5}, headers=doubled)
        for request_id in (6, "5", None, [5], {"a": 5}):
            await mine.send("notifications/cancelled", {"requestId": request_id})
        await mine.send("notifications/cancelled")
        await mine.send("notifications/other", {"requestId": 5, "text": "notifications/cancelled"})
        assert waiting.cancelled == []
        waiting.release.set()
        assert (await call).json()["result"]["content"][0]["text"] == '"mine"'


async def test_calls_without_an_mcp_session_are_not_mixed_up(app: FastAPI, waiting: Waiting) -> None:
    async with in_process(app) as served:
        rpc = await served.rpc(LEGACY)
        call = begin(rpc, waiting, "mine")
        await soon(waiting.started["mine"])
        await cancelled(rpc)
        waiting.release.set()
        assert (await call).json()["result"]["content"][0]["text"] == '"mine"'


async def test_a_call_that_is_over_can_not_be_cancelled_and_its_id_may_come_again(
    app: FastAPI, waiting: Waiting
) -> None:
    async with in_process(app) as served:
        rpc = await connected(served, await served.token())
        waiting.release.set()
        for _ in range(3):
            reply = await begin(rpc, waiting, "mine")
            await cancelled(rpc)
            assert reply.json()["result"]["content"][0]["text"] == '"mine"'


async def test_delete_cancels_the_calls_of_its_mcp_session_and_only_those(app: FastAPI, waiting: Waiting) -> None:
    async with in_process(app) as served:
        token = await served.token()
        mine, other = await connected(served, token), await connected(served, token)
        calls = [begin(mine, waiting, "a", 1), begin(mine, waiting, "b", 2), begin(other, waiting, "c", 1)]
        for name in "abc":
            await soon(waiting.started[name])

        reply = await mine.http.delete(mine.url, headers=mine.headers())

        assert reply.status_code == 204
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*calls[:2])
        assert sorted(waiting.cancelled) == ["a", "b"]
        waiting.release.set()
        assert (await calls[2]).json()["result"]["content"][0]["text"] == '"c"'
        # Nothing remembers the session, so nothing has forgotten it either.
        assert not (await mine.call("wait", {"name": "again"})).is_error


@pytest.mark.parametrize("version", ERAS)
async def test_a_client_that_leaves_cancels_its_call_and_leaves_nothing(
    version: str, app: FastAPI, waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(app) as served:
        rpc = await served.rpc(version)
        before = asyncio.all_tasks()
        calls = [begin(rpc, waiting, f"{number}", number) for number in range(20)]
        for number in range(20):
            await soon(waiting.started[f"{number}"])
        for call in calls[1:]:
            call.cancel()
        for number in range(1, 20):
            await soon(waiting.ended[f"{number}"])
        assert "0" not in waiting.cancelled
        waiting.release.set()
        assert (await calls[0]).json()["result"]["content"][0]["text"] == '"0"'
        await none_left(before)
    assert len(waiting.cancelled) == 19
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("version", ERAS)
async def test_a_cancelled_handler_cleans_up_undisturbed_before_the_request_ends(
    version: str, app: FastAPI, waiting: Waiting
) -> None:
    over, ended_with = asyncio.Event(), []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if scope["type"] == "http" and scope["path"] == "/mcp":
                ended_with.extend(waiting.cleaned_up)
                over.set()

    async with running(noting) as served:
        rpc = await served.rpc(version)
        call = begin(rpc, waiting, "mine", tool="clean_up")
        await soon(waiting.started["mine"])
        call.cancel()
        await soon(over)
    assert waiting.cancelled == ["mine"]
    assert waiting.cleaned_up == ["mine"]
    assert ended_with == ["mine"]


async def test_a_cancelling_notification_waits_for_the_handlers_clean_up(app: FastAPI, waiting: Waiting) -> None:
    async with in_process(app) as served:
        rpc = await connected(served, await served.token())
        call = begin(rpc, waiting, "mine", tool="clean_up")
        await soon(waiting.started["mine"])
        for _ in range(3):
            await cancelled(rpc)
        async with asyncio.timeout(LIMIT):
            assert (await call).json()["result"]["isError"]
        assert (waiting.cancelled, waiting.cleaned_up) == (["mine"], ["mine"])


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_a_call_that_the_official_client_gives_up_is_cancelled(mode: str, app: FastAPI, waiting: Waiting) -> None:
    async with running(app) as served:
        before = asyncio.all_tasks()
        async with served.client(mode) as client:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(client.call_tool, "wait", {"name": "mine"})
                    await soon(waiting.started["mine"])
                    scope.cancel()
            await soon(waiting.ended["mine"])
            assert waiting.cancelled == ["mine"]
            waiting.release.set()
            result = await client.call_tool("wait", {"name": "next"})
            assert result.content[0].text == '"next"'
        await none_left(before)


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("tool", ["wait", "clean_up", "later"])
async def test_when_the_server_stops_at_the_end_of_its_grace_nothing_goes_on(
    tool: str, version: str, app: FastAPI, waiting: Waiting
) -> None:
    before = asyncio.all_tasks()
    async with running(app, timeout_graceful_shutdown=0) as served:
        rpc = await served.rpc(version)
        call = begin(rpc, waiting, "mine", tool=tool)
        await soon(waiting.started["mine"])
        if tool == "later":
            assert (await call).json()["result"]["content"][0]["text"] == '"mine"'
        call.add_done_callback(lambda it: it.cancelled() or it.exception())
        await served.http.aclose()
    await asyncio.wait({call})
    await none_left(before)
    assert waiting.cancelled == ["mine"]
    assert waiting.cleaned_up == (["mine"] if tool == "clean_up" else [])


async def test_a_background_task_outlives_its_client(app: FastAPI, waiting: Waiting) -> None:
    async with running(app) as served:
        for version in ERAS:
            rpc = await served.rpc(version)
            before = asyncio.all_tasks()
            async with httpx2.AsyncClient(verify=False) as leaving:
                rpc.http = leaving
                assert (await rpc.call("later", {"name": version})).json() == version
            await soon(waiting.started[version])
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert waiting.cancelled == []
            waiting.release.set()
            await none_left(before)
            waiting.release.clear()


async def test_a_cancellation_may_escape_the_slash(app: FastAPI, waiting: Waiting) -> None:
    async with running(app) as served:
        rpc = await connected(served, await served.token())
        call = begin(rpc, waiting, "a")
        await soon(waiting.started["a"])
        body = '{"jsonrpc": "2.0", "method": "notifications\\/cancelled", "params": {"requestId": 5}}'
        reply = await rpc.http.post(rpc.url, content=body, headers=rpc.headers("notifications/cancelled"))
        assert reply.status_code == 202
        async with asyncio.timeout(LIMIT):
            await call
    assert waiting.cancelled == ["a"]
