"""The example of docs/sessions-and-workers.md, run as it stands there: real processes, and one of them killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nemo_gym.paths import PARENT_DIR
from nemo_gym.session_routing import SOCKET_DIR_ENV

SESSIONS = 24
PAGE = PARENT_DIR / "docs" / "sessions-and-workers.md"
WORKER_GONE = 1012
BROKEN_OFF = 1006

# The example's application with a WebSocket more.
TALK = """
from starlette.routing import WebSocketRoute

async def talk(websocket):
    await websocket.accept()
    async for _ in websocket.iter_text():
        counts[websocket.session["name"]] += 1
        await websocket.send_text(f"{os.getpid()} {counts[websocket.session['name']]}")

app.router.routes.append(WebSocketRoute("/talk", talk))
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        (tmp_path / name).write_text(code, "utf-8")
    with (tmp_path / "counter.py").open("a") as application:
        application.write(TALK)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    environment = {**os.environ, "PYTHONPATH": str(PARENT_DIR), SOCKET_DIR_ENV: str(folder)}
    command = [sys.executable, "serve.py", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
        assert list(folder.iterdir()) == [], "the socket directory was left behind"
        folder.rmdir()


class Caller:
    """Sends each request on a connection of its own, so that the kernel chooses who accepts it."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def post(self, path: str, cookie: str | None = None) -> tuple[int, dict[str, object], str]:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            headers = {"cookie": cookie} if cookie else {}
            async with session.post(self.url + path, headers=headers) as reply:
                return reply.status, await reply.json(), reply.headers.get("set-cookie", "").partition(";")[0]

    def talk(self, cookie: str) -> connect:
        return connect(self.url.replace("http", "ws") + "/talk", additional_headers={"cookie": cookie}, proxy=None)

    async def post_until(self, status: int, path: str, cookie: str | None = None) -> None:
        """Repeat a request until it is answered with `status`; a connection may meet a process that just ends."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    if (await self.post(path, cookie))[0] == status:
                        return
                await asyncio.sleep(0.02)


@pytest.mark.promise("any-starlette-app", "reaches-its-owner", "gone-is-410", "directory-private")
async def test_sessions_stay_whole_over_several_processes_and_the_loss_of_one(url: str) -> None:
    caller = Caller(url)
    await caller.post_until(200, "/start?name=first")
    async with asyncio.timeout(20):
        owners: set[object] = set()
        sessions: list[tuple[str, object]] = []
        while len(sessions) < SESSIONS or len(owners) < 2:
            started = await asyncio.gather(*(caller.post(f"/start?name={len(sessions) + n}") for n in range(8)))
            sessions += [(cookie, body["pid"]) for _, body, cookie in started]
            owners = {owner for _, owner in sessions}

        for expected in (1, 2, 3):
            replies = await asyncio.gather(*(caller.post("/count", cookie) for cookie, _ in sessions))
            assert [body for _, body, _ in replies] == [{"count": expected, "pid": owner} for _, owner in sessions]

        victim = int(str(sessions[0][1]))
        os.kill(victim, signal.SIGKILL)
        await caller.post_until(410, "/count", sessions[0][0])
        for cookie, owner in sessions:
            status, body, _ = await caller.post("/count", cookie)
            if owner == victim:
                assert (status, body["reason"]) == (410, "worker_gone")
            else:
                assert (status, body) == (200, {"count": 4, "pid": owner})


@pytest.mark.promise("websocket-messages", "websocket-ends", "websocket-lost")
async def test_websockets_reach_the_process_of_their_session_and_tell_its_death(url: str) -> None:
    caller = Caller(url)
    await caller.post_until(200, "/start?name=first")
    ends: set[int | None] = set()
    async with asyncio.timeout(40), AsyncExitStack() as stack:
        # Who accepted a connection can't be seen: once it was the owner itself, that breaks off the connection.
        while WORKER_GONE not in ends:
            _, body, cookie = await caller.post("/start?name=x")
            talks = [await stack.enter_async_context(caller.talk(cookie)) for _ in range(6)]
            counts = []
            for talk in talks:
                await talk.send("")
                owner, count = str(await talk.recv()).split()
                assert owner == str(body["pid"])
                counts.append(int(count))
            assert counts == list(range(counts[0], counts[0] + 6))
            os.kill(int(owner), signal.SIGKILL)
            for talk in talks:
                with pytest.raises(ConnectionClosed):
                    await talk.recv()
                ends.add(talk.close_code)
            assert ends <= {WORKER_GONE, BROKEN_OFF}
            await caller.post_until(410, "/count", cookie)
            with pytest.raises(InvalidStatus, match="410"):
                await stack.enter_async_context(caller.talk(cookie))
