"""Requests that carry an MCP session token: whose they are, on the MCP path and elsewhere."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.session_routing import (
    SESSION_LOST_HEADER,
    SESSION_OWNER_KEY,
    TokenHeader,
    create_socket_dir,
    read_token_header,
    remove_socket_dir,
    route_path,
)
from nemo_gym.session_routing.forwarding import HopName
from tests.session_workers import (
    FORTNIGHT,
    TOKEN_HEADER,
    TOKENS,
    Worker,
    make_app,
    owned_cookie,
    running_worker,
    running_workers,
    signed_token,
    token_of,
)

GONE = "b" * 32


@pytest.fixture(scope="module")
async def pair(hop: HopName) -> AsyncIterator[tuple[Worker, Worker]]:
    path = create_socket_dir()
    async with running_workers(path, limit=120, **TOKENS) as (here, there):
        yield here, there
    remove_socket_dir(path)


@pytest.mark.promise("mcp-token")
class TestToken:
    async def test_a_call_runs_where_its_token_was_made(self, socket_dir: Path) -> None:
        calls: list[str] = []

        async def mint(request: Request) -> Response:
            return JSONResponse({"token": token_of(request.app.state.worker_id)[1]})

        async def call(request: Request) -> Response:
            calls.append(request.app.state.worker_id)
            return Response(await request.body())

        routes = [Route("/mint", mint, methods=["POST"]), Route("/mcp", call, methods=["POST"])]
        async with running_workers(socket_dir, 2, lambda: make_app(*routes), **TOKENS) as (here, there):
            token = (await there.request("/mint", method="POST")).json()["token"]
            reply = await here.request("/mcp", method="POST", headers=[(TOKEN_HEADER, token)], body=b"{}")
            assert (reply.status, reply.body, calls) == (200, b"{}", [there.worker_id])
            assert (here.router.statistics().forwarded, here.router.statistics().served_here) == (1, 0)
            assert (there.router.statistics().arrived, there.router.statistics().served_here) == (1, 2)

    async def test_it_decides_without_a_cookie_on_every_path(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        for path in ("/mcp", "/tool", "/"):
            assert await answers(here, path, token_of(there.worker_id)) == there.worker_id, path

    async def test_on_the_mcp_path_it_decides_over_a_cookie_and_elsewhere_the_cookie_does(
        self, pair: tuple[Worker, Worker]
    ) -> None:
        here, there = pair
        of_here, of_there = owned_cookie(here.worker_id), owned_cookie(there.worker_id)
        assert await answers(here, "/mcp", token_of(there.worker_id), cookie=of_here) == there.worker_id
        assert await answers(here, "/mcp", token_of(here.worker_id), cookie=of_there) == here.worker_id
        assert await answers(here, "/tool", token_of(there.worker_id), cookie=of_here) == here.worker_id
        assert await answers(here, "/tool", token_of(here.worker_id), cookie=of_there) == there.worker_id

    async def test_a_cookie_alone_decides_on_the_mcp_path_too(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        assert await answers(here, "/mcp", cookie=owned_cookie(there.worker_id)) == there.worker_id

    async def test_the_cookie_of_another_worker_is_not_stamped_over(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        headers = [token_of(here.worker_id)]
        reply = await here.request("/mcp/seed", headers=headers, cookie=owned_cookie(there.worker_id))
        assert reply.all("set-cookie") == []

    async def test_it_reaches_the_owner_as_it_was_sent(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        name, token = token_of(there.worker_id)
        seen = (await here.request("/mcp", method="POST", headers=[(name, token)], body=b"{}")).json()
        assert [value for key, value in seen["headers"] if key == name.lower()] == [token]
        assert (seen["worker"], base64.b64decode(seen["body"])) == (there.worker_id, b"{}")

    async def test_without_a_token_header_to_read_none_is_read(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir) as (here, there):
            assert await answers(here, "/mcp", token_of(there.worker_id)) == here.worker_id


BAD_TOKENS = {
    "garbage": "garbage",
    "dots": "..",
    "not ascii": "é",
    "oversized": "x" * 20_000,
    "foreign": signed_token({SESSION_OWNER_KEY: GONE}, secret="foreign"),
    "cut off": signed_token({SESSION_OWNER_KEY: GONE})[:-3],
    "of a single worker": signed_token({"sid": "a"}),
    "of a single worker, expired": signed_token({"sid": "a"}, age=FORTNIGHT + 5),
    "no payload": signed_token(b"!"),
    "no payload, expired": signed_token(b"!", age=FORTNIGHT + 5),
    "no mapping": signed_token([SESSION_OWNER_KEY]),
    "null": signed_token(None),
    "a path": signed_token({SESSION_OWNER_KEY: "../" + GONE}),
    "a list": signed_token({SESSION_OWNER_KEY: [GONE]}),
    "capitals": signed_token({SESSION_OWNER_KEY: GONE.upper()}),
}


@pytest.mark.promise("bad-token")
@pytest.mark.parametrize("token", BAD_TOKENS.values(), ids=BAD_TOKENS)
async def test_a_bad_token_is_no_owner(pair: tuple[Worker, Worker], token: str) -> None:
    here, there = pair
    assert await answers(here, "/mcp", (TOKEN_HEADER, token)) == here.worker_id
    assert await answers(here, "/tool", (TOKEN_HEADER, token)) == here.worker_id
    assert await answers(here, "/mcp", (TOKEN_HEADER, token), cookie=owned_cookie(there.worker_id)) == here.worker_id


@pytest.mark.promise("token-header")
class TestTokenHeader:
    @pytest.mark.parametrize("blank", ["", " ", "\t "])
    async def test_a_blank_one_is_as_none(self, pair: tuple[Worker, Worker], blank: str) -> None:
        here, there = pair
        assert await answers(here, "/mcp", (TOKEN_HEADER, blank), cookie=owned_cookie(there.worker_id)) == (
            there.worker_id
        )
        assert await answers(here, "/mcp", (TOKEN_HEADER, blank)) == here.worker_id

    async def test_more_than_one_names_no_owner(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        token = token_of(there.worker_id)
        of_there = owned_cookie(there.worker_id)
        for other in (token, token_of(here.worker_id), (TOKEN_HEADER, "garbage"), (TOKEN_HEADER, "")):
            for headers in ([token, other], [other, token], [token, ("x-between", "1"), other]):
                assert await answers(here, "/mcp", *headers) == here.worker_id
                assert await answers(here, "/tool", *headers) == here.worker_id
                assert await answers(here, "/mcp", *headers, cookie=of_there) == here.worker_id
                assert await answers(here, "/tool", *headers, cookie=of_there) == there.worker_id

    async def test_two_in_one_line_are_no_token(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        name, token = token_of(there.worker_id)
        assert await answers(here, "/mcp", (name, f"{token}, {token}")) == here.worker_id

    async def test_its_name_is_known_in_any_case(self, pair: tuple[Worker, Worker], socket_dir: Path) -> None:
        here, there = pair
        _, token = token_of(there.worker_id)
        for name in (TOKEN_HEADER.lower(), TOKEN_HEADER.upper(), "x-sEssIon-toKen"):
            assert await answers(here, "/mcp", (name, token)) == there.worker_id

        def outside(app: ASGIApp) -> ASGIApp:
            async def shout(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["type"] == "http":
                    named = [(name.upper() if b"token" in name else name, value) for name, value in scope["headers"]]
                    scope["headers"] = named
                await app(scope, receive, send)

            return shout

        async with running_worker(make_app(), socket_dir, outside=outside, **TOKENS) as worker:
            reply = await worker.request("/mcp", headers=[token_of(GONE)])
            assert reply.status == 410

    @pytest.mark.parametrize(
        ("headers", "outcome"),
        [
            ([], TokenHeader(None)),
            ([(b"x-other", b"1")], TokenHeader(None)),
            ([(b"x-session-token", b" \t")], TokenHeader(None)),
            ([(b"x-session-token", b" a.b ")], TokenHeader("a.b")),
            ([(b"X-SESSION-TOKEN", b"\xe9")], TokenHeader("é")),
            ([(b"x-session-token", b"a"), (b"X-Session-Token", b"a")], TokenHeader(None, doubled=True)),
            ([(b"x-session-token", b""), (b"x-session-token", b"")], TokenHeader(None, doubled=True)),
        ],
    )
    def test_the_endpoint_reads_it_as_the_router_does(
        self, headers: list[tuple[bytes, bytes]], outcome: TokenHeader
    ) -> None:
        assert read_token_header(headers, TOKEN_HEADER) == outcome


def mounted(app: ASGIApp) -> ASGIApp:
    """Mount an application at `/prefix`; its lifespan runs with the outer one's."""
    outer = Starlette(routes=[Mount("/prefix", app=app)])

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["type"] == "lifespan" else outer)(scope, receive, send)

    return call


