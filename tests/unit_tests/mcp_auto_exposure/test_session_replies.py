"""What exposure changes in the plain routes: the reply of `/seed_session`, and the names that `/verify` sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import BaseSeedSessionRequest, BaseVerifyRequest
from nemo_gym.mcp_auto_exposure import TOKEN_HEADER, session_token_serializer
from nemo_gym.server_utils import SESSION_ID_KEY
from tests.mcp_support import ERAS, ToolServer, in_process, make_app, make_server

RESPONSE = {
    "id": "resp_1", "created_at": 0, "model": "m", "object": "response", "parallel_tool_calls": True,
    "tool_choice": "auto", "tools": [],
}  # fmt: skip


class StartRequest(BaseSeedSessionRequest):
    start: int


def call_of(name: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": f"call_{name}",
        "name": name,
        "arguments": '{"name": "mcp__toolbox__x"}',
    }


class Answering(ToolServer):
    """Answers `/seed_session` and `/verify` with what a test gives it, and keeps what it received."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.router.routes = [
            route for route in app.router.routes if getattr(route, "path", "") not in ("/seed_session", "/verify")
        ]
        app.state.answer = lambda request: Response(b"{}", media_type="application/json")

        @app.post("/seed_session")
        async def seed(request: Request) -> Response:
            return request.app.state.answer(request)

        @app.post("/verify")
        async def verify(request: Request) -> Response:
            app.state.received = await request.body()
            app.state.length = request.headers.get("content-length")
            return Response(b"{}", media_type="application/json")

        return app


@pytest.fixture
def app() -> FastAPI:
    return make_app(make_server(kind=Answering))


def seed(app: FastAPI, answer: Any = None, body: Any = None) -> Any:
    if answer is not None:
        app.state.answer = answer
    with TestClient(app, base_url="http://localhost") as client:
        reply = client.post("/seed_session", json=body or {})
    assert int(reply.headers["content-length"]) == len(reply.content)
    return reply


def answering(content: bytes, **options: Any) -> Any:
    return lambda request: Response(content, **{"media_type": "application/json", **options})


def test_the_reply_gains_what_a_client_needs(app: FastAPI) -> None:
    reply = seed(app, answering(b'{"started_at": 3}'))
    assert list(reply.json()) == ["started_at", "mcp"]
    block = reply.json()["mcp"]
    assert list(block) == ["server_name", "url_path", "transport", "headers"]
    assert block["server_name"] == "toolbox"
    assert block["url_path"] == "/mcp"
    assert block["transport"] == "streamable_http"
    assert list(block["headers"]) == [TOKEN_HEADER]


@pytest.mark.parametrize(
    "fields",
    [
        b"{}", b" { } ", b'{"a":1}', b'{"a": [{"mcp": 1}]}\n', b'{"n":123456789012345678901234567890,"x":1e400}',
        b'{"nan": NaN, "s": "\\ud800", "e": "\xc3\xa9", "a": 1, "a": 2}',
        b'{"big": "' + b"x" * 3_000_000 + b'"}',
    ],
)  # fmt: skip
def test_the_rest_of_the_reply_stays_to_the_byte(fields: bytes, app: FastAPI) -> None:
    reply = seed(app, answering(fields))
    assert reply.content.startswith(fields.rstrip()[:-1].rstrip())
    gained = json.loads(reply.content)
    assert gained.pop("mcp")["server_name"] == "toolbox"
    assert repr(gained) == repr(json.loads(fields))


def test_status_headers_and_cookies_stay(app: FastAPI) -> None:
    def answer(request: Request) -> Response:
        reply = Response(b"{}", 201, {"x-own": "yes"}, media_type="application/json")
        reply.set_cookie("one", "1")
        reply.set_cookie("two", "2")
        return reply

    reply = seed(app, answer)
    assert reply.status_code == 201
    assert reply.headers["x-own"] == "yes"
    assert set(reply.cookies) == {"one", "two", "Answering___toolbox"}
    assert "mcp" in reply.json()


