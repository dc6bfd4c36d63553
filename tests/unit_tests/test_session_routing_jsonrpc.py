"""What the router says itself on the MCP path, said as JSON-RPC where the application asks for that."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    LostReason,
    create_socket_dir,
    jsonrpc_error_reply,
    lost_session_reply,
    remove_socket_dir,
    worker_socket_path,
)
from tests.owner_ends import take_request
from tests.session_workers import (
    FORTNIGHT,
    TOKENS,
    Reply,
    Worker,
    fake_owner,
    make_app,
    owned_cookie,
    running_worker,
    running_workers,
    token_of,
)

pytestmark = pytest.mark.usefixtures("hop")

GONE = "b" * 32
MEGABYTE = 2**20
ASKING: dict[str, Any] = {**TOKENS, "mcp_errors_as_jsonrpc": True}

lost_token = token_of(GONE)
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "x"}}
NOTIFICATIONS: list[Any] = [
    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
    {"jsonrpc": "2.0", "id": 1, "result": {}},
    {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "no"}},
]
NO_MESSAGES: list[Any] = [
    [], [CALL], {}, None, 5, "x", {"id": 1, "method": "x"}, {**CALL, "jsonrpc": "1.0"}, {**CALL, "jsonrpc": 2.0},
    {**CALL, "method": 5}, {**CALL, "id": True}, {**CALL, "id": [1]}, {**CALL, "id": {}}, {"jsonrpc": "2.0"},
    {"jsonrpc": "2.0", "id": 1}, {"jsonrpc": "2.0", "result": {}},
]  # fmt: skip
GARBAGE = [
    b"", b" ", b"{", b"\xff\xfe\xfd", b"[" * 100_000, b'{"jsonrpc":"2.0","method":"x","id":NaN}', b"a=1&b=2",
    b'{"jsonrpc":"2.0","method":"x","id":1e999}', b'{"jsonrpc":"2.0","method":"x","id":' + b"9" * 9_000 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def socket_dir() -> Iterator[Path]:
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


@pytest.fixture(scope="module")
async def worker(socket_dir: Path, hop: str) -> AsyncIterator[Worker]:
    async with running_workers(socket_dir, 1, limit=120, **ASKING) as (worker,):
        yield worker


@pytest.fixture
def owner() -> str:
    """The id of a worker that a test stands in for."""
    return uuid.uuid4().hex


async def post(worker: Worker, body: Any, *headers: tuple[str, str], path: str = "/mcp", **request: Any) -> Reply:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await worker.request(path, method="POST", headers=list(headers or [lost_token]), body=sent, **request)


def assert_error(reply: Reply, code: int, data: dict[str, Any], words: str, request_id: Any = 7) -> None:
    assert reply.status == 200
    assert reply.all("content-type") == ["application/json"]
    body = reply.json()
    message = body["error"].pop("message")
    assert body == {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "data": data}}
    assert type(body["id"]) is type(request_id)
    assert words in message


def lost(reason: str = "worker_gone", *, may_have_run: bool = False) -> dict[str, Any]:
    return {"reason": reason, "new_session_may_be_seeded": True, "may_have_run": may_have_run}


@pytest.mark.promise("jsonrpc-errors", "typed-410")
class TestLostSession:
    @pytest.mark.parametrize("request_id", [7, 0, -1, 2**70, 1.5, "seven", "", "é\u2028\ud800", None])
    async def test_a_request_gets_an_error_of_its_id(self, worker: Worker, request_id: Any) -> None:
        before = worker.router.statistics()
        for path in ("/mcp", "/mcp/", "/mcp/x"):
            reply = await post(worker, {**CALL, "id": request_id}, path=path)
            assert reply.all(SESSION_LOST_HEADER) == ["worker_gone"]
            assert_error(reply, -32010, lost(), "no longer running; its state is lost. Start a new session", request_id)
        after = worker.router.statistics()
        assert (after.lost, after.forwarded, after.served_here) == (
            before.lost + 3, before.forwarded + 3, before.served_here,
        )  # fmt: skip

    async def test_the_message_is_the_plain_replys_detail(self, worker: Worker) -> None:
        plain = await post(worker, CALL, path="/tool")
        assert plain.status == 410
        assert (await post(worker, CALL)).json()["error"]["message"] == plain.json()["detail"]

    async def test_an_expired_one_too(self, worker: Worker) -> None:
        for named in (GONE, worker.worker_id):
            reply = await post(worker, CALL, token_of(named, age=FORTNIGHT + 5))
            assert reply.all(SESSION_LOST_HEADER) == ["session_expired"]
            assert_error(reply, -32010, lost("session_expired"), "has expired")

    async def test_a_cookies_session_too(self, worker: Worker) -> None:
        reply = await post(worker, CALL, ("accept", "*/*"), cookie=owned_cookie(GONE))
        assert_error(reply, -32010, lost(), "its state is lost")

    @pytest.mark.promise("died-after-taking")
    @pytest.mark.parametrize("padding", [0, MEGABYTE])
    async def test_one_whose_worker_took_the_request_and_died(
        self, socket_dir: Path, worker: Worker, owner: str, padding: int
    ) -> None:
        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await take_request(reader, writer)
            worker_socket_path(socket_dir, owner).unlink()
            writer.close()

        async with fake_owner(socket_dir, die, owner):
            reply = await post(worker, {**CALL, "padding": "x" * padding}, token_of(owner))
        assert_error(reply, -32010, lost(may_have_run=True), "This request may have run")

    async def test_by_default_it_is_the_plain_410(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir, 1, **TOKENS) as (worker,):
            for body in (CALL, NOTIFICATIONS[0]):
                reply = await post(worker, body)
                assert (reply.status, reply.json()["reason"]) == (410, "worker_gone")


@pytest.mark.promise("jsonrpc-errors", "no-reply-is-502")
async def test_an_owner_that_gives_no_reply(socket_dir: Path, worker: Worker, owner: str) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with fake_owner(socket_dir, hang_up, owner):
        reply = await post(worker, CALL, token_of(owner))
        assert_error(reply, -32011, {"status": 502}, "the request may have run")
        assert reply.all(SESSION_LOST_HEADER) == []
        assert (await post(worker, NOTIFICATIONS[0], token_of(owner))).status == 202
        assert (await post(worker, b"x", token_of(owner))).status == 502


@pytest.mark.promise("jsonrpc-errors", "no-descriptors-is-503")
async def test_no_descriptors_left(socket_dir: Path, worker: Worker, owner: str) -> None:
    body = json.dumps(CALL).encode()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(worker_socket_path(socket_dir, owner)))
        listening.listen()
        async with await worker.connect() as connection:
            connection.send_head("GET", "/health", [("host", "h")])
            await connection.reply()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                connection.send_head("POST", "/mcp", [token_of(owner), ("content-length", str(len(body)))])
                connection.writer.write(body)
                reply = await connection.reply()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_error(reply, -32011, {"status": 503}, "no file descriptors left")
    assert reply.all("retry-after") == ["1"]


@pytest.mark.promise("jsonrpc-only")
class TestWhatIsNoRequest:
    @pytest.mark.parametrize("body", NOTIFICATIONS)
    async def test_a_notification_or_a_response_is_taken_without_an_answer(self, worker: Worker, body: Any) -> None:
        reply = await post(worker, body)
        assert (reply.status, reply.body, reply.all("content-length")) == (202, b"", ["0"])
        assert reply.all(SESSION_LOST_HEADER) == ["worker_gone"]

    async def test_what_is_no_message_keeps_the_plain_status(self, worker: Worker) -> None:
        for body in (*NO_MESSAGES, *GARBAGE):
            reply = await post(worker, body)
            assert (reply.status, reply.json()["reason"]) == (410, "worker_gone"), str(body)[:80]

    async def test_other_methods_and_other_paths_keep_the_plain_status(self, worker: Worker) -> None:
        body = json.dumps(CALL).encode()
        for method in ("GET", "DELETE", "PUT", "OPTIONS"):
            reply = await worker.request("/mcp", method=method, headers=[lost_token], body=body)
            assert (reply.status, reply.json()["reason"]) == (410, "worker_gone")
        assert (await worker.request("/mcp", method="HEAD", headers=[lost_token])).status == 410
        for path in ("/mcpx", "/", "/tool"):
            assert (await post(worker, CALL, path=path)).status == 410

    async def test_what_the_owner_says_itself_is_not_touched(self, socket_dir: Path) -> None:
        async def gone(_: Request) -> Response:
            return JSONResponse({"detail": "of its own"}, status_code=410)

        app = lambda: make_app(Route("/mcp", gone, methods=["POST"]))  # noqa: E731
        async with running_workers(socket_dir, 2, app, **ASKING) as (here, there):
            for worker in (here, there):
                reply = await post(worker, CALL, token_of(there.worker_id))
                assert (reply.status, reply.json()) == (410, {"detail": "of its own"})


@pytest.mark.promise("jsonrpc-streams")
class TestBody:
    @pytest.mark.parametrize(("size", "status"), [(65_537, 200), (4 * MEGABYTE, 200), (4 * MEGABYTE + 1, 410)])
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_one_of_more_than_4_mib_keeps_the_plain_status(
        self, worker: Worker, size: int, status: int, chunked: bool
    ) -> None:
        call = json.dumps({**CALL, "padding": ""}).encode()
        body = call[:-2] + b"x" * (size - len(call)) + call[-2:]
        async with await worker.connect() as connection:
            framing = ("transfer-encoding", "chunked") if chunked else ("content-length", str(size))
            connection.send_head("POST", "/mcp", [("host", "h"), lost_token, framing])
            connection.writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (size, body) if chunked else body)
            reply = await connection.reply()
        assert reply.status == status
        assert reply.all(SESSION_LOST_HEADER) == ["worker_gone"]

    async def test_one_that_announces_too_much_is_not_waited_for(self, worker: Worker) -> None:
        async with await worker.connect() as connection:
            connection.send_head("POST", "/mcp", [("host", "h"), lost_token, ("content-length", "9" * 9)])
            assert (await asyncio.wait_for(connection.reply(), 5)).status == 410

    async def test_one_that_dribbles_in_is_known_whole(self, worker: Worker) -> None:
        body = json.dumps(CALL).encode()
        async with await worker.connect() as connection:
            connection.send_head("POST", "/mcp", [("host", "h"), lost_token, ("transfer-encoding", "chunked")])
            for byte in body:
                connection.writer.write(b"1\r\n%c\r\n" % byte)
                await connection.writer.drain()
                await asyncio.sleep(0)
            connection.writer.write(b"0\r\n\r\n")
            assert_error(await connection.reply(), -32010, lost(), "its state is lost")

    async def test_one_that_a_client_offers_is_asked_for(self, worker: Worker) -> None:
        body = json.dumps(CALL).encode()
        async with await worker.connect() as connection:
            headers = [lost_token, ("content-length", str(len(body))), ("expect", "100-continue")]
            connection.send_head("POST", "/mcp", headers)
            assert (await connection.head()).status == 100
            connection.writer.write(body)
            assert_error(await connection.reply(), -32010, lost(), "its state is lost")

    async def test_it_streams_through_in_both_directions_at_once_and_is_not_kept(self, socket_dir: Path) -> None:
        class Echo:
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                more = True
                while more:
                    message = await receive()
                    more = message["more_body"]
                    await send({"type": "http.response.body", "body": message["body"], "more_body": more})

        async with (
            running_workers(socket_dir, 2, lambda: make_app(Route("/mcp", Echo())), **ASKING) as (here, there),
            await here.connect() as connection,
        ):
            headers = [("host", "h"), token_of(there.worker_id), ("transfer-encoding", "chunked")]
            connection.send_head("POST", "/mcp", headers)
            assert (await connection.head()).status == 200
            for word in (b"one", b"two", b"three"):
                connection.writer.write(b"%x\r\n%s\r\n" % (len(word), word))
                assert await connection.chunk() == word
            for _ in range(8):
                connection.writer.write(b"%x\r\n%s\r\n" % (MEGABYTE, b"m" * MEGABYTE))
                received = 0
                while received < MEGABYTE:
                    received += len(await connection.chunk())
            connection.writer.write(b"0\r\n\r\n")
            assert await connection.chunk() == b""

    async def test_a_client_that_leaves_before_its_end_ends_quietly(self, socket_dir: Path) -> None:
        async with watched_worker(socket_dir) as (worker, ended):
            async with await worker.connect() as connection:
                connection.send_head("POST", "/mcp", [("host", "h"), lost_token, ("content-length", "100000")])
                connection.writer.write(b'{"jsonrpc":"2.0"')
                await connection.writer.drain()
            assert await asyncio.wait_for(ended.get(), 5) == []


@asynccontextmanager
async def watched_worker(socket_dir: Path) -> AsyncIterator[tuple[Worker, asyncio.Queue[list[str]]]]:
    """A worker whose every request leaves, at its end, the types of the messages it sent, or its exception."""
    ended: asyncio.Queue[list[str]] = asyncio.Queue()

    def outside(app: ASGIApp) -> ASGIApp:
        async def watch(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            sent: list[str] = []

            async def note(message: Message) -> None:
                sent.append(message["type"])
                await send(message)

            try:
                await app(scope, receive, note)
            except BaseException as error:
                sent.append(repr(error))
                raise
            finally:
                ended.put_nowait(sent)

        return watch

    async with running_worker(make_app(), socket_dir, outside=outside, **ASKING) as worker:
        yield worker, ended


@pytest.mark.promise("jsonrpc-errors", "jsonrpc-only")
class TestForAnEndpointOfItsOwn:
    """The same translation is there for an application that answers on the MCP path itself."""

    def test_a_lost_session(self) -> None:
        plain = lost_session_reply(LostReason.WORKER_GONE, may_have_run=True)
        reply = jsonrpc_error_reply(json.dumps(CALL).encode(), plain)
        assert (reply.status_code, reply.headers[SESSION_LOST_HEADER]) == (200, "worker_gone")
        error = json.loads(bytes(reply.body))["error"]
        assert (error["code"], error["data"]) == (-32010, lost(may_have_run=True))

    @pytest.mark.parametrize("plain", [JSONResponse({"detail": "not now"}, 503), PlainTextResponse("not now", 503)])
    def test_another_refusal_in_json_or_text(self, plain: Response) -> None:
        reply = jsonrpc_error_reply(json.dumps(CALL).encode(), plain)
        error = {"code": -32011, "message": "not now", "data": {"status": 503}}
        assert json.loads(bytes(reply.body)) == {"jsonrpc": "2.0", "id": 7, "error": error}

    def test_what_is_no_message_leaves_the_reply_as_it_is(self) -> None:
        plain = lost_session_reply(LostReason.SESSION_EXPIRED)
        assert jsonrpc_error_reply(b"garbage", plain) is plain


def breaking_off(socket_dir: Path, owner: str, status: int, content_type: bytes, *, dies: bool) -> Any:
    """Return an owner's behaviour: it begins a reply so, and breaks it off, being killed or not."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = await take_request(reader, writer)
        end.begin(b"content-type: " + content_type, status=status)
        end.go_on(b" ")
        end.go_on(b" \n")
        await writer.drain()
        if dies:
            worker_socket_path(socket_dir, owner).unlink()
        writer.close()

    return behave


