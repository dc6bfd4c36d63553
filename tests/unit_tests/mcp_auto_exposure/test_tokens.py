"""The MCP session token: what it says, what it opens, and what is said to one that opens nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import itsdangerous
import pytest
from fastapi import FastAPI, HTTPException, Request, Response

from nemo_gym.base_resources_server import NEMO_GYM_MCP_METADATA_KEY, NEMO_GYM_MCP_SESSION_TOKEN_HEADER
from nemo_gym.mcp_auto_exposure import TOKEN_HEADER, session_token_serializer
from nemo_gym.mcp_auto_exposure.tokens import InvalidTokenError, SessionToken, read_token, token_for_session
from nemo_gym.server_utils import SESSION_ID_KEY
from nemo_gym.session_routing import SESSION_LOST_HEADER, SESSION_OWNER_KEY
from tests.mcp_support import (
    CLIENT_MODES,
    ERAS,
    VERSIONS,
    Running,
    ToolServer,
    in_process,
    make_app,
    make_server,
    new_http,
    running,
)

OWNER = "a" * 32
FORTNIGHT = 14 * 24 * 60 * 60
NOT_OURS = "was not signed by this server"
MISSING = "There is no X-NeMo-Gym-Session-Token header"


def add_whoami(app: FastAPI) -> None:
    @app.post("/whoami")
    async def whoami(request: Request) -> Response:
        return Response(json.dumps(dict(request.session)), media_type="application/json")

    @app.post("/refuse")
    async def refuse() -> None:
        raise HTTPException(403, "not today")

    @app.post("/fail")
    async def fail() -> None:
        raise LookupError("inside")


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[ToolServer]:
    return make_server(add_whoami)


@pytest.fixture(scope="module")
async def served(server: ToolServer) -> AsyncIterator[Running]:
    async with running(make_app(server)) as it:
        yield it


def sign(server: ToolServer, at: float | None = None, **payload: Any) -> str:
    """Return a token of `server`, as if it had been signed at another time."""
    serializer = session_token_serializer(server)
    payload = {"sid": "0" * 32, "tools": None, **payload}
    if at is None:
        return str(serializer.dumps(payload))

    class Signer(itsdangerous.TimestampSigner):
        def get_timestamp(self) -> int:
            return int(at)

    serializer.signer = Signer
    return str(serializer.dumps(payload))


def test_the_names_are_those_that_environments_import() -> None:
    assert NEMO_GYM_MCP_SESSION_TOKEN_HEADER == TOKEN_HEADER == "X-NeMo-Gym-Session-Token"
    assert NEMO_GYM_MCP_METADATA_KEY == "mcp"


async def test_a_token_of_a_single_worker_server_has_the_session_and_no_owner(
    server: ToolServer, served: Running
) -> None:
    async with new_http() as http:
        reply = await http.post(f"{served.url}/seed_session", json={})
        as_cookie = (await http.post(f"{served.url}/whoami")).json()
    token = reply.json()["mcp"]["headers"][TOKEN_HEADER]
    assert session_token_serializer(server).loads(token) == {"sid": as_cookie[SESSION_ID_KEY], "tools": None}
    rpc = await served.rpc(token=token)
    assert (await rpc.call("whoami")).json() == as_cookie


@pytest.mark.parametrize("version", VERSIONS)
async def test_without_a_token_tools_are_listed_but_not_called(version: str, served: Running) -> None:
    rpc = await served.rpc(version, token=None)
    assert set(await rpc.tools()) == {"whoami", "refuse", "fail"}
    result = await rpc.call("whoami")
    assert result.is_error
    assert result.status == 401
    assert result.text.startswith(MISSING)
    assert "Send the headers that the reply to /seed_session gives under 'mcp'" in result.text


def bad_tokens(server: ToolServer, good: str) -> dict[str, tuple[str, str]]:
    other = make_server(name="other")
    another_secret = make_server(secret="quite another secret")
    cookie = server.sign_session({SESSION_ID_KEY: "0" * 32})
    unsalted = itsdangerous.URLSafeTimedSerializer(server.session_keys()[0]).dumps({"sid": "0" * 32, "tools": None})
    payload, _, signature = good.partition(".")
    return {
        "forged": (f"{payload[:-2]}AA.{signature}", NOT_OURS),
        "garbage": ("nonsense", NOT_OURS),
        "dots": ("...", NOT_OURS),
        "not ascii": ("é" * 40, NOT_OURS),
        "long": ("x" * 10_000, NOT_OURS),
        "truncated": (good[:-1], NOT_OURS),
        "without signature": (payload, NOT_OURS),
        "of another server": (sign(other), NOT_OURS),
        "of another secret": (sign(another_secret), NOT_OURS),
        "the session cookie": (cookie, NOT_OURS),
        "without our salt": (str(unsalted), NOT_OURS),
        "of another shape": (str(session_token_serializer(server).dumps([1])), NOT_OURS),
        "without session": (str(session_token_serializer(server).dumps({"tools": None})), NOT_OURS),
        "empty": ("", MISSING),
    }


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("kind", bad_tokens(make_server(), "a.b.c"))
async def test_a_token_that_opens_nothing_is_a_tool_error_that_says_so(
    kind: str, version: str, server: ToolServer, served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token, said = bad_tokens(server, await served.token())[kind]
    rpc = await served.rpc(version, token=None)
    header = [(TOKEN_HEADER.encode(), token.encode("latin-1"))]
    params = {"name": "whoami"}

    reply = await rpc.send("tools/call", params, header, id=1)

    result = reply.json()["result"]
    assert result["isError"]
    assert result["_meta"]["nemo-gym/http-status"] == 401
    assert result["_meta"]["nemo-gym/refused"] == "token"
    assert said in result["content"][0]["text"]
    if token.strip():
        assert token not in result["content"][0]["text"]
        assert token not in caplog.text
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("signed_at", [-FORTNIGHT - 5, 3600])
async def test_a_token_out_of_its_time_is_a_lost_session(
    signed_at: int, version: str, server: ToolServer, served: Running
) -> None:
    rpc = await served.rpc(version, token=sign(server, time.time() + signed_at))
    reply = await rpc.send("tools/call", {"name": "whoami"}, id=7)
    assert (reply.status_code, reply.headers[SESSION_LOST_HEADER]) == (410, "session_expired")
    assert "Start a new session" in reply.json()["detail"]


@pytest.mark.parametrize("path", ["/whoami", "/verify", "/close_session"])
async def test_the_token_alone_opens_no_plain_route(path: str, served: Running) -> None:
    token = await served.token()
    async with served.new_http() as http:
        for headers in ([(TOKEN_HEADER, token)], [(TOKEN_HEADER, token), (TOKEN_HEADER, token)]):
            reply = await http.post(f"{served.url}{path}", json={}, headers=headers)
            assert reply.status_code == 401
            assert "opens /mcp only" in reply.json()["detail"]
            assert "ToolServer___toolbox" in reply.json()["detail"]
            assert "set-cookie" not in reply.headers
        seeded = await http.post(f"{served.url}/seed_session", json={}, headers={TOKEN_HEADER: token})
        assert seeded.status_code == 200
        reply = await http.post(f"{served.url}/whoami", json={}, headers={TOKEN_HEADER: token})
        assert reply.status_code == 200


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("second", ["same", "other", ""])
async def test_a_doubled_header_is_refused_whatever_it_says(second: str, version: str, served: Running) -> None:
    rpc = await served.rpc(version)
    assert rpc.token is not None
    value = {"same": rpc.token, "other": await served.token(), "": ""}[second]
    result = await rpc.call("whoami", headers=[(TOKEN_HEADER, value)])
    assert (result.is_error, result.status) == (True, 401)
    assert result.text == "There is more than one X-NeMo-Gym-Session-Token header; send exactly one."


@pytest.mark.parametrize("name", [TOKEN_HEADER, TOKEN_HEADER.lower(), TOKEN_HEADER.upper()])
async def test_the_headers_name_may_be_in_any_case(name: str, served: Running) -> None:
    rpc = await served.rpc(token=None)
    result = await rpc.call("whoami", headers=[(name, await served.token())])
    assert not result.is_error


async def test_white_space_around_the_token_is_none_of_it_and_alone_it_is_no_token(server: ToolServer) -> None:
    async with in_process(make_app(server)) as app:
        rpc = await app.rpc(token=None)
        padded, blank = [(TOKEN_HEADER, f"  {sign(server)}\t")], [(TOKEN_HEADER, " \t ")]
        assert not (await rpc.call("whoami", headers=padded)).is_error
        assert (await rpc.call("whoami", headers=blank)).text.startswith(MISSING)


async def test_a_token_is_no_cookie(server: ToolServer, served: Running) -> None:
    token = await served.token()
    session_id = session_token_serializer(server).loads(token)["sid"]
    async with new_http(cookies={server.get_session_middleware_key(): token}) as http:
        reply = await http.post(f"{served.url}/whoami")
    assert reply.json()[SESSION_ID_KEY] != session_id


async def test_a_cookie_beside_the_token_changes_nothing(server: ToolServer, served: Running) -> None:
    rpc = await served.rpc()
    own = (await rpc.call("whoami")).json()
    cookie = f"{server.get_session_middleware_key()}={server.sign_session({SESSION_ID_KEY: 'f' * 32})}; a=b"
    assert (await rpc.call("whoami", headers=[("cookie", cookie)])).json() == own


async def test_after_a_rotation_tokens_of_the_old_secret_still_open(served: Running, server: ToolServer) -> None:
    old = await served.token()
    rotated = make_server(add_whoami, secret=["a new secret of these tests", "a secret of these tests"])
    async with running(make_app(rotated)) as after:
        assert not (await (await after.rpc(token=old)).call("whoami")).is_error
        new = await after.token()
        assert not (await (await after.rpc(token=new)).call("whoami")).is_error
    result = await (await served.rpc(token=new)).call("whoami")
    assert NOT_OURS in result.text


@pytest.mark.parametrize("version", ERAS)
@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
async def test_a_token_with_an_owner_is_lost_at_a_single_worker(
    method: str, version: str, server: ToolServer, served: Running
) -> None:
    rpc = await served.rpc(version, token=sign(server, **{SESSION_OWNER_KEY: OWNER}))
    reply = await rpc.send(method, {"name": "whoami"} if method == "tools/call" else {}, id=7)
    assert reply.status_code == 410
    assert reply.headers[SESSION_LOST_HEADER] == "worker_gone"
    assert "Start a new session" in reply.json()["detail"]
    assert (await rpc.initialize()).status_code == 410


@pytest.mark.parametrize("version", ERAS)
async def test_the_setting_tells_a_lost_session_as_a_jsonrpc_error(version: str) -> None:
    server = make_server(add_whoami, mcp_lost_session="jsonrpc")
    async with running(make_app(server)) as served:
        rpc = await served.rpc(version, token=sign(server, **{SESSION_OWNER_KEY: OWNER}))
        reply = await rpc.send("tools/call", {"name": "whoami"}, id=7)
        assert reply.status_code == 200
        message = reply.json()
        assert message["id"] == 7
        assert message["error"]["code"] == -32010
        assert message["error"]["data"]["reason"] == "worker_gone"
        assert "Start a new session" in message["error"]["message"]
        assert (await rpc.send("notifications/initialized")).status_code == 202


class Narrowing(ToolServer):
    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> Any:
        return seed_body.get("allowed")


class NarrowingLater(ToolServer):
    async def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> Any:
        return seed_body.get("allowed")


@pytest.mark.parametrize("kind", [Narrowing, NarrowingLater])
@pytest.mark.parametrize("version", ERAS)
async def test_a_session_may_be_narrowed_to_some_tools(kind: type[ToolServer], version: str) -> None:
    server = make_server(add_whoami, kind)
    async with running(make_app(server)) as served:
        token = await served.token({"allowed": ["refuse", "fail"]})
        assert session_token_serializer(server).loads(token)["tools"] == ["fail", "refuse"]
        rpc = await served.rpc(version, token=token)
        assert set(await rpc.tools()) == {"refuse", "fail"}
        result = await rpc.call("whoami")
        assert (result.is_error, result.status) == (True, 403)
        assert result.text == "The tool 'whoami' is not available in this session."
        assert (await rpc.call("refuse")).text == '{"detail":"not today"}'
        nothing = await served.rpc(version, token=await served.token({"allowed": []}))
        assert await nothing.tools() == {}
        everything = await served.rpc(version, token=await served.token())
        assert set(await everything.tools()) == {"whoami", "refuse", "fail"}


async def test_an_unknown_name_among_the_allowed_tools_is_an_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(make_app(make_server(add_whoami, Narrowing))) as served:
        reply = await served.http.post(f"{served.url}/seed_session", json={"allowed": ["whoami", "whoareyou"]})
    assert reply.status_code == 500
    assert "mcp_allowed_tools_for_session names no tools of toolbox: ['whoareyou']" in caplog.text


class Seeding(ToolServer):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.middleware("http")
        async def remember(request: Request, call_next: Any) -> Any:
            return await call_next(request)

        app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") != "/seed_session"]

        @app.post("/seed_session")
        async def seed(request: Request) -> dict[str, Any]:
            request.session["level"] = {"n": 10**30, "name": "\ud800", "words": ["é"]}
            return {}

        return app


@pytest.mark.parametrize("version", ERAS)
async def test_what_was_written_into_the_session_at_seed_is_there_over_mcp(version: str) -> None:
    server = make_server(add_whoami, Seeding)
    async with running(make_app(server)) as served:
        result = await (await served.rpc(version)).call("whoami")
    assert not result.is_error
    assert result.json()["level"] == {"n": 10**30, "name": "\ud800", "words": ["é"]}


@pytest.mark.parametrize("token", [
    SessionToken("1"), SessionToken("1", frozenset()), SessionToken("1", frozenset({"b", "a"}), OWNER, {"x": [1]}),
])  # fmt: skip
def test_a_token_read_is_the_token_written(token: SessionToken) -> None:
    serializer = session_token_serializer(make_server())
    assert read_token(serializer, serializer.dumps(token.payload()), doubled=False) == token


def test_a_token_carries_the_rest_of_the_session_but_neither_id_nor_owner_twice() -> None:
    token = token_for_session({SESSION_ID_KEY: "1", SESSION_OWNER_KEY: "stale", "x": 2}, None, OWNER)
    assert token.payload() == {"sid": "1", "tools": None, SESSION_OWNER_KEY: OWNER, "session": {"x": 2}}
    assert token.session() == {SESSION_ID_KEY: "1", SESSION_OWNER_KEY: OWNER, "x": 2}


def test_no_error_about_a_token_repeats_it() -> None:
    server = make_server()
    serializer = session_token_serializer(server)
    good = serializer.dumps({"sid": "1", "tools": None})
    for token, _ in bad_tokens(server, good).values():
        with pytest.raises(InvalidTokenError) as raised:
            read_token(serializer, token.strip() or None, doubled=False)
        if token.strip():
            assert token not in repr(raised.value) + str(raised.value)


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_the_token_never_stands_in_a_log(mode: str, served: Running, caplog: pytest.LogCaptureFixture) -> None:
    for name in (None, "mcp", "mcp.server", "mcp.client", "uvicorn", "httpx2", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    block = await served.seed()
    async with served.client(mode, block) as client:
        await client.list_tools()
        for tool in ("whoami", "refuse", "fail", "unknown"):
            await client.call_tool(tool, {"x": 1})
    token = block["headers"][TOKEN_HEADER]
    await served.http.post(f"{served.url}/mcp", content=b"{", headers={TOKEN_HEADER: token})
    await served.http.post(f"{served.url}/mcp", content=b"{}", headers={TOKEN_HEADER: token, "host": "evil.example"})
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        await served.http.request(method, f"{served.url}/mcp", headers={TOKEN_HEADER: token})
    assert "LookupError" in caplog.text
    logged = "\n".join([*(repr(vars(record)) for record in caplog.records), caplog.text])
    payload, _, signature = token.partition(".")
    assert token not in logged
    assert payload not in logged
    assert signature not in logged
    assert json.dumps(token) not in logged


@pytest.mark.parametrize("mode", CLIENT_MODES)
async def test_at_info_the_sdk_tells_nothing_of_single_requests(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(make_app(make_server(add_whoami))) as served, served.client(mode) as client:
        await client.call_tool("whoami", {})
    assert not [record for record in caplog.records if record.name.startswith("mcp.server")]


@pytest.mark.parametrize("name", ["mcp", "mcp.server"])
def test_a_level_that_the_process_has_set_itself_stays(name: str) -> None:
    loggers = logging.getLogger("mcp"), logging.getLogger("mcp.server")
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    try:
        logging.getLogger(name).setLevel(logging.DEBUG)
        make_app(make_server())
        assert loggers[1].getEffectiveLevel() == logging.DEBUG
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