@pytest.mark.promise("mcp-path")
class TestMcpPath:
    """Where the token decides over the cookie is the MCP path."""

    async def test_it_is_with_and_without_a_slash_and_below(self, pair: tuple[Worker, Worker]) -> None:
        here, there = pair
        for path in ("/mcp", "/mcp?q=/x", "/mcp/", "/mcp//", "/mcp/x", "/mcp/x/y", "/%6Dcp"):
            assert await self.is_mcp(here, there, path), path
        for path in ("/mcpx", "/mc", "/", "/x/mcp", "//mcp", "/MCP", "/mcp%20", "/mcp%2"):
            assert not await self.is_mcp(here, there, path), path

    @pytest.mark.parametrize(
        ("around", "prefix"),
        [({"root_path": "/prefix"}, ""), ({"outside": mounted}, "/prefix")],
        ids=["root path", "mount"],
    )
    async def test_it_is_behind_a_prefix_too(self, socket_dir: Path, around: dict[str, Any], prefix: str) -> None:
        async with AsyncExitStack() as stack:
            here, there = [
                await stack.enter_async_context(running_worker(make_app(), socket_dir, **around, **TOKENS))
                for _ in range(2)
            ]
            for path in ("/mcp", "/mcp/", "/mcp/x"):
                assert await self.is_mcp(here, there, prefix + path), path
            for path in ("/mcpx", "/prefix/mcp", "/x"):
                assert not await self.is_mcp(here, there, prefix + path), path
            seen = (await here.request(prefix + "/mcp", headers=[token_of(there.worker_id)])).json()
            assert (seen["worker"], seen["path"], seen["root_path"]) == (there.worker_id, "/prefix/mcp", "/prefix")

    async def test_a_root_path_that_a_proxy_has_taken_off_does_not_matter(self, socket_dir: Path) -> None:
        def outside(app: ASGIApp) -> ASGIApp:
            async def say_root_path(scope: Scope, receive: Receive, send: Send) -> None:
                scope["root_path"] = "/prefix"
                await app(scope, receive, send)

            return say_root_path

        async with (
            running_worker(make_app(), socket_dir, outside=outside, **TOKENS) as here,
            running_worker(make_app(), socket_dir, outside=outside, **TOKENS) as there,
        ):
            assert await self.is_mcp(here, there, "/mcp")
            assert not await self.is_mcp(here, there, "/prefixmcp")

    async def test_it_may_be_another(self, socket_dir: Path) -> None:
        async with running_workers(socket_dir, mcp_path="/tools/mcp/", **TOKENS) as (here, there):
            assert await self.is_mcp(here, there, "/tools/mcp")
            assert not await self.is_mcp(here, there, "/mcp")

    @pytest.mark.parametrize(
        ("root_path", "path", "rest"),
        [
            ("", "/mcp", "/mcp"),
            ("/p", "/p/mcp", "/mcp"),
            ("/p", "/p", ""),
            ("/p", "/px", "/px"),
            ("/p", "/mcp", "/mcp"),
            ("/p", "/p/p/mcp", "/p/mcp"),
        ],
    )
    def test_the_endpoint_sees_the_path_as_the_router_does(self, root_path: str, path: str, rest: str) -> None:
        assert route_path({"type": "http", "path": path, "root_path": root_path}) == rest
        assert route_path({"type": "http", "path": root_path + path}) == root_path + path

    async def is_mcp(self, here: Worker, there: Worker, path: str) -> bool:
        owner = await answers(here, path, token_of(there.worker_id), cookie=owned_cookie(here.worker_id))
        return owner == there.worker_id


