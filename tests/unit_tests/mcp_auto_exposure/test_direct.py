"""A plain tool call is answered without the SDK's transport, in the same words as through it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nemo_gym.mcp_auto_exposure import TOKEN_HEADER
from tests.mcp_support import LEGACY_VERSIONS, Running, make_app, make_server, running
from tests.mcp_tools import Counted

# The transport takes this one as well, but it is not the plain form.
DIRECT, BY_TRANSPORT = "application/json, text/event-stream", "*/*"


@pytest.fixture(scope="module")
async def server() -> Counted:
    return make_server(kind=Counted)  # type: ignore[return-value]


@pytest.fixture(scope="module")
async def served(server: Counted) -> AsyncIterator[Running]:
    async with running(make_app(server)) as it:
        yield it


def call(params: Any, **fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params, **fields}).encode()


MOVE = {"name": "move", "arguments": {"steps": 3, "note": "ü"}}
BODIES: dict[str, bytes] = {
    "good": call(MOVE),
    "an id of text": call(MOVE, id="7"),
    "with a progress token": call({**MOVE, "_meta": {"progressToken": "p"}}),
    "wrong arguments": call({"name": "move", "arguments": {"steps": "many"}}),
    "a tool that fails": call({"name": "crash"}),
    "an unknown tool": call({"name": "nothing"}),
    "no name": call({"arguments": {}}),
    "arguments of another kind": call({"name": "move", "arguments": [1]}),
    "no parameters": b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call"}',
    "a notification": b'{"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "move"}}',
    "a batch": b"[" + call(MOVE) + b"]",
    "another method": call({}, method="tools/list"),
    "a reply": b'{"jsonrpc": "2.0", "id": 7, "result": {}}',
    "another protocol": call(MOVE, jsonrpc="1.0"),
    "no JSON": b"{",
    "a lone surrogate": call({"name": "\ud800"}),
}
PLAIN = {"good", "an id of text", "with a progress token", "wrong arguments", "a tool that fails", "an unknown tool"}


async def post(served: Running, body: bytes, token: str | None, **headers: str) -> tuple[Any, ...]:
    sent = {"content-type": "application/json", **headers} | ({TOKEN_HEADER: token} if token else {})
    reply = await served.http.post(f"{served.url}/mcp", content=body, headers=sent)
    return reply.status_code, reply.headers.get("content-type"), reply.content


@pytest.mark.parametrize("name", BODIES)
async def test_the_reply_is_that_of_the_transport(name: str, served: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcp.server.streamable_http")
    token = await served.token()
    for given in (token, None):
        for version in LEGACY_VERSIONS:
            headers = {"mcp-protocol-version": version}
            caplog.clear()
            direct = await post(served, BODIES[name], given, accept=DIRECT, **headers)
            went_through_the_transport = any(record.name.startswith("mcp.server") for record in caplog.records)
            assert went_through_the_transport is (name not in PLAIN)
            assert direct == await post(served, BODIES[name], given, accept=BY_TRANSPORT, **headers)


async def test_a_client_that_names_no_version_is_answered_in_the_same_words(served: Running, server: Counted) -> None:
    token = await served.token()
    server._runs.clear()
    direct, other = [await post(served, call(MOVE), token, accept=accept) for accept in (DIRECT, BY_TRANSPORT)]
    assert direct == other
    assert direct[0] == 200
    assert server._runs["move"] == 2


@pytest.mark.parametrize(
    "headers",
    [{"accept": "text/html"}, {"content-type": "text/plain"}, {"mcp-protocol-version": "1999-01-01"}],
    ids=lambda headers: next(iter(headers)),
)
async def test_a_request_that_is_not_quite_right_is_the_transports_to_refuse(
    headers: dict[str, str], served: Running
) -> None:
    status, *_ = await post(served, call(MOVE), await served.token(), **{"accept": DIRECT, **headers})
    assert 400 <= status < 500
