"""From routes to tools: what is offered, with which schema, and what is refused, with which reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from fastapi import APIRouter, Body, Cookie, Depends, FastAPI, Form, Header, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, RootModel
from pydantic_core import core_schema
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from tests.mcp_support import VERSIONS, in_process, make_app, make_server, running_tools

AddRoutes = Callable[[FastAPI], Any]


class Point(BaseModel):
    """A place."""

    x: int
    y: int = 0


class Path(BaseModel):
    points: list[Point]
    label: str | None = None


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Renamed(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field(alias="from", description="Where it begins.")


class Indescribable:
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.is_instance_schema(cls)


class Strange(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    thing: Indescribable


class StrangeReply(BaseModel):
    thing: Annotated[int, "a reply that has no schema"]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        if handler.mode == "serialization":
            raise TypeError("no schema for replies")
        return handler(schema)


async def harvested(add_routes: AddRoutes) -> dict[str, dict[str, Any]]:
    """Return the tools by name, as a client lists them."""
    async with in_process(make_app(make_server(add_routes))) as server:
        return await (await server.rpc(token=None)).tools()


async def schema_of(handler: Any) -> dict[str, Any]:
    """Return the argument schema of a handler's tool."""
    tools = await harvested(lambda app: app.post("/tool")(handler))
    schema: dict[str, Any] = tools["tool"]["inputSchema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object"
    return schema


def accepts(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


async def test_a_tool_has_the_name_docstring_and_schema_of_its_route() -> None:
    def add(app: FastAPI) -> None:
        @app.post("/move-to")
        async def whatever(body: Point, request: Request) -> None:
            """Go to a place.

            Both steps count.
            """

    tools = await harvested(add)

    assert list(tools) == ["move-to"]
    tool = tools["move-to"]
    assert tool["description"] == "Go to a place.\n\nBoth steps count."
    schema = tool["inputSchema"]
    assert schema["properties"] == {"x": {"type": "integer", "title": "X"},
                                    "y": {"type": "integer", "title": "Y", "default": 0}}  # fmt: skip
    assert schema["required"] == ["x"]
    assert schema["type"] == "object"
    assert "$defs" not in schema


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_protocol_version_lists_the_same_tools(version: str) -> None:
    async with running_tools(lambda app: app.post("/walk")(lambda: None)) as server:
        listed = await (await server.rpc(version)).tools()
    assert list(listed) == ["walk"]


async def test_a_handler_without_docstring_has_no_description() -> None:
    async def tool(body: Point) -> None: ...

    tools = await harvested(lambda app: app.post("/tool")(tool))
    assert "description" not in tools["tool"]


async def test_nested_models_stand_in_the_schemas_own_definitions() -> None:
    async def tool(body: Path) -> None: ...

    schema = await schema_of(tool)
    assert schema["properties"]["points"]["items"] == {"$ref": "#/$defs/Point"}
    assert list(schema["$defs"]) == ["Point"]
    assert accepts(schema, {"points": [{"x": 1}]})
    assert not accepts(schema, {"points": [{"y": 1}]})


async def test_a_model_may_refer_to_itself() -> None:
    async def tool(body: Tree) -> None: ...

    schema = await schema_of(tool)
    assert accepts(schema, {"value": 1, "children": [{"value": 2, "children": []}]})
    assert not accepts(schema, {"value": 1, "children": [{"value": "2"}]})


async def test_a_discriminated_union_within_a_body_is_resolved() -> None:
    async def tool(body: Owner) -> None: ...

    schema = await schema_of(tool)
    assert schema["properties"]["pet"]["discriminator"]["mapping"] == {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}
    assert accepts(schema, {"pet": {"kind": "dog", "name": "Rex"}})
    assert not accepts(schema, {"pet": {"kind": "dog", "lives": 9}})


async def test_a_discriminated_union_may_be_the_body() -> None:
    async def tool(body: Annotated[Cat | Dog, Body(discriminator="kind")]) -> None: ...

    schema = await schema_of(tool)
    assert accepts(schema, {"kind": "cat", "lives": 9})
    assert not accepts(schema, {"kind": "cat", "name": "Tom"})


async def test_aliases_are_the_names_of_the_arguments() -> None:
    async def tool(body: Renamed) -> None: ...

    schema = await schema_of(tool)
    assert schema["required"] == ["from"]
    assert schema["properties"]["from"]["description"] == "Where it begins."


async def test_an_optional_body_has_the_schema_of_the_body() -> None:
    async def tool(body: Point | None = None) -> None: ...

    schema = await schema_of(tool)
    assert "anyOf" not in schema
    assert list(schema["properties"]) == ["x", "y"]


async def test_several_body_models_are_embedded_under_their_names() -> None:
    async def tool(start: Point, end: Point, speed: Annotated[int, Body()] = 1) -> None: ...

    schema = await schema_of(tool)
    assert set(schema["properties"]) == {"start", "end", "speed"}
    assert schema["required"] == ["start", "end"]
    assert accepts(schema, {"start": {"x": 1}, "end": {"x": 2}})
    assert not accepts(schema, {"start": {"x": 1}, "end": {}})


async def test_one_embedded_value_is_an_object_of_one_field() -> None:
    async def tool(count: Annotated[int, Body(embed=True)]) -> None: ...

    assert not accepts(await schema_of(tool), {"count": "many"})


async def test_a_dict_body_takes_any_object() -> None:
    async def tool(body: dict[str, int]) -> None: ...

    schema = await schema_of(tool)
    assert accepts(schema, {"a": 1})
    assert not accepts(schema, {"a": "1"})


async def test_an_untyped_body_and_no_body_take_any_object() -> None:
    async def untyped(body: Annotated[Any, Body()]) -> None: ...

    async def request_only(request: Request) -> None: ...

    async def nothing() -> None: ...

    for handler in (untyped, request_only, nothing):
        assert accepts(await schema_of(handler), {"anything": [1]})


async def test_optional_parameters_of_other_kinds_do_not_stand_in_the_way() -> None:
    async def tool(body: Point, page: int = 1, x_trace: Annotated[str | None, Header()] = None) -> None: ...

    assert list((await schema_of(tool))["properties"]) == ["x", "y"]


async def test_the_routes_of_included_routers_are_tools() -> None:
    def add(app: FastAPI) -> None:
        inner, outer = APIRouter(), APIRouter()
        inner.post("/deep")(lambda: None)
        outer.post("/near")(lambda: None)
        outer.include_router(inner)
        app.include_router(outer)
        nested = APIRouter()
        nested.post("/tool")(lambda: None)
        app.include_router(nested, prefix="/v1")

    assert set(await harvested(add)) == {"deep", "near"}


async def test_hidden_and_other_methods_routes_and_the_frameworks_are_no_tools(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def add(app: FastAPI) -> None:
        app.post("/hidden", include_in_schema=False)(lambda: None)
        app.add_route("/hidden_plain", lambda request: None, methods=["POST"], include_in_schema=False)
        app.get("/read")(lambda: None)
        app.put("/write")(lambda: None)
        app.add_route("/plain_get", lambda request: None, methods=["GET"])
        for path in ("/seed_session/", "/verify/again", "/close_session", "/mcp/sub", "/aggregate_metrics/x"):
            app.post(path)(lambda: None)
        app.add_route("/verify", lambda request: None, methods=["POST"])
        app.mount("/static", Starlette())
        app.api_route("/both", methods=["GET", "POST"])(lambda: None)

    assert list(await harvested(add)) == ["both"]
    assert "not served" not in caplog.text


async def nested_path(body: Point) -> None: ...


async def odd_name(body: Point) -> None: ...


async def upload(file: UploadFile) -> None: ...


async def form(name: Annotated[str, Form()]) -> None: ...


async def list_body(body: list[Point]) -> None: ...


async def root_list(body: RootModel[list[int]]) -> None: ...


async def text_body(body: Annotated[str, Body()]) -> None: ...


async def query(body: Point, page: int) -> None: ...


async def header(body: Point, x_key: Annotated[str, Header()]) -> None: ...


async def cookie(body: Point, crumb: Annotated[str, Cookie()]) -> None: ...


def key_of(x_key: Annotated[str, Header()]) -> str:
    return x_key


async def dependency(body: Point, key: Annotated[str, Depends(key_of)]) -> None: ...


async def strange(body: Strange) -> None: ...


@pytest.mark.parametrize(
    ("path", "handler", "reason"),
    [
        ("/a/b", nested_path, "one plain segment"),
        ("/a.b", odd_name, "one plain segment"),
        ("/slash/", odd_name, "one plain segment"),
        ("/upload", upload, "multipart/form-data (a file or a form)"),
        ("/form", form, "application/x-www-form-urlencoded (a file or a form)"),
        ("/list", list_body, "its body is of type 'array'"),
        ("/root_list", root_list, "its body is of type 'array'"),
        ("/text", text_body, "its body is of type 'string'"),
        ("/query", query, "query parameter 'page'"),
        ("/header", header, "header parameter 'x-key'"),
        ("/cookie", cookie, "cookie parameter 'crumb'"),
        ("/dependency", dependency, "header parameter"),
        ("/strange", strange, "its arguments have no JSON schema: Cannot generate a JsonSchema"),
        ("/tools/{name}", nested_path, "one plain segment"),
    ],
)
async def test_start_up_says_which_route_can_not_be_a_tool_and_why(
    path: str, handler: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def add(app: FastAPI) -> None:
        app.post(path, response_model=None)(handler)
        app.post("/good")(lambda: None)

    tools = await harvested(add)

    assert list(tools) == ["good"]
    (record,) = [it for it in caplog.records if it.levelno == logging.WARNING]
    assert f"toolbox: POST {path} is not served over MCP: " in record.message
    assert reason in record.message


async def test_a_plain_starlette_route_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    def add(app: FastAPI) -> None:
        app.add_route("/plain", lambda request: PlainTextResponse("ok"), methods=["POST"])

    assert not await harvested(add)
    assert "POST /plain is not served over MCP: a plain Starlette route" in caplog.text


async def test_an_indescribable_route_of_an_included_router_spoils_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def add(app: FastAPI) -> None:
        router = APIRouter()
        router.post("/strange", response_model=None)(strange)
        router.post("/good")(lambda: None)
        app.include_router(router)

    assert list(await harvested(add)) == ["good"]
    assert "POST /strange is not served over MCP: its arguments" in caplog.text


async def test_a_reply_without_a_schema_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def tool(body: Point) -> StrangeReply:
        """Answer strangely."""
        return StrangeReply(thing=1)

    tools = await harvested(lambda app: app.post("/tool")(tool))
    assert tools["tool"]["description"] == "Answer strangely."
    assert list(tools["tool"]["inputSchema"]["properties"]) == ["x", "y"]
    assert "not served" not in caplog.text


def test_the_number_and_names_of_the_tools_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_app(make_server(lambda app: (app.post("/b")(lambda: None), app.post("/a")(lambda: None))))
    assert "toolbox: 2 tools at /mcp: b, a" in caplog.text
