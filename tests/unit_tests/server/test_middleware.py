"""The middleware of every server, through real applications on real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from fastapi import BackgroundTasks, FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.server.client import raise_for_status, request
from nemo_gym.server.middleware import DisconnectMiddleware, ErrorReplyMiddleware
from nemo_gym.session_routing import SESSION_LOST_HEADER
from tests.support import serving

pytestmark = pytest.mark.usefixtures("closed_client")


def app_with_error_replies(name: str = "outer") -> FastAPI:
    app = FastAPI()
    app.add_middleware(ErrorReplyMiddleware, server_name=name)
    return app


async def test_an_unhandled_exception_is_logged_once_with_its_traceback_and_answered_as_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = app_with_error_replies()

    @app.post("/fail")
    async def fail() -> None:
        raise KeyError("a secret of the server")

    async with serving(app) as url:
        response = await request("POST", f"{url}/fail")
        body = await response.json()

    assert response.status == 500
    assert body == {"detail": "KeyError in outer; see its log"}
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert len(with_traceback) == 1
    assert "POST /fail" in with_traceback[0].getMessage()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


@pytest.mark.parametrize("status", [404, 410, 422, 500, 503])
async def test_an_inner_servers_error_keeps_its_status_and_text(status: int) -> None:
    app = app_with_error_replies()
    inner_app = FastAPI()

    @inner_app.post("/inner")
    async def inner() -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"detail": "the inner cause"}, status)

    async with serving(inner_app) as inner_url, serving(app) as url:

        @app.post("/outer")
        async def outer() -> None:
            await raise_for_status(await request("POST", f"{inner_url}/inner"))

        response = await request("POST", f"{url}/outer")
        body = await response.json()

    assert response.status == status
    assert "the inner cause" in body["detail"]
    assert body["upstream"] == {"url": f"{inner_url}/inner", "status": status}


async def test_what_may_be_secret_in_an_address_is_neither_logged_nor_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = app_with_error_replies()

    async with serving(FastAPI()) as inner_url, serving(app) as url:
        address = inner_url.replace("http://", "http://me:hunter2@") + "/nowhere?api_key=hunter3"

        @app.post("/outer")
        async def outer() -> None:
            await raise_for_status(await request("POST", address))

        response = await request("POST", f"{url}/outer")
        body = await response.text()

    assert response.status == 404
    assert "/nowhere" in body
    assert "hunter" not in body
    assert "hunter" not in caplog.text


async def test_a_lost_session_stays_a_lost_session_through_a_calling_server() -> None:
    app = app_with_error_replies()
    inner_app = FastAPI()

    @inner_app.post("/inner")
    async def inner() -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"detail": "gone"}, 410, {SESSION_LOST_HEADER: "worker_gone"})

    async with serving(inner_app) as inner_url, serving(app) as url:

        @app.post("/outer")
        async def outer() -> None:
            await raise_for_status(await request("POST", f"{inner_url}/inner"))

        response = await request("POST", f"{url}/outer")

    assert response.status == 410
    assert response.headers[SESSION_LOST_HEADER] == "worker_gone"


async def test_a_request_that_outlasts_the_servers_grace_is_told_so() -> None:
    app = app_with_error_replies()
    started = asyncio.Event()

    @app.post("/work")
    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    async with serving(app, timeout_graceful_shutdown=1) as url:
        call = asyncio.create_task(request("POST", f"{url}/work"))
        await wait_for(started)
    response = await call
    assert response.status == 503
    assert "outer is stopping" in (await response.json())["detail"]


@pytest.mark.parametrize("how", ["refuses", "hangs up"])
async def test_an_inner_server_that_is_gone_is_a_502_and_no_traceback(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_with_error_replies()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    inner = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    inner_url = f"http://127.0.0.1:{inner.sockets[0].getsockname()[1]}"
    if how == "refuses":
        inner.close()
        await inner.wait_closed()

    @app.post("/outer")
    async def outer() -> None:
        await request("POST", inner_url, json={}, connect_patience=0.1)

    async with serving(app) as url:
        response = await request("POST", f"{url}/outer")
        body = await response.json()
    inner.close()

    assert response.status == 502
    assert "outer lost its connection to another server" in body["detail"]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_reply_that_breaks_in_the_middle_is_never_taken_for_a_whole_one() -> None:
    app = app_with_error_replies()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            raise RuntimeError("broken")

        return StreamingResponse(parts())

    async with serving(app) as url:
        response = await request("GET", f"{url}/stream")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def wait_for(event: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await event.wait()


class Recorder:
    """An application whose handler works until it is cancelled."""

    def __init__(self, delay: float = 0.05) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.background = asyncio.Event()
        self.app = FastAPI()
        self.app.add_middleware(DisconnectMiddleware, delay=delay)
        self.app.post("/work")(self.work)
        self.app.post("/work-without-reading")(self.work_without_reading)
        self.app.post("/upload")(self.upload)
        self.app.post("/background")(self.in_background)
        self.app.get("/events")(self.events)

    async def block(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def work(self, body: dict[str, Any]) -> None:
        await self.block()

    async def work_without_reading(self) -> None:
        await self.block()

    async def upload(self, request: Request) -> dict[str, int]:
        self.started.set()
        await asyncio.sleep(0.2)
        return {"size": len(await request.body())}

    async def in_background(self, tasks: BackgroundTasks) -> None:
        async def later() -> None:
            await asyncio.sleep(0.2)
            self.background.set()

        tasks.add_task(later)

    async def events(self) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await self.block()

        return StreamingResponse(parts())


@pytest.mark.parametrize("path", ["/work", "/work-without-reading"])
@pytest.mark.parametrize("delay", [0.0, 0.05])
async def test_a_client_that_goes_away_cancels_its_handler(path: str, delay: float) -> None:
    recorder = Recorder(delay)
    async with serving(recorder.app) as url, aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(f"{url}{path}", json={"a": 1}))
        await wait_for(recorder.started)
        call.cancel()
        await wait_for(recorder.cancelled)


async def test_a_client_that_goes_away_cancels_a_streaming_reply() -> None:
    recorder = Recorder()
    async with serving(recorder.app) as url, aiohttp.ClientSession() as session:
        response = await session.get(f"{url}/events")
        assert await response.content.readany() == b"data: 1\n\n"
        await wait_for(recorder.started)
        response.close()
        await wait_for(recorder.cancelled)


@pytest.mark.parametrize("delay", [0.0, 0.05])
@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_a_body_read_late_arrives_whole(delay: float, size: int) -> None:
    recorder = Recorder(delay)
    async with serving(recorder.app) as url:
        response = await request("POST", f"{url}/upload", data=b"x" * size)
        assert await response.json() == {"size": size}


async def test_a_body_that_comes_slowly_to_a_waiting_handler_arrives_whole() -> None:
    recorder = Recorder(delay=0.0)

    async def slowly() -> AsyncIterator[bytes]:
        for part in (b"a", b"b", b"c"):
            await asyncio.sleep(0.15)
            yield part

    async with serving(recorder.app) as url, aiohttp.ClientSession() as session, asyncio.timeout(60):
        response = await session.post(f"{url}/upload", data=slowly())
        assert await response.json() == {"size": 3}


async def test_work_after_the_reply_is_not_cancelled() -> None:
    recorder = Recorder(delay=0.0)
    async with serving(recorder.app) as url:
        response = await request("POST", f"{url}/background")
        assert response.status == 200
        await wait_for(recorder.background)


async def test_a_client_that_goes_away_while_it_uploads_ends_the_handler() -> None:
    ended = asyncio.Event()
    app = FastAPI()
    app.add_middleware(DisconnectMiddleware, delay=0.0)

    @app.post("/upload")
    async def upload(request: Request) -> None:
        try:
            await request.body()
        finally:
            ended.set()

    async with serving(app) as url:
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        await asyncio.sleep(0.1)
        assert not ended.is_set()
        writer.close()
        await wait_for(ended)


async def test_a_handler_may_ask_whether_its_client_is_still_there_without_losing_the_body() -> None:
    app = FastAPI()
    app.add_middleware(DisconnectMiddleware, delay=0.0)

    @app.post("/ask")
    async def ask(request: Request) -> dict[str, Any]:
        body = await request.body()
        answers = []
        for _ in range(3):
            await asyncio.sleep(0.02)
            answers.append(await request.is_disconnected())
        return {"size": len(body), "answers": answers}

    async with serving(app) as url:
        response = await request("POST", f"{url}/ask", data=b"x" * 200_000)
        assert await response.json() == {"size": 200_000, "answers": [False, False, False]}


async def test_a_handler_that_ignores_its_cancellation_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    started, stubborn = asyncio.Event(), asyncio.Event()
    app.add_middleware(ErrorReplyMiddleware, server_name="it")
    app.add_middleware(DisconnectMiddleware, delay=0.0)

    @app.post("/work")
    async def work() -> dict[str, bool]:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            stubborn.set()
        return {"done": True}

    async with serving(app) as url, aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(f"{url}/work"))
        await wait_for(started)
        call.cancel()
        await wait_for(stubborn)
        assert (await session.get(f"{url}/nothing")).status == 404
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_server_that_stops_can_still_cancel_a_handler_whose_client_left() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    gone = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    middleware = DisconnectMiddleware(app, delay=0.0)
    scope = {"type": "http", "method": "POST", "path": "/"}
    task = asyncio.create_task(middleware(scope, receive, send))
    await wait_for(started)
    gone.set()
    for _ in range(10):
        if task.cancelling():
            break
        await asyncio.sleep(0)
    assert not cancelled.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_requests_of_one_connection_are_answered_in_order_under_the_watch() -> None:
    recorder = Recorder(delay=0.0)
    async with serving(recorder.app) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        for size in (1, 2, 3):
            body = b"x" * size
            writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (size, body))
        for size in (1, 2, 3):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len('{"size":0}')) == b'{"size":%d}' % size
        writer.close()


async def test_a_request_that_took_long_leaves_nothing_to_the_garbage_collector() -> None:
    class Server:
        async def receive(self) -> Message:
            await asyncio.Event().wait()
            raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Message) -> None:
        pass

    server = Server()
    seen = weakref.ref(server)
    gc.disable()
    try:
        await DisconnectMiddleware(app, delay=0.0)({"type": "http"}, server.receive, send)
        del server
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen() is None
    finally:
        gc.enable()
