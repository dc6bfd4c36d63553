"""The endpoint as clients of every protocol version meet it, with good messages and bad ones."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from nemo_gym import __version__
from nemo_gym.mcp_auto_exposure import TOKEN_HEADER
from tests.mcp_support import (
    ERAS,
    LEGACY_VERSIONS,
    MODERN_VERSION,
    VERSIONS,
    Running,
    in_process,
    make_app,
    make_server,
    running,
)

JSON = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
FOREIGN_SESSIONS = ["0" * 32, "not ours", "é", "x" * 5000, ""]


def add_tool(app: FastAPI) -> None:
    app.post("/tool")(lambda: "done")


@pytest.fixture(scope="module")
async def app() -> AsyncIterator[Running]:
    async with in_process(make_app(make_server(add_tool))) as it:
        yield it


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Running]:
    async with running(make_app(make_server(add_tool))) as it:
        yield it


@pytest.mark.parametrize("version", LEGACY_VERSIONS)
async def test_initialize_negotiates_and_gives_each_client_an_id_of_its_own(version: str, app: Running) -> None:
    rpc, other = await app.rpc(version), await app.rpc(version)
    reply = await rpc.initialize()
    result = reply.json()["result"]
    assert result["protocolVersion"] == version
    assert result["serverInfo"]["name"] == "toolbox"
    assert result["serverInfo"]["version"] == __version__
    assert "tools" in result["capabilities"]
    await other.initialize()
    assert rpc.session_id
    assert rpc.session_id != other.session_id
    assert (await rpc.send("notifications/initialized")).status_code == 202
    assert (await rpc.call("tool")).json() == "done"


async def test_discovery_needs_no_handshake(app: Running) -> None:
    result = await (await app.rpc(MODERN_VERSION, token=None)).request("server/discover")
    assert MODERN_VERSION in result["supportedVersions"]
    assert "tools" in result["capabilities"]


@pytest.mark.parametrize("version", LEGACY_VERSIONS)
async def test_ping_is_answered(version: str, app: Running) -> None:
    assert await (await app.rpc(version)).request("ping") == {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("session_id", FOREIGN_SESSIONS)
async def test_any_mcp_session_id_is_accepted(session_id: str, version: str, app: Running) -> None:
    rpc = await app.rpc(version)
    header = [(b"mcp-session-id", session_id.encode("utf-8"))]
    assert (await rpc.call("tool", headers=header)).json() == "done"
    (tool,) = (await rpc.request("tools/list", headers=header))["tools"]
    assert tool["name"] == "tool"


@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
@pytest.mark.parametrize("version", ERAS)
async def test_a_trailing_slash_is_the_endpoint_too(path: str, version: str, served: Running) -> None:
    rpc = await served.rpc(version)
    rpc.url = served.url + path
    assert (await rpc.call("tool")).json() == "done"


@pytest.mark.parametrize("path", ["/mcp/x", "/mcp//", "//mcp", "/MCP", "/mcpx", "/x/mcp"])
async def test_other_paths_are_not_the_endpoint(path: str, app: Running) -> None:
    assert (await app.http.get(app.url + path)).status_code == 404


@pytest.mark.parametrize(
    ("method", "status"),
    [("GET", 405), ("HEAD", 405), ("PUT", 405), ("PATCH", 405), ("TRACE", 405), ("OPTIONS", 204), ("DELETE", 204)],
)
@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream", "mcp-session-id": "a", "last-event-id": "1"}])
async def test_other_methods_hold_nothing_open(
    method: str, status: int, headers: dict[str, str], served: Running
) -> None:
    reply = await served.http.request(method, f"{served.url}/mcp", headers=headers)
    assert reply.status_code == status
    assert reply.content == b""
    if method != "DELETE":
        assert reply.headers["allow"] == "POST, DELETE, OPTIONS"


async def test_hundreds_of_bare_requests_leave_no_session_and_no_task(served: Running) -> None:
    token = await served.token()
    await (await served.rpc(ERAS[0])).call("tool")
    before = asyncio.all_tasks()

    async def bare(number: int) -> None:
        method = ("GET", "HEAD", "OPTIONS", "DELETE")[number % 4]
        headers = {TOKEN_HEADER: token} if number % 3 else {}
        if number % 5:
            headers |= {"accept": "text/event-stream", "mcp-session-id": str(number)}
        path = "/mcp" if number % 2 else "/mcp/"
        reply = await served.http.request(method, served.url + path, headers=headers)
        assert "set-cookie" not in reply.headers
        assert "mcp-session-id" not in reply.headers

    for _ in range(8):
        await asyncio.gather(*(bare(number) for number in range(60)))
    await until_only(before)


async def until_only(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until no task runs but these; a connection's own end a moment after its reply."""
    async with asyncio.timeout(10):
        while left := {task for task in asyncio.all_tasks() - tasks if task is not asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.01)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_hundred_posts_leave_no_task_and_no_cookie(version: str, served: Running) -> None:
    rpc = await served.rpc(version)
    before = asyncio.all_tasks()
    for number in range(25):
        for reply in (
            await rpc.send("tools/call", {"name": "tool"}, id=number),
            await rpc.send("tools/list", id=number),
            await rpc.send("notifications/initialized"),
            await rpc.initialize(),
        ):
            assert "set-cookie" not in reply.headers
    gc.collect()
    await until_only(before)