def test_a_reply_that_comes_in_parts_is_completed_too(app: FastAPI) -> None:
    reply = seed(app, lambda request: StreamingResponse(iter([b'{"a"', b":1", b"}"]), media_type="application/json"))
    assert list(reply.json()) == ["a", "mcp"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "is no JSON object"),
        (b"null", "is no JSON object"),
        (b"", "is no JSON object"),
        (b"plain text", "is no JSON object"),
        (b"\xff\xfe", "is no JSON object"),
        (b"[" * 100_000, "is no JSON object"),
        (b'{"mcp": "mine"}', "has a field 'mcp' of its own"),
    ],
)
def test_a_reply_that_can_not_tell_the_token_stays_and_is_logged(
    content: bytes, problem: str, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    assert seed(app, answering(content)).content == content
    assert f"toolbox: the reply of /seed_session {problem}, so there is no MCP session token" in caplog.text


def test_a_server_that_empties_the_session_is_logged(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: Request) -> Response:
        request.session.clear()
        return Response(b"{}", media_type="application/json")

    assert seed(app, answer).content == b"{}"
    assert "has taken the id out of the session" in caplog.text


@pytest.mark.parametrize("status", [400, 422, 500, 302])
def test_an_error_stays_as_it_is(status: int, app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    reply = seed(app, answering(b'{"detail": "no"}', status_code=status))
    assert (reply.status_code, reply.content) == (status, b'{"detail": "no"}')
    assert "MCP session token" not in caplog.text


def test_an_invalid_seed_request_is_told_as_ever() -> None:
    class Strict(ToolServer):
        async def seed_session(self, body: StartRequest) -> Any:  # type: ignore[override]
            return {}

        def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> Any:
            raise AssertionError("not asked")

    app = make_app(make_server(kind=Strict))
    with TestClient(app) as client:
        assert client.post("/seed_session", json={"start": "x"}).status_code == 422
        assert client.post("/seed_session", content=b"{").status_code == 422


def test_the_hook_sees_the_body_that_the_handler_saw() -> None:
    seen: list[Any] = []

    class Looking(Answering):
        def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> Any:
            seen.append(seed_body)

    app = make_app(make_server(kind=Looking))
    with TestClient(app) as client:
        for content in (b'{"a": {"b": NaN}}', b'{"n": 123456789012345678901234567890}', b"", b"[1]"):
            assert client.post("/seed_session", content=content).status_code == 200
    assert repr(seen) == "[{'a': {'b': nan}}, {'n': 123456789012345678901234567890}, {}, {}]"


def test_each_seed_has_a_token_of_its_own_session_and_a_second_one_that_of_the_same() -> None:
    server = make_server(kind=Answering)
    app = make_app(server)
    read = session_token_serializer(server).loads
    with TestClient(app) as client:
        first, again = (client.post("/seed_session").json()["mcp"]["headers"][TOKEN_HEADER] for _ in range(2))
        client.cookies.clear()
        other = client.post("/seed_session").json()["mcp"]["headers"][TOKEN_HEADER]
    assert read(first)["sid"] == read(again)["sid"] != read(other)["sid"]


@pytest.mark.parametrize("version", ERAS)
async def test_under_a_prefix_the_reply_names_the_path_to_use(version: str) -> None:
    inner = make_app(make_server(add_where))
    outer = Starlette(routes=[Mount("/gym/one", inner)], lifespan=lambda app: inner.router.lifespan_context(inner))
    async with in_process(outer) as app:
        block = await app.seed(path="/gym/one")
        assert block["url_path"] == "/gym/one/mcp"
        rpc = await app.rpc(version, token=block["headers"][TOKEN_HEADER])
        for path in ("/gym/one/mcp", "/gym/one/mcp/"):
            rpc.url = f"{app.url}{path}"
            assert (await rpc.call("where")).json() == ["/gym/one/where", "/gym/one", "http://localhost/gym/one/where"]
        assert (await app.http.post(f"{app.url}/mcp")).status_code == 404
        plain = await app.http.post(f"{app.url}/gym/one/where")
        assert plain.json() == ["/gym/one/where", "/gym/one", "http://localhost/gym/one/where"]


def add_where(app: FastAPI) -> None:
    @app.post("/where")
    async def where(request: Request) -> list[str]:
        return [request.scope["path"], request.scope["root_path"], str(request.url)]


@pytest.mark.parametrize("prefix", ["", "/api"])
async def test_a_root_path_is_the_prefix_whether_the_proxy_strips_it_or_not(prefix: str) -> None:
    app = make_app(make_server(add_where))
    app.root_path = "/api"
    async with in_process(app) as served:
        block = await served.seed(path=prefix)
        assert block["url_path"] == "/api/mcp"
        rpc = await served.rpc(token=block["headers"][TOKEN_HEADER])
        rpc.url = f"{served.url}{prefix}/mcp"
        result = await rpc.call("where")
        assert result.json() == (await served.http.post(f"{served.url}{prefix}/where")).json()


def verified(app: FastAPI, body: bytes, **headers: str) -> bytes:
    with TestClient(app) as client:
        assert client.post("/verify", content=body, headers=headers).status_code == 200
    received: bytes = app.state.received
    assert app.state.length is None or int(app.state.length) == len(received)
    return received


def test_verify_sees_the_bare_names_of_this_servers_tools(app: FastAPI) -> None:
    names = ["mcp__toolbox__move", "mcp__other__move", "move", "mcp__toolbox__", "mcp__toolbox__a__b"]
    items: list[Any] = [call_of(name) for name in names]
    items += [{"type": "message", "role": "assistant", "content": [{"text": "mcp__toolbox__move"}]}, "text", None]
    body = {"response": {**RESPONSE, "output": items}, "extra": {"name": "mcp__toolbox__move", "n": 10**30}}

    received = json.loads(verified(app, json.dumps(body).encode()))

    seen = [item.get("name") for item in received["response"]["output"][:5]]
    assert seen == ["move", "mcp__other__move", "move", "mcp__toolbox__", "a__b"]
    body["response"]["output"][0]["name"] = "move"  # type: ignore[index]
    body["response"]["output"][4]["name"] = "a__b"  # type: ignore[index]
    assert received == body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{ "response" : {"output": [ {"name": "move"} ]} }',
        b'{"response": {"output": [{"name": "mcp__toolbox__move"}',
        b"mcp__toolbox__ \xff\xfe",
        b'{"response": "mcp__"}',
        b'{"response": {"output": "mcp__"}}',
        b'{"response": {"output": null, "x": "mcp__"}}',
        b'["mcp__"]',
        b'"mcp__toolbox__move"',
    ],
)  # fmt: skip
def test_what_has_no_such_names_or_is_no_verify_request_arrives_to_the_byte(body: bytes, app: FastAPI) -> None:
    received = verified(app, body)
    assert received == body


