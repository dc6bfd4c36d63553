"""Exposing a server: its own say about its tools, its mistakes, and what stays as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nemo_gym.errors import ConfigError, MissingExtraError
from nemo_gym.mcp_auto_exposure import CatchAll, MCPTool, maybe_auto_expose
from tests.mcp_support import ToolServer, in_process, make_app, make_server

AddRoutes = Callable[[FastAPI], Any]


async def harvested(add_routes: AddRoutes) -> dict[str, dict[str, Any]]:
    """Return the tools by name, as a client lists them."""
    async with in_process(make_app(make_server(add_routes))) as server:
        return await (await server.rpc(token=None)).tools()


def add_catchall(app: FastAPI) -> None:
    @app.post("/{tool_name}")
    async def run(tool_name: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"ran": tool_name, **body}


class FromData(ToolServer):
    def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Iterable[MCPTool]:
        assert catchall is not None
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        yield catchall.tool("first", "The first.", schema)
        yield catchall.tool("second")


async def test_a_catch_all_offers_nothing_by_itself_and_start_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert not await harvested(add_catchall)
    assert "POST /{tool_name} is not served over MCP: its tools come from data; return them from mcp_tools" in (
        caplog.text
    )


async def test_a_catch_all_beside_plain_routes_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    def add(app: FastAPI) -> None:
        app.post("/plain")(lambda: None)
        add_catchall(app)

    assert list(await harvested(add)) == ["plain"]
    assert "POST /{tool_name} is not served" in caplog.text


async def test_the_tools_of_a_catch_all_come_from_mcp_tools(caplog: pytest.LogCaptureFixture) -> None:
    async with in_process(make_app(make_server(add_catchall, FromData))) as server:
        rpc = await server.rpc()
        tools = await rpc.tools()
        result = await rpc.call("second", {"n": 5})
    assert list(tools) == ["first", "second"]
    assert tools["first"]["description"] == "The first."
    assert tools["first"]["inputSchema"]["properties"] == {"n": {"type": "integer"}}
    assert result.json() == {"ran": "second", "n": 5}
    assert "not served" not in caplog.text


async def test_a_catch_all_of_any_path_is_one_too() -> None:
    def add(app: FastAPI) -> None:
        @app.post("/{rest:path}")
        async def run(rest: str) -> str:
            return rest

    async with in_process(make_app(make_server(add, FromData))) as server:
        result = await (await server.rpc()).call("first")
    assert result.json() == "first"


async def test_mcp_tools_may_filter_and_add() -> None:
    class Tailored(ToolServer):
        def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Iterable[MCPTool]:
            kept = [tool for tool in harvested if tool.name != "secret"]
            return [*kept, MCPTool("peek", "Look.", {"type": "object"}, "/a/nested/route")]

    def add(app: FastAPI) -> None:
        app.post("/open")(lambda: None)
        app.post("/secret")(lambda: None)
        app.post("/a/nested/route")(lambda: "seen")

    async with in_process(make_app(make_server(add, Tailored))) as server:
        rpc = await server.rpc()
        assert list(await rpc.tools()) == ["open", "peek"]
        assert (await rpc.call("peek")).json() == "seen"
        assert (await rpc.call("secret")).status == 404


GOOD = {"type": "object"}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "mcp_tools returned NoneType; expected a list of MCPTool"),
        (["a"], "mcp_tools returned 'a', which is no MCPTool"),
        ([MCPTool("a b", "", GOOD, "/a")], "a tool named 'a b'"),
        ([MCPTool("verify", "", GOOD, "/verify")], "a tool named 'verify'"),
        ([MCPTool(3, "", GOOD, "/a")], "a tool named 3"),  # type: ignore[arg-type]
        ([MCPTool("a", "", GOOD, "/a"), MCPTool("a", "", GOOD, "/b")], "two tools named 'a'"),
        ([MCPTool("a", "", {"type": "array"}, "/a")], "'a' with an input_schema that is not of type 'object'"),
        ([MCPTool("a", "", None, "/a")], "'a' with an input_schema that is not of type 'object'"),  # type: ignore[arg-type]
        ([MCPTool("a", None, GOOD, "/a")], "'a' with the description None"),  # type: ignore[arg-type]
        ([MCPTool("a", "", GOOD, "a")], "'a' with the path 'a'; expected a route, such as '/a'"),
        (
            [MCPTool("a", "", GOOD, "/seed_session")],
            "'a' with the path '/seed_session', which is a route of the framework",
        ),
        ([MCPTool("a", "", {"type": "object", "x": object()}, "/a")], "'a' with an input_schema that is no JSON"),
    ],
)
def test_mistakes_of_mcp_tools_are_configuration_errors(returned: Any, problem: str) -> None:
    class Mistaken(ToolServer):
        def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Any:
            return returned

    with pytest.raises(ConfigError, match=r"^toolbox: mcp_tools returned") as raised:
        make_app(make_server(kind=Mistaken))
    assert problem in str(raised.value)


def test_an_async_mcp_tools_is_a_configuration_error() -> None:
    class Mistaken(ToolServer):
        async def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Any:
            return harvested

    with pytest.raises(ConfigError, match="mcp_tools returned coroutine"):
        make_app(make_server(kind=Mistaken))


def add_to_router(app: FastAPI) -> None:
    router = APIRouter()
    router.post("/mcp")(lambda: None)
    app.include_router(router)


@pytest.mark.parametrize(
    "add",
    [
        lambda app: app.post("/mcp")(lambda: None),
        lambda app: app.get("/mcp/")(lambda: None),
        lambda app: app.mount("/mcp", Starlette()),
        add_to_router,
    ],
)
def test_a_server_with_a_route_mcp_of_its_own_is_a_configuration_error(add: AddRoutes) -> None:
    with pytest.raises(ConfigError, match=r"toolbox\.expose_tools_over_mcp: the server has a route /mcp of its own"):
        make_app(make_server(add))


@pytest.mark.parametrize("missing", ["mcp", "mcp.server", "mcp_types"])
def test_without_the_extra_start_up_names_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nemo_gym.mcp_auto_exposure.endpoint", raising=False)
    monkeypatch.delitem(sys.modules, "nemo_gym.mcp_auto_exposure.results", raising=False)
    if missing == "mcp":
        monkeypatch.delitem(sys.modules, "mcp.server")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"'expose_tools_over_mcp: true' of toolbox needs the extra 'mcp'"):
        make_app(make_server())


def test_another_major_version_of_the_sdk_is_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nemo_gym.mcp_auto_exposure.endpoint", raising=False)
    monkeypatch.delattr("mcp.server.ServerRequestContext")
    with pytest.raises(MissingExtraError, match="needs the extra 'mcp'"):
        make_app(make_server())


def test_a_second_call_changes_nothing() -> None:
    server = make_server(lambda app: app.post("/tool")(lambda: None))
    app = server.setup_webserver()
    maybe_auto_expose(server, app)
    before = list(app.user_middleware), app.router.lifespan_context
    maybe_auto_expose(server, app)
    assert (app.user_middleware, app.router.lifespan_context) == before


def test_without_the_setting_nothing_changes() -> None:
    server = make_server(lambda app: app.post("/tool")(lambda: None), expose_tools_over_mcp=False)
    plain = server.setup_webserver()
    app = server.setup_webserver()
    before = list(app.user_middleware), app.router.lifespan_context
    maybe_auto_expose(server, app)
    assert (app.user_middleware, app.router.lifespan_context) == before
    with TestClient(app) as client, TestClient(plain) as plain_client:
        assert client.post("/mcp", json={}).status_code == 404
        seeded, as_before = client.post("/seed_session", json={}), plain_client.post("/seed_session", json={})
        assert seeded.content == as_before.content == b"{}"
