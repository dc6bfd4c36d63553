"""Plain routes answer as FastAPI's own do: each request is made to both, and the replies are compared."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import unquote

import pytest
from fastapi import APIRouter, BackgroundTasks, Body, Depends, FastAPI, Form, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message

from nemo_gym.server.plain_routes import PlainRoute
from tests.mcp_support import make_server


class Argument(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: StrictInt
    note: str | None = None


class Result(BaseModel):
    total: int = Field(serialization_alias="sum")
    note: str | None = None


class LongerResult(Result):
    more: str = "not declared by the route"


class Emptied(BaseModel):
    left: int

    @model_validator(mode="before")
    @classmethod
    def take_out(cls, data: Any) -> Any:
        data["left"] = data.pop("right")
        return data


@dataclass
class Pair:
    first: int
    second: int


class RefusedError(Exception):
    pass


async def model(request: Request, body: Argument) -> Result:
    return Result(total=body.count, note=request.headers.get("x-note"))


async def longer(body: Argument) -> Result:
    return LongerResult(total=body.count)


async def similar(body: Argument) -> Result:
    return {"total": body.count, "note": "a mapping"}  # type: ignore[return-value]


async def wrong(body: Argument) -> Result:
    return {"total": "many"}  # type: ignore[return-value]


async def undeclared(body: dict[str, Any]):  # type: ignore[no-untyped-def]
    return {"keys": sorted(body), "pair": Pair(1, 2)}


async def nothing(request: Request) -> None:
    assert request.method == "POST"


async def numbers(body: list[float]) -> list[float]:
    return body


async def anything(body: Any = Body()) -> Any:
    return {"repr": repr(body)}


async def optional(body: Argument | None = None) -> Result:
    return Result(total=-1 if body is None else body.count)


async def embedded(body: Annotated[Argument, Body(embed=True)]) -> Result:
    return Result(total=body.count)


async def two(body: Argument, other: Argument) -> Result:
    return Result(total=body.count + other.count)


async def emptied(body: Emptied) -> Emptied:
    return body


async def own_response(body: Argument) -> Response:
    return Response(str(body.count), status_code=207, headers={"x-own": "1"}, media_type="text/x-count")


async def streamed(body: Argument) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        yield "b"

    return StreamingResponse(parts())


async def http_error(body: Argument) -> Result:
    raise HTTPException(418, {"count": body.count}, {"x-reason": "tea"})


async def refused(body: Argument) -> Result:
    raise RefusedError(body.count)


async def reads_again(request: Request, body: Argument) -> dict[str, Any]:
    return {"json": await request.json(), "bytes": len(await request.body())}


def in_a_thread(body: Argument) -> Result:
    return Result(total=body.count)


async def query(body: Argument, times: int = 2) -> Result:
    return Result(total=body.count * times)


async def form(count: Annotated[int, Form()]) -> Result:
    return Result(total=count)


async def given(response: Response, body: Argument) -> Result:
    response.headers["x-given"] = "1"
    response.status_code = 202
    return Result(total=body.count)


async def dependent(body: Argument, factor: Annotated[int, Depends(lambda: 3)]) -> Result:
    return Result(total=body.count * factor)


async def background(tasks: BackgroundTasks, body: Argument) -> Result:
    tasks.add_task(len, ())
    return Result(total=body.count)


async def session(request: Request, body: Argument) -> dict[str, int]:
    request.session["count"] = request.session.get("count", 0) + body.count
    return {"count": request.session["count"]}


PLAIN = [
    *(model, longer, similar, wrong, undeclared, nothing, numbers, anything, optional, emptied, own_response, streamed),
    *(http_error, refused, reads_again, session),
]
GENERAL = [embedded, two, in_a_thread, query, form, given, dependent, background]
HANDLERS: dict[str, Callable[..., Any]] = {handler.__name__: handler for handler in (*PLAIN, *GENERAL)}


def make_app(route_class: type[APIRoute]) -> FastAPI:
    app = FastAPI()
    app.router.route_class = route_class
    for name, handler in HANDLERS.items():
        app.post(f"/{name}")(handler)
    app.post("/made", status_code=201)(model)
    app.post("/bare", response_model_exclude_none=True, response_model_by_alias=False)(model)
    app.post("/unfiltered", response_model=None)(model)
    app.post("/text", response_class=JSONResponse)(similar)
    app.post("/with/{name}")(with_name)
    app.get("/only_get")(only_get)
    app.post("/{name}")(with_name)

    @app.exception_handler(RefusedError)
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"refused": str(error), "body": (await request.body()).decode()}, 409)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        detail = json.dumps({"errors": error.errors(), "body": error.body, "text": str(error)}, default=repr)
        return Response(detail, 422, media_type="application/json")

    app.add_middleware(SessionMiddleware, secret_key="s")
    return app


async def with_name(name: str, body: Argument) -> dict[str, Any]:
    return {"name": name, "count": body.count}


async def only_get() -> str:
    return "got"


@pytest.fixture(scope="module")
def both() -> list[FastAPI]:
    return [make_app(cls) for cls in (APIRoute, PlainRoute)]


JSON = {"content-type": "application/json"}
BODIES: dict[str, bytes] = {
    "good": b'{"count": 3, "note": "\xc3\xa9"}',
    "a float": b'{"count": 3.5}',
    "too many fields": b'{"count": 3, "other": 1}',
    "a large number": b'{"count": 123456789012345678901234567890}',
    "no number": b'{"count": NaN}',
    "repeated": b'{"count": 1, "count": 2}',
    "a lone surrogate": b'{"count": 1, "note": "\\ud800"}',
    "a list": b"[1.5, 2, 1e400]",
    "null": b"null",
    "a number": b"7",
    "empty": b"",
    "blank": b"  ",
    "no JSON": b"{count: 3}",
    "cut off": b'{"count": 3',
    "not UTF-8": b'{"count": 3, "note": "\xff"}',
    "UTF-16": '{"count": 3}'.encode("utf-16"),
    "with a mark of its order": b'\xef\xbb\xbf{"count": 3}',
    "nested too deeply": b"[" * 100_000,
    "to be taken out": b'{"right": 4}',
    "wrongly to be taken out": b'{"right": "x"}',
}
CONTENT_TYPES = [
    "application/json",
    "application/json; charset=utf-8",
    "Application/JSON",
    "application/vnd.api+json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "",
]


async def ask(app: FastAPI, method: str, target: str, content: bytes, headers: dict[str, str]) -> tuple[Any, ...]:
    """Return the status, the headers and the body of a reply."""
    path, _, query_string = target.partition("?")
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "headers": sent}
    scope |= {"query_string": query_string.encode(), "root_path": "", "scheme": "http", "server": ("t", 80)}
    parts: list[Message] = [
        {"type": "http.request", "body": content[:5], "more_body": True},
        {"type": "http.request", "body": content[5:], "more_body": False},
    ]
    replied: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        replied.append(message)

    with contextlib.suppress(Exception):
        await app(scope, receive, send)
    head, *rest = replied
    body = b"".join(message.get("body", b"") for message in rest)
    return head["status"], head["headers"], body.replace(b"PlainRoute", b"APIRoute")


async def same(
    apps: list[FastAPI], target: str, content: bytes, headers: dict[str, str], method: str = "POST"
) -> bytes:
    expected, reply = [await ask(app, method, target, content, headers) for app in apps]
    if target == "/session":
        expected, reply = expected[::2], reply[::2]
    assert reply == expected, target
    return bytes(reply[-1])


@pytest.mark.parametrize("name", BODIES)
async def test_every_handler_answers_a_body_as_behind_fastapis_own_route(both: list[FastAPI], name: str) -> None:
    for handler in HANDLERS:
        await same(both, f"/{handler}", BODIES[name], JSON)


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
async def test_what_counts_as_json_is_the_same(both: list[FastAPI], content_type: str) -> None:
    for handler in ("model", "undeclared", "anything", "optional", "form"):
        for content in (b'{"count": 3}', b"count=3", b""):
            await same(both, f"/{handler}", content, {"content-type": content_type} if content_type else {})


async def test_a_routes_own_settings_and_its_place_among_the_others_count(both: list[FastAPI]) -> None:
    good = b'{"count": 3}'
    for path in ("/made", "/bare", "/unfiltered", "/text", "/with/me", "/tool", "/query?times=5", "/query?times=x"):
        await same(both, path, good, JSON)
    for path in ("/model/", "//model", "/Model", "/models", "/only_get", "/with/", "/a/b", "/model%0A", "/docs"):
        for method in ("POST", "GET", "HEAD", "OPTIONS"):
            await same(both, path, good, JSON, method)
    assert await same(both, "/only_get", b"", {}, "GET") == b'"got"'


def test_handlers_of_the_request_and_one_body_are_plain_and_the_rest_is_fastapis(both: list[FastAPI]) -> None:
    routes = [route for route in both[1].routes if isinstance(route, PlainRoute)]
    plain = {route.name for route in routes if route.get_route_handler().__module__ == PlainRoute.__module__}
    assert plain >= {handler.__name__ for handler in PLAIN}
    assert not plain & {handler.__name__ for handler in GENERAL}


async def test_routes_answer_where_another_application_mounts_or_includes_them() -> None:
    replies = []
    for cls in (APIRoute, PlainRoute):
        router, outer = APIRouter(route_class=cls), FastAPI()
        router.post("/model")(model)
        outer.mount("/mounted", make_app(cls))
        outer.include_router(router, prefix="/included", dependencies=[Depends(lambda: None)])
        paths = ("/mounted/model", "/included/model", "/model", "/mounted/included/model")
        replies.append([await ask(outer, "POST", path, b'{"count": 1}', JSON) for path in paths])
    assert replies[0] == replies[1]
    assert [status for status, *_ in replies[0]] == [200, 200, 404, 404]


async def test_the_documentation_is_the_same(both: list[FastAPI]) -> None:
    assert b"/reads_again" in await same(both, "/openapi.json", b"", {}, "GET")


async def test_a_client_that_leaves_before_the_end_of_its_body_is_no_request(both: list[FastAPI]) -> None:
    parts: list[Message] = [
        {"type": "http.request", "body": b'{"count":', "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {"type": "http", "method": "POST", "path": "/model", "headers": [(b"content-type", b"application/json")]}
    replied: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        replied.append(message)

    with pytest.raises(ClientDisconnect):
        await both[1]({**scope, "query_string": b""}, receive, send)
    assert [message.get("status") for message in replied] == [500, None]


async def test_a_wrong_reply_names_its_handler_and_its_route(both: list[FastAPI]) -> None:
    texts = []
    for app in both:
        outer = FastAPI()
        outer.mount("/mounted", app)
        for path, served in (("/wrong", app), ("/mounted/wrong", outer)):
            with pytest.raises(ResponseValidationError) as caught:
                await answered(served, path, [{"type": "http.request", "body": b'{"count": 1}'}])
            texts.append(str(caught.value))
    assert texts[:2] == texts[2:]
    assert "test_plain_routes.py" in texts[0]
    assert "in wrong\n    POST /wrong" in texts[0]
    assert "POST /mounted/wrong" in texts[1]


async def test_a_body_that_cant_be_received_is_answered_as_behind_fastapis_own_route(both: list[FastAPI]) -> None:
    for error in (RuntimeError("broken"), HTTPException(413, "too much"), ValueError("broken")):
        parts: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}, error]
        expected, reply = [await answered(app, "/model", [*parts]) for app in both]
        assert reply == expected
        assert reply[0]["status"] == getattr(error, "status_code", 400)


async def test_a_class_derived_from_the_route_may_read_the_body_first_or_put_another_request_in_its_place() -> None:
    class Inverted(Request):
        async def body(self) -> bytes:
            return (await super().body()).replace(b"3", b"33")

    async def read(request: Request) -> Request:
        await request.body()
        return request

    async def consume(request: Request) -> Request:
        async for _ in request.stream():
            pass
        return request

    async def replace(request: Request) -> Request:
        return Inverted(request.scope, request.receive)

    def app_of(base: type[APIRoute], first: Callable[[Request], Awaitable[Request]]) -> FastAPI:
        class Derived(base):  # type: ignore[misc, valid-type]
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                inner = super().get_route_handler()

                async def answer(request: Request) -> Response:
                    return await inner(await first(request))  # type: ignore[no-any-return]

                return answer

        return make_app(Derived)

    counts = []
    for first in (read, consume, replace):
        apps = [app_of(base, first) for base in (APIRoute, PlainRoute)]
        counts.append(await same(apps, "/model", b'{"count": 3}', JSON))
    assert [b'"sum":3,' in counts[0], b"error parsing the body" in counts[1], b'"sum":33,' in counts[2]] == [True] * 3


async def answered(app: FastAPI, path: str, parts: list[Any]) -> list[Message]:
    """Return the reply to a request that arrives in these parts; an exception among them is raised."""
    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
    replied: list[Message] = []

    async def receive() -> Message:
        part = parts.pop(0)
        if isinstance(part, Exception):
            raise part
        return part  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        replied.append(message)

    await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    return replied


def test_the_routes_of_a_server_are_plain() -> None:
    def add_tool(app: FastAPI) -> None:
        app.post("/tool")(model)

    routes = [route for route in make_server(add_tool).setup_webserver().routes if isinstance(route, APIRoute)]
    plain = {route.path for route in routes if route.get_route_handler().__module__ == PlainRoute.__module__}
    assert plain == {"/health", "/seed_session", "/verify", "/aggregate_metrics", "/tool"}