BAD_MESSAGES = {
    "nothing": (b"", 400),
    "half": (b'{"jsonrpc": "2.0", "id": 1,', 400),
    "not utf-8": (b"\xff\xfe", 400),
    "a text": (b'"tools/list"', 400),
    "no method": (b'{"jsonrpc": "2.0", "id": 1}', 400),
    "no version": (b'{"id": 1, "method": "tools/list"}', 400),
    "a batch": (b'[{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]', 400),
    "an empty batch": (b"[]", 400),
    "an answer to nothing": (b'{"jsonrpc": "2.0", "id": {}, "result": {}}', 400),
    "deep": (b"[" * 100_000, 400),
}


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("kind", BAD_MESSAGES)
async def test_what_is_no_message_is_a_bad_request(kind: str, version: str, app: Running) -> None:
    body, status = BAD_MESSAGES[kind]
    rpc = await app.rpc(version)
    reply = await rpc.http.post(rpc.url, content=body, headers=rpc.headers("tools/list"))
    assert reply.status_code == status
    assert "error" in reply.json()


@pytest.mark.parametrize("version", ERAS)
async def test_an_unknown_method_is_a_jsonrpc_error(version: str, app: Running) -> None:
    for method in ("tools/nope", "resources/list"):
        reply = await (await app.rpc(version)).send(method, id=3)
        assert reply.json()["error"]["code"] == -32601, method
        assert reply.json()["id"] == 3


async def test_a_subscription_is_refused_at_once_and_opens_no_stream(served: Running) -> None:
    before = asyncio.all_tasks()
    rpc = await served.rpc(MODERN_VERSION)
    for params in ({}, {"notifications": {"toolsListChanged": True}}):
        reply = await rpc.send("subscriptions/listen", params, id=3)
        assert "error" in reply.json()
    await until_only(before)


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("params", [{}, {"name": 3}, {"name": "tool", "arguments": [1]}])
async def test_invalid_parameters_are_a_jsonrpc_error(params: Any, version: str, app: Running) -> None:
    rpc = await app.rpc(version)
    headers = rpc.headers("tools/call", "tool")
    reply = await rpc.http.post(rpc.url, json=rpc.message("tools/call", params, id=3), headers=headers)
    assert "error" in reply.json()


