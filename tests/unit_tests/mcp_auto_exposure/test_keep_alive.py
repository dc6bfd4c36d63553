"""A slow tool: its client hears of it in time, and reads the result all the same."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI

from nemo_gym.mcp_auto_exposure.keep_alive import BrokenOffReplyError, KeptAlive
from tests.mcp_support import CLIENT_MODES, ERAS, Rpc, make_app, make_server, running

OFTEN_S = 0.02
LIMIT = 10


class Slow:
    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.app = make_app(make_server(self._add), keep_alive_s=OFTEN_S)

    def _add(self, app: FastAPI) -> None:
        @app.post("/slow")
        async def slow() -> str:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return "done"

        @app.post("/quick")
        async def quick() -> str:
            return "done"


def request_bytes(rpc: Rpc, tool: str) -> bytes:
    body = json.dumps(rpc.message("tools/call", {"name": tool}, id=1)).encode()
    headers = {**rpc.headers("tools/call", tool), "host": "localhost", "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body


async def open_call(url: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    return reader, writer


@pytest.mark.parametrize("version", ERAS)
async def test_the_head_comes_in_time_then_white_space_then_the_result(version: str) -> None:
    slow = Slow()
    async with running(slow.app) as served, asyncio.timeout(LIMIT):
        rpc = await served.rpc(version)
        message, headers = rpc.message("tools/call", {"name": "slow"}, id=1), rpc.headers("tools/call", "slow")
        async with rpc.http.stream("POST", rpc.url, json=message, headers=headers) as reply:
            assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
            parts = reply.aiter_bytes()
            assert [await anext(parts) for _ in range(3)] == [b" ", b" ", b" "]
            slow.release.set()
            body = b"".join([part async for part in parts])
    assert json.loads(body)["result"]["content"][0]["text"] == '"done"'


@pytest.mark.parametrize("version", ERAS)
async def test_a_quick_reply_has_no_white_space_and_says_its_length(version: str) -> None:
    async with running(Slow().app) as served:
        reply = await (await served.rpc(version)).send("tools/call", {"name": "quick"}, id=1)
    assert reply.content.startswith(b"{")
    assert int(reply.headers["content-length"]) == len(reply.content)


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_the_official_client_reads_the_late_result(mode: str) -> None:
    slow = Slow()
    async with running(slow.app) as served, served.client(mode) as client, asyncio.timeout(LIMIT):
        call = asyncio.create_task(client.call_tool("slow", {}))
        await asyncio.wait({call}, timeout=5 * OFTEN_S)
        assert not call.done()
        slow.release.set()
        assert (await call).content[0].text == '"done"'


@pytest.mark.parametrize("version", ERAS)
async def test_a_client_that_leaves_a_reply_kept_alive_cancels_the_tool(version: str) -> None:
    slow = Slow()
    async with running(slow.app) as served, asyncio.timeout(LIMIT):
        rpc = await served.rpc(version)
        before = asyncio.all_tasks()
        reader, writer = await open_call(served.url, request_bytes(rpc, "slow"))
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await slow.cancelled.wait()
        while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.01)


async def test_a_late_reply_that_is_an_error_is_broken_off() -> None:
    """A success has been announced, so nothing else can be told the client than that the reply has no end."""
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        async with KeptAlive(send, OFTEN_S) as reply:
            await asyncio.sleep(3 * OFTEN_S)
            try:
                await reply.send({"type": "http.response.start", "status": 500, "headers": []})
            except BrokenOffReplyError as error:
                ended.append(str(error))
                raise

    async with running(app, lifespan="off") as served, asyncio.timeout(LIMIT):
        reader, writer = await open_call(served.url, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        received = await reader.read()
        writer.close()
    assert ended == ["the reply came late and has status 500"]
    assert b"200" in received.splitlines()[0]
    assert not received.endswith(b"0\r\n\r\n")


async def test_a_sign_that_can_not_be_sent_ends_the_signs_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nemo_gym")

    tried = asyncio.Event()

    async def send(message: Any) -> None:
        tried.set()
        raise OSError("the client is gone")

    before = asyncio.all_tasks()
    async with asyncio.timeout(LIMIT), KeptAlive(send, 0.001):
        await tried.wait()
    assert asyncio.all_tasks() == before
    assert "a sign of life could not be sent: OSError('the client is gone')" in caplog.text


async def test_signs_wait_for_a_reply_that_is_being_sent() -> None:
    """A client that reads slowly makes the reply's parts wait; no white space gets between them."""
    sent: list[Any] = []

    async def slow_send(message: Any) -> None:
        sent.append((message["type"], message.get("body", b"")))
        await asyncio.sleep(3 * OFTEN_S)

    async with KeptAlive(slow_send, OFTEN_S) as reply:
        await reply.send({"type": "http.response.start", "status": 404, "headers": []})
        await reply.send({"type": "http.response.body", "body": b"x", "more_body": False})
    assert sent == [("http.response.start", b""), ("http.response.body", b"x")]
