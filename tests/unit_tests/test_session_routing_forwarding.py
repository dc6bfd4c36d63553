"""A forwarded request and its reply are what they would have been without the hop."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.session_workers import METHODS, Reply, Worker, make_app, owned_cookie, running_workers

pytestmark = pytest.mark.usefixtures("hop")

MEGABYTE = 2**20


async def both(here: Worker, there: Worker, target: str, **request: Any) -> tuple[Reply, Reply]:
    """Return the replies to one request as its owner answers it, received by itself and by another worker."""
    cookie = owned_cookie(there.worker_id)
    return await there.request(target, cookie=cookie, **request), await here.request(target, cookie=cookie, **request)


def without(seen: dict[str, Any], *keys: str) -> dict[str, Any]:
    kept = {key: value for key, value in seen.items() if key not in keys}
    kept["headers"] = [header for header in kept["headers"] if header[0] != "connection"]
    return kept


@pytest.mark.promise("request-unchanged", "target-untouched")
async def test_the_target_passes_as_it_was_written(pair: tuple[Worker, Worker]) -> None:
    targets = [
        "/", "/a%2fb", "/a%2Fb%252f", "/%2e%2e/x", "/./a/../b", "//double//slash", "/a;p=1,2", "/%C3%A9%ff", "/a+b%20c",
        "/p?", "/p?a=1&a=2&b=%26%3d", "/p?a=b?c=d/e", "/p?q=%2F..%2f&%00", "/p?plain+plus%2Bplus", "/~a'(b)*c!$&=@:",
        "/p?[x]=y|z", "/" + "long/" * 2_000 + "?" + "q=v&" * 5_000,
    ]  # fmt: skip
    here, there = pair
    before = here.router.statistics().forwarded
    for target in targets:
        direct, forwarded = await both(here, there, target)
        assert direct.status == 200, target
        assert without(forwarded.json(), "client", "server") == without(direct.json(), "client", "server")
    assert here.router.statistics().forwarded == before + len(targets)


@pytest.mark.promise("request-unchanged")
async def test_every_method_passes(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    for method in METHODS:
        direct, forwarded = await both(here, there, "/m", method=method)
        assert (forwarded.status, forwarded.body == b"") == (direct.status, direct.body == b"")
        if direct.body:
            assert forwarded.json()["method"] == method


@pytest.mark.promise("request-unchanged", "hop-by-hop-only")
async def test_headers_pass_with_their_order_and_repetitions(pair: tuple[Worker, Worker]) -> None:
    headers = [
        ("X-First", "1"), ("accept", "*/*"), ("x-double", "a"), ("X-Then", "b, c"), ("x-double", "d"), ("x-empty", ""),
        ("accept-encoding", "gzip, br"), ("authorization", "Basic Zm9vOmJhcg=="), ("x-latin", "\xe9\xff"),
        ("x-utf8", "\xc3\xa9"), ("te", "trailers"), ("keep-alive", "timeout=5"), ("x-long", "v" * 50_000),
        ("x-forwarded-for", "192.0.2.1"), ("content-type", "text/x; a=b"), ("date", "then"), ("upgrade", "h2c"),
    ]  # fmt: skip
    hop_by_hop = {"te", "keep-alive", "connection", "upgrade"}
    here, there = pair
    direct, forwarded = await both(here, there, "/", headers=headers)
    end_to_end = [header for header in direct.json()["headers"] if header[0] not in hop_by_hop]
    assert ["x-latin", "\xe9\xff"] in end_to_end
    assert forwarded.json()["headers"] == end_to_end


@pytest.mark.promise("hop-by-hop-only")
@pytest.mark.parametrize("named", ["cookie", "keep-alive, X-Mine ,CONTENT-LENGTH", "host, content-type, authorization"])
async def test_what_connection_names_is_the_same_request_for_the_owner(pair: tuple[Worker, Worker], named: str) -> None:
    here, there = pair
    headers = [("connection", named), ("x-mine", "1"), ("content-type", "text/x"), ("authorization", "Basic Zg==")]
    direct, forwarded = await both(here, there, "/", method="POST", headers=headers, body=b"abc")
    assert forwarded.json()["worker"] == there.worker_id
    assert without(forwarded.json(), "client", "server") == without(direct.json(), "client", "server")


@pytest.mark.promise("hop-by-hop-only", "reaches-its-owner")
async def test_a_session_stays_whatever_connection_names(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    cookie = (await there.request("/seed", method="POST")).cookie
    for count, worker in enumerate((there, here, here, there), 1):
        reply = await worker.request("/count", method="POST", cookie=cookie, headers=[("connection", "cookie")])
        assert reply.json() == {"count": count, "worker": there.worker_id}


@pytest.mark.promise("hop-by-hop-only")
async def test_no_header_is_added(socket_dir: Path) -> None:
    async with running_workers(socket_dir) as (here, there), await here.connect() as connection:
        connection.send_head("POST", "/", [("cookie", owned_cookie(there.worker_id))])
        assert [name for name, _ in (await connection.reply()).json()["headers"]] == ["cookie"]


@pytest.mark.promise("large-reply-headers")
async def test_hundreds_of_large_reply_headers_pass(socket_dir: Path) -> None:
    async def many(_: Request) -> Response:
        response = Response("ok")
        response.headers["x-large"] = "v" * 200_000
        for number in range(500):
            response.headers.append(f"x-{number}", "v" * 50)
        return response

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/many", many))) as (here, there):
        direct, forwarded = await both(here, there, "/many")
        assert sorted(forwarded.headers)[5:] == sorted(direct.headers)[5:]
        assert len(forwarded.headers) == len(direct.headers) > 500


def replying(status: int, body: bytes = b"", **headers: str) -> Route:
    async def reply(_: Request) -> Response:
        response = Response(body, status_code=status)
        for name, value in headers.items():
            response.headers[name.replace("_", "-")] = value
        response.raw_headers.append((b"set-cookie", b"a=1"))
        response.raw_headers.append((b"set-cookie", b"b=2; Path=/x"))
        return response

    return Route(f"/reply/{status}", reply, methods=["GET", "HEAD"])


@pytest.mark.promise("reply-unchanged")
async def test_status_reply_headers_and_body_pass_untouched(socket_dir: Path) -> None:
    gzip_lookalike = b"\x1f\x8b not really compressed"
    routes = [
        replying(200, gzip_lookalike, content_encoding="gzip"), replying(201, b"{}", location="/x", etag='"1"'),
        replying(204), replying(302, location="/elsewhere"), replying(304, etag='"2"'), replying(404, b"no"),
        replying(422, b"[]", x_odd="\xe9"), replying(500, b"oh"), replying(599, b"?"), replying(410, b"own gone"),
    ]  # fmt: skip
    async with running_workers(socket_dir, 2, lambda: make_app(*routes)) as (here, there):
        for route in routes:
            for method in ("GET", "HEAD"):
                direct, forwarded = await both(here, there, route.path, method=method)
                assert forwarded == direct, (route.path, method)


@pytest.mark.promise("any-framing")
async def test_bodies_of_every_framing_pass(pair: tuple[Worker, Worker]) -> None:
    here, there = pair
    cookie = ("cookie", owned_cookie(there.worker_id))
    for size in (0, 1, 65_536, 65_537, MEGABYTE):
        body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        for method in ("POST", "GET", "DELETE"):
            direct, forwarded = await both(here, there, "/", method=method, body=body)
            assert base64.b64decode(forwarded.json()["body"]) == body
            assert forwarded.json()["headers"] == without(direct.json())["headers"]
    async with await here.connect() as connection:
        connection.send_head("PUT", "/", [("host", "h"), ("transfer-encoding", "chunked"), cookie])
        connection.writer.write(b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\n\r\n")
        seen = (await connection.reply()).json()
        assert base64.b64decode(seen["body"]) == b"abcde"
        assert [name for name, _ in seen["headers"]] == ["host", "transfer-encoding", "cookie"]


@pytest.mark.promise("any-framing")
async def test_a_body_that_the_client_offers_is_asked_for_by_the_owner_only(socket_dir: Path) -> None:
    async def refuse(_: Request) -> Response:
        return Response("too large", status_code=413)

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/refuse", refuse, methods=["PUT"]))) as (
        here,
        there,
    ):
        headers = [("cookie", owned_cookie(there.worker_id)), ("content-length", "5"), ("expect", "100-continue")]
        async with await here.connect() as connection:
            connection.send_head("PUT", "/refuse", headers)
            assert (await connection.reply()).status == 413
        async with await here.connect() as connection:
            connection.send_head("PUT", "/take", headers)
            assert (await connection.head()).status == 100
            connection.writer.write(b"hello")
            assert base64.b64decode((await connection.reply()).json()["body"]) == b"hello"


@pytest.mark.promise("any-framing")
@pytest.mark.parametrize("expectation", ["200-ok", "100-continue, x", '"100-continue"', ""])
async def test_an_expectation_that_offers_no_body_is_not_waited_with(
    pair: tuple[Worker, Worker], expectation: str
) -> None:
    here, there = pair
    for size in (3, 70_000):
        async with asyncio.timeout(5):
            direct, forwarded = await both(
                here, there, "/", method="PUT", headers=[("expect", expectation)], body=b"x" * size
            )
        assert without(forwarded.json(), "client", "server") == without(direct.json(), "client", "server")


@pytest.mark.promise("callers-address")
async def test_the_handler_sees_the_clients_address_as_if_it_had_accepted_it(socket_dir: Path) -> None:
    async with running_workers(socket_dir) as (here, there), await here.connect() as connection:
        own = list(connection.writer.get_extra_info("sockname"))
        connection.send_head("GET", "/", [("cookie", owned_cookie(there.worker_id)), ("host", "example.org:99")])
        seen = (await connection.reply()).json()
    assert seen["worker"] == there.worker_id
    assert (seen["client"], seen["server"]) == (own, ["127.0.0.1", here.port])
    assert (seen["scheme"], seen["root_path"]) == ("http", "")


@pytest.mark.promise("callers-address")
async def test_the_handler_sees_which_http_version_the_client_speaks(pair: tuple[Worker, Worker]) -> None:
    there = pair[1]
    for worker in pair:
        async with await worker.connect() as connection:
            connection.writer.write(f"GET / HTTP/1.0\r\ncookie: {owned_cookie(there.worker_id)}\r\n\r\n".encode())
            seen = (await connection.reply()).json()
        assert (seen["worker"], seen["http_version"]) == (there.worker_id, "1.0")
        assert [name for name, _ in seen["headers"]] == ["cookie"]


@pytest.mark.promise("private-header")
@pytest.mark.parametrize("value", ['[["203.0.113.9",1],null,"https","","1.1",null]', "garbage", "\xff"])
async def test_a_private_header_from_outside_is_removed_and_not_believed(
    pair: tuple[Worker, Worker], value: str
) -> None:
    here, there = pair
    headers = [("X-NeMo-Gym-Forwarded-Client", value), ("x-other", "1")]
    for worker in (here, there):
        seen = (await worker.request("/", cookie=owned_cookie(there.worker_id), headers=headers)).json()
        assert seen["client"][0] == "127.0.0.1"
        assert seen["scheme"] == "http"
        assert "x-nemo-gym-forwarded-client" not in dict(seen["headers"])
        assert dict(seen["headers"])["x-other"] == "1"


@pytest.mark.promise("lifespan-once")
async def test_the_lifespans_state_is_there_for_forwarded_requests(socket_dir: Path) -> None:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        yield {"greeting": "from the lifespan"}

    async def greet(request: Request) -> Response:
        return Response(request.state.greeting)

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/greet", greet), lifespan=lifespan)) as (
        here,
        there,
    ):
        direct, forwarded = await both(here, there, "/greet")
        assert forwarded.body == direct.body == b"from the lifespan"


@pytest.mark.promise("no-connection-limit")
async def test_three_hundred_slow_forwards_run_at_once(socket_dir: Path) -> None:
    waiting = 0
    everyone = asyncio.Event()

    async def meet(_: Request) -> Response:
        nonlocal waiting
        waiting += 1
        if waiting == 300:
            everyone.set()
        await everyone.wait()
        return Response("met")

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/meet", meet))) as (here, there):
        cookie = owned_cookie(there.worker_id)
        async with asyncio.timeout(20):
            replies = await asyncio.gather(*(here.request("/meet", cookie=cookie) for _ in range(300)))
    assert [reply.body for reply in replies] == [b"met"] * 300


class TestStreaming:
    @pytest.mark.promise("streams")
    async def test_an_event_reaches_the_client_when_the_owner_sends_it(self, socket_dir: Path) -> None:
        go_on = asyncio.Event()

        async def events(_: Request) -> Response:
            async def stream() -> AsyncIterator[bytes]:
                yield b"data: 1\n\n"
                await go_on.wait()
                yield b"data: 2\n\n"

            return StreamingResponse(stream(), media_type="text/event-stream")

        async with (
            running_workers(socket_dir, 2, lambda: make_app(Route("/events", events))) as (here, there),
            await here.connect() as connection,
        ):
            connection.send_head("GET", "/events", [("host", "h"), ("cookie", owned_cookie(there.worker_id))])
            assert (await connection.head()).status == 200
            assert await connection.chunk() == b"data: 1\n\n"
            go_on.set()
            assert await connection.chunk() == b"data: 2\n\n"
            assert await connection.chunk() == b""

    @pytest.mark.promise("streams")
    async def test_both_directions_flow_at_once(self, socket_dir: Path) -> None:
        class Echo:
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                more = True
                while more:
                    message = await receive()
                    more = message["more_body"]
                    await send({"type": "http.response.body", "body": message["body"], "more_body": more})

        async with (
            running_workers(socket_dir, 2, lambda: make_app(Route("/echo", Echo()))) as (here, there),
            await here.connect() as connection,
        ):
            headers = [("cookie", owned_cookie(there.worker_id)), ("transfer-encoding", "chunked")]
            connection.send_head("POST", "/echo", headers)
            assert (await connection.head()).status == 200
            for word in (b"one", b"two", b"three"):
                connection.writer.write(b"%x\r\n%s\r\n" % (len(word), word))
                assert await connection.chunk() == word
            connection.writer.write(b"0\r\n\r\n")
            assert await connection.chunk() == b""

    @pytest.mark.promise("back-pressure")
    async def test_a_download_waits_for_a_client_that_does_not_read(self, socket_dir: Path) -> None:
        sent = 0
        total = 64 * MEGABYTE

        async def download(_: Request) -> Response:
            async def stream() -> AsyncIterator[bytes]:
                nonlocal sent
                while sent < total:
                    sent += MEGABYTE
                    yield bytes(MEGABYTE)

            return StreamingResponse(stream())

        async with (
            running_workers(socket_dir, 2, lambda: make_app(Route("/download", download))) as (here, there),
            await here.connect() as connection,
        ):
            connection.reading.pause_reading()
            connection.send_head("GET", "/download", [("cookie", owned_cookie(there.worker_id))])
            await settled(lambda: sent)
            assert 0 < sent < 24 * MEGABYTE
            connection.reading.resume_reading()
            await connection.head()
            received = 0
            while chunk := await connection.chunk():
                received += len(chunk)
            assert received == total

    @pytest.mark.promise("back-pressure")
    async def test_an_upload_waits_for_a_handler_that_does_not_read(self, socket_dir: Path) -> None:
        total = 64 * MEGABYTE
        read_on = asyncio.Event()

        async def upload(request: Request) -> Response:
            await read_on.wait()
            digest = hashlib.sha256()
            async for chunk in request.stream():
                digest.update(chunk)
            return Response(digest.hexdigest())

        async with (
            running_workers(socket_dir, 2, lambda: make_app(Route("/upload", upload, methods=["PUT"]))) as (
                here,
                there,
            ),
            await here.connect() as connection,
        ):
            written = 0

            async def write() -> None:
                nonlocal written
                while written < total:
                    connection.writer.write(bytes(MEGABYTE))
                    await connection.writer.drain()
                    written += MEGABYTE

            headers = [("cookie", owned_cookie(there.worker_id)), ("content-length", str(total))]
            connection.send_head("PUT", "/upload", headers)
            writing = asyncio.create_task(write())
            await settled(lambda: written)
            assert written < 24 * MEGABYTE
            read_on.set()
            await writing
            assert (await connection.reply()).body.decode() == hashlib.sha256(bytes(total)).hexdigest()

    @pytest.mark.promise("streams")
    async def test_a_reply_before_the_end_of_the_upload_reaches_the_client(self, socket_dir: Path) -> None:
        async def hasty(_: Request) -> Response:
            return Response("enough")

        app = lambda: make_app(Route("/hasty", hasty, methods=["PUT"]))  # noqa: E731
        async with running_workers(socket_dir, 2, app) as (here, there):
            cookie = owned_cookie(there.worker_id)
            async with await here.connect() as connection:
                connection.send_head("PUT", "/hasty", [("cookie", cookie), ("content-length", str(MEGABYTE))])
                connection.writer.write(b"x" * 70_000)
                assert (await connection.reply()).body == b"enough"
            assert (await here.request("/after", cookie=cookie)).json()["raw_path"] == "/after"


async def settled(value: Any) -> None:
    """Return when `value()` has not changed for a while."""
    before = None
    while before != value() or not value():
        before = value()
        await asyncio.sleep(0.15)


@pytest.mark.promise("client-leaves")
class TestClientGoesAway:
    """The owner's handler learns it through the connection that the forwarding worker closes."""

    async def test_while_it_still_uploads(self, socket_dir: Path) -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def upload(request: Request) -> Response:
            try:
                async for _ in request.stream():
                    begun.set()
            except ClientDisconnect:
                left.set()
            return Response()

        async with running_workers(socket_dir, 2, lambda: make_app(Route("/up", upload, methods=["PUT"]))) as (
            here,
            there,
        ):
            async with await here.connect() as connection:
                cookie = owned_cookie(there.worker_id)
                connection.send_head("PUT", "/up", [("cookie", cookie), ("content-length", str(MEGABYTE))])
                connection.writer.write(b"x" * 70_000)
                await asyncio.wait_for(begun.wait(), 5)
            await asyncio.wait_for(left.wait(), 5)

    @pytest.mark.parametrize("body", [None, b"small", b"x" * MEGABYTE])
    async def test_while_it_waits(self, socket_dir: Path, body: bytes | None) -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def wait(request: Request) -> Response:
            await request.body()
            begun.set()
            while not await request.is_disconnected():  # noqa: ASYNC110, the request has no event
                await asyncio.sleep(0.01)
            left.set()
            return Response()

        async with running_workers(socket_dir, 2, lambda: make_app(Route("/wait", wait, methods=["POST"]))) as (
            here,
            there,
        ):
            request = here.request("/wait", method="POST", body=body, cookie=owned_cookie(there.worker_id))
            client = asyncio.create_task(request)
            await asyncio.wait_for(begun.wait(), 5)
            client.cancel()
            await asyncio.wait_for(left.wait(), 5)

    async def test_while_the_reply_streams(self, socket_dir: Path) -> None:
        left = asyncio.Event()

        async def events(_: Request) -> Response:
            async def stream() -> AsyncIterator[bytes]:
                try:
                    yield b"first"
                    await asyncio.Event().wait()
                finally:
                    left.set()

            return StreamingResponse(stream())

        async with running_workers(socket_dir, 2, lambda: make_app(Route("/events", events))) as (here, there):
            async with await here.connect() as connection:
                connection.send_head("GET", "/events", [("cookie", owned_cookie(there.worker_id))])
                await connection.head()
                assert await connection.chunk() == b"first"
            await asyncio.wait_for(left.wait(), 5)