@pytest.mark.parametrize("version", ERAS)
async def test_an_unknown_tool_is_a_tool_error(version: str, app: Running) -> None:
    for name in ("nope", "x" * 1000, "seed_session", "verify", "health", "../tool"):
        result = await (await app.rpc(version)).call(name)
        assert (result.is_error, result.status) == (True, 404)
        assert result.text == f"There is no tool '{name[:100]}'."


async def test_an_unsupported_protocol_version_is_told(app: Running) -> None:
    rpc = await app.rpc(MODERN_VERSION)
    headers = rpc.headers("tools/list") | {"mcp-protocol-version": "2999-01-01"}
    message = json.dumps(rpc.message("tools/list", id=1)).replace(MODERN_VERSION, "2999-01-01")
    reply = await app.http.post(rpc.url, content=message, headers=headers)
    assert reply.status_code == 400
    assert MODERN_VERSION in reply.json()["error"]["data"]["supported"]


async def test_without_a_protocol_version_the_oldest_kind_of_client_is_served(app: Running) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    reply = await app.http.post(f"{app.url}/mcp", json=body, headers=JSON)
    assert [tool["name"] for tool in reply.json()["result"]["tools"]] == ["tool"]


@pytest.mark.parametrize("accept", ["application/json", "*/*", "application/*", "application/json;q=0.9, text/plain"])
async def test_a_client_need_not_take_event_streams(accept: str, app: Running) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    reply = await app.http.post(f"{app.url}/mcp", json=body, headers={**JSON, "accept": accept})
    assert reply.status_code == 200


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("accept", ["text/html", "text/event-stream"])
async def test_a_client_that_takes_no_json_is_told(accept: str, version: str, app: Running) -> None:
    reply = await (await app.rpc(version)).http.post(
        f"{app.url}/mcp", json={}, headers={**JSON, "accept": accept, "mcp-protocol-version": version}
    )
    assert reply.status_code == 406


async def test_a_body_of_another_type_is_told(app: Running) -> None:
    message = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
    reply = await app.http.post(f"{app.url}/mcp", content=message, headers={**JSON, "content-type": "text/plain"})
    assert 400 <= reply.status_code < 500


async def exchange(url: str, request: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(10):
        reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


async def test_an_http_1_0_client_is_answered(served: Running) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    head = (
        b"POST /mcp HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    reply = await exchange(served.url, head + body)
    assert reply.startswith(b"HTTP/1.1 200")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["result"]["tools"][0]["name"] == "tool"
    nameless = await exchange(served.url, head.replace(b"Host: localhost\r\n", b"") + body)
    assert nameless.startswith(b"HTTP/1.1 421")


async def test_a_client_that_leaves_within_its_body_leaves_nothing(served: Running) -> None:
    before = asyncio.all_tasks()
    _reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await until_only(before)


def test_the_lifespan_may_run_again() -> None:
    app = make_app(make_server(add_tool))
    for _ in range(2):
        with TestClient(app, base_url="http://localhost") as client:
            headers = {**JSON, **client.post("/seed_session", json={}).json()["mcp"]["headers"]}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tool"}}
            reply = client.post("/mcp", json=message, headers=headers)
            assert reply.json()["result"]["content"][0]["text"] == '"done"'


def test_without_a_lifespan_the_error_says_so_and_nothing_hangs() -> None:
    client = TestClient(make_app(make_server(add_tool)), base_url="http://localhost")
    with pytest.raises(RuntimeError, match="lifespan has not started; use TestClient as a context manager"):
        client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=JSON)
    assert client.post("/seed_session", json={}).status_code == 200


async def test_the_servers_own_lifespan_runs_once_within() -> None:
    steps: list[str] = []

    def add(app: FastAPI) -> None:
        app.router.add_event_handler("startup", lambda: steps.append("up"))
        app.router.add_event_handler("shutdown", lambda: steps.append("down"))

    async with in_process(make_app(make_server(add))) as app:
        assert await (await app.rpc()).tools() == {}
        assert steps == ["up"]
    assert steps == ["up", "down"]