class TestLost:
    @pytest.mark.promise("expired-is-410", "typed-410")
    @pytest.mark.parametrize("age", [FORTNIGHT + 5, -60])
    async def test_a_token_out_of_its_time_is_an_expired_session(self, pair: tuple[Worker, Worker], age: int) -> None:
        here, there = pair
        before = here.router.statistics()
        for owner in (here.worker_id, there.worker_id, GONE):
            for path in ("/mcp", "/tool"):
                reply = await here.request(path, method="POST", headers=[token_of(owner, age=age)], body=b"{}")
                assert (reply.status, reply.all(SESSION_LOST_HEADER)) == (410, ["session_expired"])
                assert "token" in reply.json()["detail"]
        after = here.router.statistics()
        assert (after.lost, after.served_here) == (before.lost + 6, before.served_here)

    @pytest.mark.promise("gone-is-410")
    async def test_a_token_of_a_worker_that_is_gone_gives_410(self, pair: tuple[Worker, Worker]) -> None:
        here, _ = pair
        before = here.router.statistics().lost
        for method in ("GET", "POST", "DELETE"):
            reply = await here.request("/mcp", method=method, headers=[token_of(GONE)], body=b"{}")
            assert (reply.status, reply.all(SESSION_LOST_HEADER)) == (410, ["worker_gone"])
        assert here.router.statistics().lost == before + 3