JSON_HEAD = (200, b"application/json")


@pytest.mark.promise("jsonrpc-errors")
@pytest.mark.parametrize("dies", [True, False])
async def test_a_reply_that_was_only_kept_alive_and_then_broken_off_ends_with_the_error(
    dies: bool, socket_dir: Path, worker: Worker, owner: str
) -> None:
    async with fake_owner(socket_dir, breaking_off(socket_dir, owner, *JSON_HEAD, dies=dies), owner):
        reply = await post(worker, CALL, token_of(owner))
    assert (reply.status, reply.complete, reply.body[:3]) == (200, True, b"  \n")
    error = reply.json()["error"]
    assert reply.json()["id"] == CALL["id"]
    assert error["code"] == (-32010 if dies else -32011)
    assert error["data"] == (lost(may_have_run=True) if dies else {"status": 502})


@pytest.mark.promise("broken-reply-shows")
@pytest.mark.parametrize("head", [(200, b"text/plain"), (202, b"application/json")])
async def test_any_other_reply_that_is_broken_off_stays_so(
    head: tuple[int, bytes], socket_dir: Path, worker: Worker, owner: str
) -> None:
    async with fake_owner(socket_dir, breaking_off(socket_dir, owner, *head, dies=True), owner):
        assert not (await post(worker, CALL, token_of(owner))).complete


@pytest.mark.promise("broken-reply-shows")
async def test_a_kept_alive_reply_to_what_is_no_request_stays_broken_off(
    socket_dir: Path, worker: Worker, owner: str
) -> None:
    async with fake_owner(socket_dir, breaking_off(socket_dir, owner, *JSON_HEAD, dies=True), owner):
        assert not (await post(worker, b"no JSON-RPC", token_of(owner))).complete


@pytest.mark.promise("jsonrpc-errors")
async def test_by_default_too_as_the_plain_status_can_no_longer_be_sent(socket_dir: Path, owner: str) -> None:
    async with running_workers(socket_dir, 1, **TOKENS) as (worker,):
        async with fake_owner(socket_dir, breaking_off(socket_dir, owner, *JSON_HEAD, dies=True), owner):
            reply = await post(worker, CALL, token_of(owner))
    assert (reply.complete, reply.json()["error"]["code"]) == (True, -32010)
