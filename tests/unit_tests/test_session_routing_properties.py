"""For any request and any reply: forwarded is as handled directly."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from nemo_gym.session_routing import create_socket_dir, remove_socket_dir
from nemo_gym.session_routing.forwarding import HopName
from tests.session_workers import METHODS, Reply, Worker, make_app, owned_cookie, running_workers

TOKEN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~"
RESERVED = {
    "connection", "content-length", "transfer-encoding", "host", "cookie", "upgrade", "te", "trailer", "keep-alive",
    "proxy-authenticate", "proxy-authorization", "proxy-connection", "expect", "x-nemo-gym-forwarded-client", "date",
    "server", "vary",
}  # fmt: skip

names = st.text(TOKEN, min_size=1, max_size=12).filter(lambda name: name.lower() not in RESERVED)
values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40).map(
    lambda value: value.strip(" \t\xa0\x85")
)
headers = st.lists(st.tuples(names, values), max_size=8)
path_pieces = st.one_of(
    st.text("abcXYZ0189-._~!$&'()*+,;=:@|[]", max_size=8),
    st.sampled_from(["%2f", "%2F", "%2e%2e", "..", ".", "%25", "%00", "%C3%A9", "%ff", "%20", "", "%3f", "%23"]),
)
targets = st.builds(
    lambda pieces, query: "/" + "/".join(pieces) + query,
    st.lists(path_pieces, max_size=6),
    st.one_of(st.just(""), st.lists(path_pieces, max_size=4).map(lambda parts: "?" + "&".join(parts))),
)
bodies = st.one_of(st.none(), st.binary(max_size=300), st.integers(60_000, 70_000).map(lambda size: b"b" * size))


async def make_reply(request: Request) -> Response:
    plan = json.loads(await request.body())
    chunks = [base64.b64decode(chunk) for chunk in plan["chunks"]]

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    response = (
        StreamingResponse(stream(), plan["status"]) if plan["stream"] else Response(b"".join(chunks), plan["status"])
    )
    response.raw_headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in plan["headers"]]
    return response


@pytest.fixture(scope="module")
async def pair(hop: HopName) -> AsyncIterator[tuple[Worker, Worker]]:
    socket_dir = create_socket_dir()
    routes: list[Any] = [Route("/make", make_reply, methods=["POST"]), WebSocketRoute("/talk", say_and_close)]
    async with running_workers(socket_dir, 2, lambda: make_app(*routes), limit=120) as (
        here,
        there,
    ):
        yield here, there
    remove_socket_dir(socket_dir)


def as_seen(reply: Reply) -> tuple[int, list[tuple[str, str]], dict[str, Any] | None]:
    seen = reply.json() if reply.body else None
    if seen is not None:
        seen["headers"] = [header for header in seen["headers"] if header[0] != "connection"]
        del seen["client"], seen["server"]
    kept = [header for header in reply.headers if header[0] not in {"date", "content-length"}]
    return reply.status, kept, seen


@pytest.mark.promise("request-unchanged", "target-untouched")
@settings(max_examples=120, deadline=None)
@given(method=st.sampled_from(METHODS), target=targets, headers=headers, body=bodies)
async def test_the_owner_sees_any_request_as_if_it_had_received_it(
    pair: tuple[Worker, Worker], method: str, target: str, headers: list[tuple[str, str]], body: bytes | None
) -> None:
    here, there = pair
    request: dict[str, Any] = {
        "method": method,
        "headers": headers,
        "body": body,
        "cookie": owned_cookie(there.worker_id),
    }
    direct, forwarded = await there.request(target, **request), await here.request(target, **request)
    assert as_seen(forwarded) == as_seen(direct)


@pytest.mark.promise("reply-unchanged")
@settings(max_examples=80, deadline=None)
@given(
    status=st.sampled_from([200, 201, 204, 206, 302, 304, 404, 410, 429, 500, 503, 599]),
    headers=headers,
    chunks=st.lists(st.binary(max_size=100), max_size=4),
    stream=st.booleans(),
)
async def test_the_client_gets_any_reply_as_if_the_owner_had_sent_it(
    pair: tuple[Worker, Worker], status: int, headers: list[tuple[str, str]], chunks: list[bytes], stream: bool
) -> None:
    here, there = pair
    if status in {204, 304}:
        chunks = []
    encoded = [base64.b64encode(chunk).decode() for chunk in chunks]
    plan = json.dumps({"status": status, "headers": headers, "chunks": encoded, "stream": stream}).encode()
    request: dict[str, Any] = {"method": "POST", "body": plan, "cookie": owned_cookie(there.worker_id)}
    replies = [await worker.request("/make", **request) for worker in (there, here)]
    for reply in replies:
        reply.headers = [header for header in reply.headers if header[0] != "date"]
    assert replies[0] == replies[1]
    assert replies[0].body == b"".join(chunks)


texts = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "close")
messages = st.lists(st.one_of(texts, st.binary()), max_size=6)
ends = st.tuples(
    st.one_of(st.sampled_from([1000, 1001, 1003, 1008, 1011, 1013]), st.integers(3000, 4999)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: len(text.encode()) <= 123),
)


async def say_and_close(websocket: WebSocket) -> None:
    """Echo what comes, until the client says how to close."""
    await websocket.accept()
    while (message := await websocket.receive()).get("text") != "close":
        await websocket.send({**message, "type": "websocket.send"})
    end = await websocket.receive_json()
    await websocket.close(*end)


@pytest.mark.promise("websocket-messages", "websocket-ends")
@settings(max_examples=60, deadline=None)
@given(messages=messages, end=ends)
async def test_a_websocket_passes_any_messages_and_any_end(
    pair: tuple[Worker, Worker], messages: list[str | bytes], end: tuple[int, str]
) -> None:
    here, there = pair
    headers = [("cookie", owned_cookie(there.worker_id))]
    async with connect(f"ws://127.0.0.1:{here.port}/talk", additional_headers=headers, proxy=None) as connection:
        for message in [*messages, "close", json.dumps(end)]:
            await connection.send(message)
        assert [await connection.recv() for _ in messages] == messages
        with pytest.raises(ConnectionClosed):
            await connection.recv()
    assert (connection.close_code, connection.close_reason) == end
