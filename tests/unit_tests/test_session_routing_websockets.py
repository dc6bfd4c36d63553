"""A WebSocket of a session that another worker owns: as if that worker had accepted it, to its end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    worker_socket_path,
)
from tests.session_workers import (
    Worker,
    fake_owner,
    leave_stale_socket,
    make_app,
    open_descriptors,
    owned_cookie,
    running_workers,
)


@pytest.fixture(scope="module")
def hop() -> str:
    """WebSockets go the same way whatever the hop of HTTP requests."""
    return "frames"


MEGABYTE = 2**20
FORTNIGHT = 14 * 24 * 60 * 60
LEFT_WITHOUT_A_WORD = 1005


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive()
            websocket._raise_on_disconnect(message)
            await websocket.send({**message, "type": "websocket.send"})


async def seen(websocket: WebSocket) -> None:
    """Send all that a handler can see of the upgrade."""
    scope = websocket.scope
    await websocket.accept("chat.v2", headers=[(b"x-mine", b"\xe9"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")])
    await websocket.send_json(
        {
            "worker": websocket.app.state.worker_id,
            "session": websocket.session.get("id"),
            "client": scope["client"],
            "server": scope["server"],
            "headers": [[n.decode("latin-1"), v.decode("latin-1")] for n, v in scope["headers"]],
            "subprotocols": scope["subprotocols"],
            **{key: scope[key] for key in ("scheme", "path", "http_version", "root_path")},
            "raw_path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
        }
    )
    await websocket.close()


async def close_as_told(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("before")
    await websocket.close(int(websocket.query_params["code"]), websocket.query_params["reason"])


async def note_how_it_ends(websocket: WebSocket) -> None:
    await websocket.accept()
    websocket.app.state.ends.put_nowait(("began", ""))
    try:
        while True:
            await websocket.receive_text()
    except WebSocketDisconnect as end:
        websocket.app.state.ends.put_nowait((end.code, end.reason))


async def reply_instead(websocket: WebSocket) -> None:
    await websocket.send_denial_response(JSONResponse({"detail": "no"}, 418, {"x-why": "tea", "set-cookie": "a=1"}))


async def refuse(websocket: WebSocket) -> None:
    await websocket.close()


async def fail(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("before")
    raise LookupError("a bug of this handler")


async def flood(websocket: WebSocket) -> None:
    await websocket.accept()
    state = websocket.app.state
    while state.sent < 64:
        await websocket.send_bytes(bytes(MEGABYTE))
        state.sent += 1
    await websocket.close()


async def read_when_told(websocket: WebSocket) -> None:
    await websocket.accept()
    state = websocket.app.state
    await state.read_on.wait()
    for _ in range(64):
        state.received += len(await websocket.receive_bytes())
    await websocket.close()


def app() -> Starlette:
    handlers = [echo, seen, close_as_told, note_how_it_ends, reply_instead, refuse, fail, flood, read_when_told]
    app = make_app(*(WebSocketRoute(f"/{handler.__name__}", handler) for handler in handlers))  # type: ignore[arg-type]
    app.state.ends = asyncio.Queue()
    app.state.read_on = asyncio.Event()
    app.state.sent = app.state.received = 0
    return app


@pytest.fixture
async def pair(socket_dir: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    """The worker that receives and the worker that owns."""
    async with running_workers(socket_dir, 2, app, limit=30) as (here, there):
        yield here, there


def to(worker: Worker, target: str, cookie: str, *, headers: Any = (), **options: Any) -> connect:
    return connect(
        f"ws://127.0.0.1:{worker.port}{target}",
        additional_headers=[("cookie", cookie), *headers],
        max_size=None,
        open_timeout=10,
        close_timeout=5,
        ping_interval=None,
        proxy=None,
        **options,
    )


async def end_of(connection: ClientConnection) -> tuple[list[Any], int | None, str | None]:
    """Return the messages until the end, its close code and its reason."""
    messages = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            messages.append(await connection.recv())
    return messages, connection.close_code, connection.close_reason


async def refusal_of(connecting: connect) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as refusal:
        async with connecting:
            pass
    return refusal.value


async def settled(value: Callable[[], int]) -> None:
    """Return when `value()` has not changed for a while."""
    before = -1
    while before != value() or not value():
        before = value()
        await asyncio.sleep(0.15)


async def until_idle(*workers: Worker) -> None:
    """Return when no handler runs, of requests from outside."""
    while any(worker.server.server_state.tasks for worker in workers):  # noqa: ASYNC110, a server has no event
        await asyncio.sleep(0.01)


@pytest.mark.promise("websocket-messages")
async def test_messages_pass_in_both_directions(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    messages = ["", "text", "\u00e9\u20ac\U0001f600\x00", b"", bytes(range(256)), "x" * (6 * MEGABYTE), b"y" * MEGABYTE]
    async with to(here, "/echo", owned_cookie(there.worker_id)) as connection:
        for message in messages:
            await connection.send(message)
            assert await connection.recv() == message
    assert there.router.statistics().arrived == 1
    assert here.router.statistics().forwarded == 1


@pytest.mark.promise("websocket-messages")
async def test_a_fragmented_message_arrives_whole(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    async with to(here, "/echo", owned_cookie(there.worker_id)) as connection:
        await connection.send(["a", "b\u20ac", "c"])
        assert await connection.recv() == "ab\u20acc"
        await connection.send([b"\xff", b"", b"\x00"])
        assert await connection.recv() == b"\xff\x00"


@pytest.mark.promise("websocket-messages")
async def test_many_messages_keep_their_order_while_both_sides_talk(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    async with to(here, "/echo", owned_cookie(there.worker_id)) as connection:

        async def send() -> None:
            for number in range(2_000):
                await connection.send(str(number))

        sending = asyncio.create_task(send())
        assert [await connection.recv() for _ in range(2_000)] == [str(number) for number in range(2_000)]
        await sending


@pytest.mark.promise("websocket-upgrade")
async def test_the_owners_handler_sees_the_upgrade_as_if_it_had_received_it(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    own = {"connection", "upgrade", "host", "sec-websocket-key", "x-nemo-gym-forwarded-client"}
    headers = [
        ("X-Double", "1"),
        ("x-double", "2"),
        ("x-latin", "\xe9"),
        ("x-nemo-gym-forwarded-client", '["9.9.9.9"]'),
    ]
    options: dict[str, Any] = {"subprotocols": ["chat.v1", "chat.v2"], "origin": "http://example.org"}
    told = []
    for worker in (here, there):
        target, cookie = "/seen?a=%2F&a=&b", owned_cookie(there.worker_id)
        async with to(worker, target, cookie, headers=headers, **options) as connection:
            scope = json.loads(await connection.recv())
            assert connection.response is not None
            reply = [h for h in connection.response.headers.raw_items() if h[0].lower() != "sec-websocket-accept"]
            assert connection.subprotocol == "chat.v2"
            assert scope["client"] == list(connection.local_address)
            assert scope["server"] == ["127.0.0.1", worker.port]
        names = [name for name, _ in scope["headers"]]
        assert "x-nemo-gym-forwarded-client" not in names
        assert names.count("sec-websocket-key") == names.count("upgrade") == names.count("connection") == 1
        scope["headers"] = [header for header in scope["headers"] if header[0] not in own]
        told.append(({**scope, "client": None, "server": None}, sorted(reply)))
    assert told[0] == told[1]
    assert ["x-latin", "\xe9"] in told[0][0]["headers"]
    assert ("set-cookie", "b=2") in told[0][1]
    assert told[0][0]["worker"] == there.worker_id
    assert told[0][0]["session"] == "a"


@pytest.mark.promise("websocket-upgrade")
async def test_the_protocols_pass_where_the_server_has_taken_their_header_away(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    scope = upgrade_scope(owned_cookie(there.worker_id), path="/seen", raw_path=b"/seen", subprotocols=["a", "chat.v2"])
    sent = await received_from(here.router, scope)
    assert sent[0]["subprotocol"] == "chat.v2"
    assert json.loads(sent[1]["text"])["subprotocols"] == ["a", "chat.v2"]
    assert sent[2] == {"type": "websocket.close", "code": 1000, "reason": ""}


def upgrade_scope(cookie: str, **more: Any) -> Scope:
    headers = [(b"host", b"h"), (b"cookie", cookie.encode())]
    return {"type": "websocket", "path": "/x", "query_string": b"", "headers": headers, "client": None, **more}


async def received_from(app: ASGIApp, scope: Scope) -> list[Message]:
    """Return what a client that says nothing gets."""
    sent: list[Message] = []
    events: asyncio.Queue[Message] = asyncio.Queue()
    events.put_nowait({"type": "websocket.connect"})

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, events.get, send)
    return sent


class TestOwnerEnds:
    @pytest.mark.promise("websocket-ends")
    @pytest.mark.parametrize(
        ("code", "reason"), [(1000, ""), (1001, "bye"), (1011, "oh \u20ac"), (3999, ""), (4999, "x")]
    )
    async def test_with_a_code_and_reason_of_its_own(self, pair: tuple[Worker, Worker], code: int, reason: str) -> None:
        here, there = pair
        async with to(here, f"/close_as_told?code={code}&reason={reason}", owned_cookie(there.worker_id)) as connection:
            assert await end_of(connection) == (["before"], code, reason)

    @pytest.mark.promise("websocket-refused")
    async def test_by_a_reply_instead_of_the_upgrade(self, pair: tuple[Worker, Worker]) -> None:
        there = pair[1]
        replies = []
        for worker in pair:
            reply = (await refusal_of(to(worker, "/reply_instead", owned_cookie(there.worker_id)))).response
            replies.append((reply.status_code, reply.body, sorted(reply.headers.raw_items())))
        assert replies[0][:2] == replies[1][:2] == (418, b'{"detail":"no"}')
        without_date = [[header for header in reply[2] if header[0].lower() != "date"] for reply in replies]
        assert without_date[0] == without_date[1]
        assert ("x-why", "tea") in without_date[0]

    @pytest.mark.promise("websocket-refused")
    async def test_by_a_refusal(self, pair: tuple[Worker, Worker]) -> None:
        there = pair[1]
        for target in ("/refuse", "/no-such-route"):
            statuses = [
                (await refusal_of(to(worker, target, owned_cookie(there.worker_id)))).response.status_code
                for worker in pair
            ]
            assert statuses == [403, 403]

    @pytest.mark.promise("websocket-ends")
    async def test_by_a_failure_of_its_handler(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        async with to(here, "/fail", owned_cookie(there.worker_id)) as connection:
            messages, code, reason = await end_of(connection)
        assert (messages, code) == (["before"], 1011)
        assert reason is not None
        assert "broke off" in reason

    @pytest.mark.promise("websocket-ends")
    async def test_by_stopping(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        async with to(here, "/note_how_it_ends", owned_cookie(there.worker_id)) as connection:
            assert (await there.app.state.ends.get())[0] == "began"
            await there.stop()
            assert (await end_of(connection))[1] == 1012
            assert (await there.app.state.ends.get())[0] == 1012

    @pytest.mark.promise("websocket-ends", "websocket-lost")
    async def test_by_its_death(self, socket_dir: Path, pair: tuple[Worker, Worker]) -> None:
        worker_id = uuid.uuid4().hex
        path = worker_socket_path(socket_dir, worker_id)

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await accept_by_hand(reader, writer)
            writer.write(b"\x81\x02hi\x81\x7e")  # a message, and the beginning of another
            await writer.drain()
            path.unlink()
            writer.transport.abort()

        async with fake_owner(socket_dir, die, worker_id) as cookie, to(pair[0], "/x", cookie) as connection:
            messages, code, reason = await end_of(connection)
        assert code == 1012
        assert messages in (["hi"], [])
        assert reason == "the session's worker is gone"
        assert (await refusal_of(to(pair[0], "/x", cookie))).response.status_code == 410

    @pytest.mark.promise("websocket-ends")
    async def test_by_nonsense(self, socket_dir: Path, pair: tuple[Worker, Worker]) -> None:
        async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await accept_by_hand(reader, writer)
            writer.write(b"\xff" * 100)
            await reader.read()
            writer.close()

        async with fake_owner(socket_dir, talk_nonsense) as cookie, to(pair[0], "/x", cookie) as connection:
            assert (await end_of(connection))[1] == 1011


async def accept_by_hand(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    key = next(line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    head = "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
    writer.write(head.encode() + accept + b"\r\n\r\n")


@pytest.mark.promise("websocket-ends")
class TestClientEnds:
    @pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "bye"), (3000, "\u20ac"), (4999, "x")])
    async def test_with_a_code_and_reason_of_its_own(self, pair: tuple[Worker, Worker], code: int, reason: str) -> None:
        here, there = pair
        async with to(here, "/note_how_it_ends", owned_cookie(there.worker_id)) as connection:
            await connection.close(code, reason)
            assert connection.close_code == code
        assert (await there.app.state.ends.get())[0] == "began"
        assert await asyncio.wait_for(there.app.state.ends.get(), 5) == (code, reason)

    async def test_by_vanishing(self, pair: tuple[Worker, Worker]) -> None:
        there = pair[1]
        for worker in pair:
            async with to(worker, "/note_how_it_ends", owned_cookie(there.worker_id)) as connection:
                assert (await there.app.state.ends.get())[0] == "began"
                connection.transport.abort()
            assert (await asyncio.wait_for(there.app.state.ends.get(), 5))[0] == LEFT_WITHOUT_A_WORD

    async def test_before_a_frozen_owner_has_answered(self, socket_dir: Path, pair: tuple[Worker, Worker]) -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()
            left.set()
            writer.close()

        async with fake_owner(socket_dir, never_answer) as cookie, await pair[0].connect() as connection:
            headers = [("host", "h"), ("cookie", cookie), ("connection", "upgrade"), ("upgrade", "websocket")]
            headers += [("sec-websocket-version", "13"), ("sec-websocket-key", base64.b64encode(bytes(16)).decode())]
            connection.send_head("GET", "/x", headers)
            await asyncio.wait_for(asked.wait(), 5)
            connection.writer.close()
            await asyncio.wait_for(left.wait(), 5)

    async def test_while_the_owner_sends(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        async with to(here, "/flood", owned_cookie(there.worker_id)) as connection:
            await connection.recv()
            connection.transport.abort()
        await asyncio.wait_for(until_idle(here, there), 5)


@pytest.mark.promise("websocket-back-pressure")
class TestBackPressure:
    async def test_the_owner_waits_for_a_client_that_does_not_read(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        cookie = owned_cookie(there.worker_id)
        async with to(here, "/flood", cookie, max_queue=1, compression=None) as connection:
            await settled(lambda: there.app.state.sent)
            assert there.app.state.sent < 24
            messages, code, _ = await end_of(connection)
        assert (sum(map(len, messages)), code) == (64 * MEGABYTE, 1000)

    async def test_the_client_waits_for_an_owner_that_does_not_read(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        written = 0

        async def write(connection: ClientConnection) -> None:
            nonlocal written
            for _ in range(64):
                await connection.send(bytes(MEGABYTE))
                written += 1

        cookie = owned_cookie(there.worker_id)
        async with to(here, "/read_when_told", cookie, compression=None) as connection:
            writing = asyncio.create_task(write(connection))
            await settled(lambda: written)
            assert written < 24
            there.app.state.read_on.set()
            await writing
            assert (await end_of(connection))[1] == 1000
        assert there.app.state.received == 64 * MEGABYTE


@pytest.mark.promise("websocket-lost")
class TestLost:
    async def test_an_owner_that_is_gone_is_said_by_the_reply_to_the_upgrade(
        self, socket_dir: Path, pair: tuple[Worker, Worker]
    ) -> None:
        killed = uuid.uuid4().hex
        leave_stale_socket(socket_dir, killed)
        for cookie, reason in [
            (owned_cookie("a" * 32), "worker_gone"),
            (owned_cookie(killed), "worker_gone"),
            (owned_cookie(pair[1].worker_id, age=2 * FORTNIGHT), "session_expired"),
        ]:
            reply = (await refusal_of(to(pair[0], "/echo", cookie))).response
            assert reply.status_code == 410
            assert reply.headers[SESSION_LOST_HEADER] == reason
            assert json.loads(reply.body)["reason"] == reason

    async def test_an_owner_that_runs_but_gives_no_reply_is_not_gone(
        self, socket_dir: Path, pair: tuple[Worker, Worker]
    ) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(1):
                writer.close()
            writer.close()

        async with fake_owner(socket_dir, hang_up) as cookie:
            assert (await refusal_of(to(pair[0], "/x", cookie))).response.status_code == 502

    async def test_a_server_that_cannot_reply_to_the_upgrade_refuses_it(self, pair: tuple[Worker, Worker]) -> None:
        sent = await received_from(pair[0].router, upgrade_scope(owned_cookie("a" * 32)))
        assert [message["type"] for message in sent] == ["websocket.close"]
        assert "410" in sent[0]["reason"]


@pytest.mark.promise("reaches-its-owner")
async def test_one_whose_session_is_here_or_new_is_served_here(pair: tuple[Worker, Worker]) -> None:
    here, _ = pair
    for cookie in (owned_cookie(here.worker_id), "a=1"):
        async with to(here, "/seen", cookie, subprotocols=["chat.v2"]) as connection:
            assert json.loads(await connection.recv())["worker"] == here.worker_id
    assert here.router.statistics().forwarded == 0


async def test_http_goes_on_beside_a_websocket_and_after_it(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    cookie = owned_cookie(there.worker_id)
    async with to(here, "/echo", cookie) as connection:
        assert (await here.request("/x", cookie=cookie)).json()["worker"] == there.worker_id
        await connection.send("still")
        assert await connection.recv() == "still"
    assert (await here.request("/x", cookie=cookie)).json()["worker"] == there.worker_id
    assert here.router.statistics().open_pools == 1


@pytest.mark.promise("nothing-left-behind")
async def test_websockets_leave_nothing_behind_however_they_end(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    cookie = owned_cookie(there.worker_id)

    async def every_end() -> None:
        async with to(here, "/echo", cookie) as connection:
            await connection.send("x")
        async with to(here, "/note_how_it_ends", cookie) as connection:
            connection.transport.abort()
        for target in ("/fail", "/close_as_told?code=4000&reason=x"):
            async with to(here, target, cookie) as connection:
                await end_of(connection)
        for target in ("/refuse", "/reply_instead"):
            await refusal_of(to(here, target, cookie))

    await every_end()
    await until_idle(here, there)
    descriptors, tasks = open_descriptors(), len(asyncio.all_tasks())
    for _ in range(10):
        await asyncio.gather(*(every_end() for _ in range(4)))
    await until_idle(here, there)
    assert open_descriptors() <= descriptors + 8, "more than a few connections kept for the next request"
    assert len(asyncio.all_tasks()) <= tasks + 8