def test_a_number_that_json_does_not_know_does_not_hide_the_names(app: FastAPI) -> None:
    body = b'{"response": {"output": [{"name": "mcp__toolbox__move"}], "score": NaN, "large": 1e999}}'
    received = json.loads(verified(app, body))
    assert received["response"]["output"][0]["name"] == "move"
    assert repr(received["response"]["score"]) == "nan"


def test_a_body_sent_in_parts_is_read_whole(app: FastAPI) -> None:
    def parts() -> Any:
        yield b'{"response": {"output": [{"name": "mcp__too'
        yield b'lbox__move"}]}}'

    with TestClient(app) as client:
        assert client.post("/verify", content=parts()).status_code == 200
    assert json.loads(app.state.received)["response"]["output"][0]["name"] == "move"


def test_a_rollout_scores_the_same_under_both_names() -> None:
    class Scoring(ToolServer):
        async def verify(self, body: BaseVerifyRequest) -> Any:
            return {"reward": float([item.name for item in body.response.output] == ["move"])}  # type: ignore[union-attr]

    row = {"responses_create_params": {"input": "go"}}
    with TestClient(make_app(make_server(kind=Scoring))) as client:
        rewards = [
            client.post("/verify", json={**row, "response": {**RESPONSE, "output": [call_of(name)]}}).json()["reward"]
            for name in ("move", "mcp__toolbox__move", "mcp__other__move")
        ]
    assert rewards == [1.0, 1.0, 0.0]


def test_the_session_is_the_same_for_seed_and_verify() -> None:
    sessions: list[str] = []

    class Noting(ToolServer):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()

            @app.post("/note")
            async def note(request: Request) -> None:
                sessions.append(request.session[SESSION_ID_KEY])

            return app

    server = make_server(kind=Noting)
    with TestClient(make_app(server)) as client:
        block = client.post("/seed_session", json={}).json()["mcp"]
        client.post("/note")
    assert sessions == [session_token_serializer(server).loads(block["headers"][TOKEN_HEADER])["sid"]]