def streaming(stream: Callable[[], AsyncIterator[bytes]]) -> Callable[[], Starlette]:
    async def call(request: Request) -> Response:
        await request.body()
        return StreamingResponse(stream(), media_type="text/event-stream")

    return lambda: make_app(Route("/mcp", call, methods=["POST"]))


@pytest.mark.promise("streams", "client-leaves", "jsonrpc-streams")
@pytest.mark.parametrize("as_jsonrpc", [False, True])
async def test_events_stream_through_the_hop_and_a_client_that_leaves_ends_them(
    socket_dir: Path, as_jsonrpc: bool
) -> None:
    go_on, left = asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await go_on.wait()
            yield b"data: 2\n\n"
            await asyncio.Event().wait()
        finally:
            left.set()

    options = {**TOKENS, "mcp_errors_as_jsonrpc": as_jsonrpc}
    async with running_workers(socket_dir, 2, streaming(stream), **options) as (here, there):
        async with await here.connect() as connection:
            headers = [("host", "h"), token_of(there.worker_id), ("content-length", "2")]
            connection.send_head("POST", "/mcp", headers)
            connection.writer.write(b"{}")
            head = await connection.head()
            assert (head.status, head.all("content-type")) == (200, ["text/event-stream; charset=utf-8"])
            assert await connection.chunk() == b"data: 1\n\n"
            assert not left.is_set()
            go_on.set()
            assert await connection.chunk() == b"data: 2\n\n"
        await asyncio.wait_for(left.wait(), 5)
        assert there.router.statistics().arrived == 1


async def answers(worker: Worker, path: str, *headers: tuple[str, str], cookie: str | None = None) -> str:
    """Return which worker's handler a request to `worker` meets."""
    reply = await worker.request(path, headers=list(headers), cookie=cookie)
    assert reply.status == 200
    return str(reply.json()["worker"])
