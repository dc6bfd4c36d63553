"""A tool call over MCP runs what a plain request would have run, once, and says the same."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from nemo_gym.mcp_auto_exposure import TOKEN_HEADER
from nemo_gym.server_utils import SESSION_ID_KEY
from tests.mcp_support import (
    CLIENT_MODES,
    ERAS,
    MODERN_VERSION,
    VERSIONS,
    Rpc,
    Running,
    make_app,
    make_server,
    new_http,
    running,
    running_tools,
)
from tests.mcp_tools import PNG, Counted


async def opened_steps(request: Request) -> AsyncIterator[list[str]]:
    steps = request.app.state.steps
    steps.append("open")
    yield steps
    steps.append("closed")
    request.app.state.closed.set()


@pytest.fixture(scope="module")
async def server() -> Counted:
    return make_server(kind=Counted)  # type: ignore[return-value]


@pytest.fixture(scope="module")
async def served(server: Counted) -> AsyncIterator[Running]:
    async with running(make_app(server)) as it:
        yield it


@pytest.fixture(autouse=True)
def runs(server: Counted) -> Iterator[dict[str, int]]:
    server._runs.clear()
    return server._runs


@asynccontextmanager
async def both_ways(served: Running, version: str) -> AsyncIterator[tuple[Rpc, httpx2.AsyncClient]]:
    """Yield access over MCP and over plain HTTP to the same new session."""
    async with new_http(base_url=served.url) as plain:
        token = (await plain.post("/seed_session", json={})).json()["mcp"]["headers"][TOKEN_HEADER]
        yield await served.rpc(version, token=token), plain


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_call_runs_the_handler_and_the_middleware_once_within_the_session(
    version: str, served: Running, runs: dict[str, int]
) -> None:
    async with both_ways(served, version) as (rpc, plain):
        runs.clear()
        result = await rpc.call("move", {"steps": 3, "note": "über"})
        assert runs == {"move": 1, "inner": 1, "outer": 1}
        reply = await plain.post("/move", json={"steps": 3, "note": "über"})
    assert not result.is_error
    assert result.status == 200
    assert result.text == reply.text


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("move", {"steps": "many"}),
        ("move", {}),
        ("move", {"steps": 1, "note": {"deep": [1]}}),
        ("teapot", {}),
        ("crash", {}),
        ("barred", {}),
        ("broken_middleware", {}),
        ("cancels_itself", {}),
        ("redirect", {}),
        ("big", {"megabytes": None}),
    ],
)
async def test_an_error_is_a_tool_error_with_the_body_of_the_plain_reply(
    tool: str, arguments: dict[str, Any], version: str, served: Running, runs: dict[str, int]
) -> None:
    async with both_ways(served, version) as (rpc, plain):
        reply = await plain.post(f"/{tool}", json=arguments)
        runs.clear()
        result = await rpc.call(tool, arguments)
    assert result.is_error
    assert result.status == reply.status_code
    assert result.text == reply.text
    assert runs["outer"] == 1
    assert runs.get(tool, 1) == 1


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("tool", ["sync", "nothing", "stream", "order", "same_session"])
async def test_a_good_reply_is_the_text_of_the_plain_one(tool: str, version: str, served: Running) -> None:
    async with both_ways(served, version) as (rpc, plain):
        reply = await plain.post(f"/{tool}", json={"steps": 1})
        result = await rpc.call(tool, {"steps": 1})
        again = await rpc.call(tool, {"steps": 1})
    assert not result.is_error
    assert (result.status, result.text) == (reply.status_code, reply.text)
    assert again.text == result.text


async def test_a_call_without_arguments_posts_an_empty_object(served: Running) -> None:
    result = await (await served.rpc()).call("echo")
    assert result.text == "{}"


@pytest.mark.parametrize("version", ERAS)
async def test_a_reply_that_breaks_off_is_a_tool_error(version: str) -> None:
    def add(app: FastAPI) -> None:
        @app.post("/tool")
        async def tool() -> StreamingResponse:
            async def parts() -> AsyncIterator[str]:
                yield "a beginning"
                raise LookupError("no end")

            return StreamingResponse(parts())

    async with running_tools(add) as served:
        result = await (await served.rpc(version)).call("tool")
    assert (result.is_error, result.status) == (True, 502)
    assert result.json() == {"detail": "The tool broke off its reply; it may have run."}


@pytest.mark.parametrize("version", ERAS)
async def test_the_handler_sees_the_request_as_a_plain_one(version: str, served: Running) -> None:
    async with both_ways(served, version) as (rpc, plain):
        here = (await plain.post("/look", json={}, headers={"x-sent": "by plain", "user-agent": "me"})).json()
        seen = (await rpc.call("look", headers=[("x-sent", "by mcp"), ("cookie", "a=b"), ("user-agent", "me")])).json()
    assert seen["given"] == {"x_sent": "by mcp"}
    unsent = {"accept", "accept-encoding", "connection"}
    assert set(seen["headers"]) | unsent == set(here["headers"]) | unsent
    assert not [name for name in seen["headers"] if name.startswith("mcp-") or "token" in name]
    for key in ("content_type", "cookies", "query", "page", "url", "method", "client", "state", "app", "root_path"):
        assert seen[key] == here[key], key


async def test_the_query_of_the_endpoint_is_not_that_of_the_tool(served: Running) -> None:
    rpc = await served.rpc()
    rpc.url += "?page=3"
    assert (await rpc.call("look")).json()["page"] is None


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "naïve 🦆 \u2028 \x00"},
        {"number": 10**200},
        {"small": 5e-324, "large": 1.7976931348623157e308, "negative": -0.0},
        {"deep": [[[[[[{"a": [None, True]}]]]]]]},
        {"": {"": ""}},
        {"jsonrpc": "2.0", "method": "initialize", "text": '"initialize" "notifications/cancelled"'},
    ],
)
async def test_arguments_arrive_as_they_were_sent(arguments: dict[str, Any], version: str, served: Running) -> None:
    rpc = await served.rpc(version)
    reply = await rpc.send("tools/call", {"name": "read_json", "arguments": arguments}, id=1)
    text = reply.json()["result"]["content"][0]["text"]
    assert repr(json.loads(text)) == repr(arguments)
    assert "mcp-session-id" not in reply.headers


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"'])
async def test_what_json_itself_does_not_know_passes_where_the_protocol_lets_it(literal: str, served: Running) -> None:
    """The modern transport reads JSON as FastAPI does; the older ones read no lone surrogates."""
    rpc = await served.rpc(MODERN_VERSION)
    body = json.dumps(rpc.message("tools/call", {"name": "read_json", "arguments": {"x": "HERE"}}, id=1))
    body = body.replace('"HERE"', literal)
    reply = await rpc.http.post(rpc.url, content=body, headers=rpc.headers("tools/call", "read_json"))
    async with new_http() as plain:
        expected = await plain.post(f"{served.url}/read_json", content=f'{{"x": {literal}}}', headers={
            "content-type": "application/json"
        })  # fmt: skip
    assert reply.json()["result"]["content"][0]["text"] == expected.text


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 150 + "]" * 150, "[" * 100_000 + "]" * 100_000])
async def test_arguments_beyond_what_can_be_read_are_refused_and_break_nothing(
    value: str, version: str, served: Running
) -> None:
    rpc = await served.rpc(version)
    body = json.dumps(rpc.message("tools/call", {"name": "read_json", "arguments": {"x": "HERE"}}, id=1))
    body = body.replace('"HERE"', value)
    reply = await rpc.http.post(rpc.url, content=body, headers=rpc.headers("tools/call", "read_json"))
    if reply.status_code == 200:
        result = reply.json()["result"]
        assert result["_meta"]["nemo-gym/http-status"] in (200, 400)
    else:
        assert reply.status_code == 400
        assert "error" in reply.json()
    assert not (await rpc.call("echo")).is_error


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_the_official_client_sends_5_mb_and_reads_20(mode: str, served: Running) -> None:
    text = "é" * (5 * 2**19)
    async with served.client(mode) as client:
        result = await client.call_tool("read_json", {"text": text})
        assert json.loads(result.content[0].text) == {"text": text}
        result = await client.call_tool("big", {"megabytes": 20})
        assert len(result.content[0].text) == 20 * 2**20


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_pictures_sounds_and_bytes_are_content_of_their_kind(mode: str, served: Running) -> None:
    async with served.client(mode) as client:
        (picture,) = (await client.call_tool("picture", {})).content
        (sound,) = (await client.call_tool("sound", {})).content
        (binary,) = (await client.call_tool("binary", {})).content
    assert (picture.type, picture.mime_type, base64.b64decode(picture.data)) == ("image", "image/png", PNG)
    assert (sound.type, sound.mime_type, base64.b64decode(sound.data)) == ("audio", "audio/wav", PNG)
    assert binary.type == "resource"
    assert binary.resource.mime_type == "application/x-thing"
    assert str(binary.resource.uri) == "nemo-gym:/binary"
    assert base64.b64decode(binary.resource.blob) == PNG


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("key", ["score", "-", SESSION_ID_KEY])
async def test_a_tool_that_writes_the_session_is_a_loud_error(
    key: str, version: str, served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    result = await (await served.rpc(version)).call("write_session", {"key": key})
    assert result.is_error
    assert result.status == 501
    assert "The tool 'write_session' keeps state in request.session" in result.text
    assert "by session id" in result.text
    assert "toolbox: the tool 'write_session' wrote request.session, which is lost over MCP" in caplog.text


async def test_200_calls_at_once_do_not_mix(served: Running, runs: dict[str, int]) -> None:
    sessions = await asyncio.gather(*(served.token() for _ in range(20)))
    rpcs = [await served.rpc(ERAS[number % 2], token=token) for number, token in enumerate(sessions)]
    runs.clear()

    async def call(number: int) -> tuple[int, str, str]:
        result = (await rpcs[number % 20].call("move", {"steps": number, "note": f"n{number}"})).json()
        return result["moved"], result["note"], result["session"]

    results = await asyncio.gather(*(call(number) for number in range(200)))
    assert [(moved, note) for moved, note, _ in results] == [(number, f"n{number}") for number in range(200)]
    assert all(results[number][2] == results[number % 20][2] for number in range(200))
    assert len({session for *_, session in results}) == 20
    assert runs["move"] == 200


@pytest.mark.parametrize("version", ERAS)
async def test_background_tasks_begin_after_the_result_which_does_not_wait_for_them(version: str) -> None:
    go_on, ended = asyncio.Event(), asyncio.Event()
    written: list[str] = []

    def add(app: FastAPI) -> None:
        @app.post("/tool")
        async def tool(tasks: BackgroundTasks) -> str:
            tasks.add_task(background)
            return "result"

    async def background() -> None:
        written.append("background")
        await go_on.wait()
        ended.set()

    app = make_app(make_server(add))

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def noting_send(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and scope["path"] == "/mcp":
                written.append("result sent")

        await app(scope, receive, noting_send)

    async with running(noting) as served:
        rpc = await served.rpc(version)
        async with asyncio.timeout(10):
            assert (await rpc.call("tool")).json() == "result"
            assert not ended.is_set()
            assert written == ["result sent", "background"]
            go_on.set()
            await ended.wait()


async def test_an_error_handler_of_the_application_answers_what_passes_all_middleware() -> None:
    class Handling(Counted):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()

            @app.exception_handler(Exception)
            async def handle(request: Request, error: Exception) -> Response:
                return JSONResponse({"detail": f"handled {error}"}, 599)

            return app

    async with (
        running(make_app(make_server(kind=Handling))) as served,
        both_ways(served, MODERN_VERSION) as (
            rpc,
            plain,
        ),
    ):
        result = await rpc.call("broken_middleware")
        reply = await plain.post("/broken_middleware")
    assert result.json() == reply.json() == {"detail": "handled a middleware broke"}
    assert result.status == reply.status_code == 599


@pytest.mark.parametrize("version", ERAS)
async def test_a_dependency_is_cleaned_up_as_after_a_plain_request(version: str) -> None:
    def add(app: FastAPI) -> None:
        @app.post("/tool")
        async def tool(steps: Annotated[list[str], Depends(opened_steps)]) -> str:
            steps.append("used")
            return "it"

    app = make_app(make_server(add))
    app.state.steps, app.state.closed = [], asyncio.Event()
    async with running(app) as served:
        await (await served.rpc(version)).call("tool")
        async with asyncio.timeout(10):
            await app.state.closed.wait()
    assert app.state.steps == ["open", "used", "closed"]
