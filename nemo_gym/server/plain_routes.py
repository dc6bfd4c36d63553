"""Routes whose handlers take nothing but the request and one JSON body, answered without FastAPI's general machinery.

For every request FastAPI gets ready for dependencies, parameters of all kinds, forms and streams, which costs several
times what a tool's handler does. A route that needs none of it reads and validates the body, calls the handler and
serialises the reply with FastAPI's own fields, and nothing else. What is unusual about a request, an invalid body above
all, is left to FastAPI before the handler has run, so that there is one place that finds words for it; the validators
of an invalid body therefore run twice.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from fastapi.datastructures import DefaultPlaceholder
from fastapi.exceptions import ResponseValidationError
from fastapi.params import Form
from fastapi.routing import APIRoute, serialize_response
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Scope

_JSON: Final = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})
# Earlier versions of FastAPI serialise replies in another way.
_SERIALISES_AS_HERE: Final = "dump_json" in inspect.signature(serialize_response).parameters
# By these keys of the scope FastAPI knows a request that is traced, and one of a router that another includes.
_TRACED: Final = "fastapi.telemetry"
_INCLUDED: Final = "fastapi"


class PlainRoute(APIRoute):
    """A route of FastAPI that spares plain handlers what they don't use; see the module."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._beginning = path.partition("{")[0]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether this is the route of a request. It is that of few, and most are told by their path."""
        is_placed_here = _INCLUDED not in scope and not scope.get("root_path")
        if is_placed_here and not scope["path"].startswith(self._beginning):
            return Match.NONE, {}
        return super().matches(scope)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers the requests of this route."""
        general = super().get_route_handler()
        if not _is_plain(self):
            return general
        dependant, field, reply = self.dependant, self.body_field, _replier(self)

        async def answer(request: Request) -> Response:
            if _TRACED in request.scope or _INCLUDED in request.scope or not _is_untouched(request):
                return await general(request)
            values = {}
            if field is not None:
                try:
                    content = await _read_body(request)
                except ClientDisconnect:
                    # FastAPI would answer 400 to nobody, and nobody would learn why.
                    raise
                except Exception as error:  # noqa: BLE001 - FastAPI decides, which then meets it where it reads
                    return await general(Request(request.scope, _raising(error)))
                try:
                    body = json.loads(content) if _is_json(request.scope) else None
                except (ValueError, RecursionError):
                    return await general(request)
                if body is None:
                    return await general(request)
                values[field.name], errors = field.validate(body, {}, loc=("body",))
                if errors:
                    return await general(request)
            if dependant.request_param_name is not None:
                values[dependant.request_param_name] = request
            assert dependant.call is not None
            result = await dependant.call(**values)
            if isinstance(result, Response):
                return result
            return await reply(request, result)

        return answer


def _is_untouched(request: Request) -> bool:
    """Tell whether nobody, a class derived from this route above all, has read the body or put another request here."""
    return type(request) is Request and not hasattr(request, "_body") and not request._stream_consumed


async def _read_body(request: Request) -> bytes:
    """Return a request's body and leave it to be read again, as `Request.body` does, which takes more steps."""
    parts = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    request._body = parts[0] if len(parts) == 1 else b"".join(parts)
    return request._body


def _raising(error: Exception) -> Callable[[], Coroutine[Any, Any, Message]]:
    async def receive() -> Message:
        raise error

    return receive


def _replier(route: APIRoute) -> Callable[[Request, Any], Coroutine[Any, Any, Response]]:
    """Return what makes the reply of a route of what its handler returned."""
    is_dumped = route.response_field is not None
    serialize = functools.partial(
        serialize_response,
        field=route.response_field,
        include=route.response_model_include,
        exclude=route.response_model_exclude,
        by_alias=route.response_model_by_alias,
        exclude_unset=route.response_model_exclude_unset,
        exclude_defaults=route.response_model_exclude_defaults,
        exclude_none=route.response_model_exclude_none,
        dump_json=is_dumped,
    )
    assert isinstance(route.response_class, DefaultPlaceholder)
    response = functools.partial(Response, media_type="application/json") if is_dumped else route.response_class.value

    async def reply(request: Request, result: Any) -> Response:
        try:
            return response(await serialize(response_content=result))
        except ResponseValidationError as error:
            assert route.dependant.call is not None
            raise _located(error, route.dependant.call, request, route.dependant.path) from None

    return reply


def _located(
    error: ResponseValidationError, handler: Callable[..., Any], request: Request, path: str | None
) -> ResponseValidationError:
    """Return the error of a wrong reply as FastAPI tells it: with the handler and its route."""
    context: Any = {"path": f"{request.method} {request.scope.get('root_path', '').rstrip('/')}{path}"}
    # Without its source a handler can't be told, but the reply is wrong all the same.
    with suppress(OSError, TypeError):
        file = inspect.getsourcefile(handler)
        line = inspect.getsourcelines(handler)[1]
        context |= {"file": file or "", "line": line, "function": getattr(handler, "__name__", "")}
    return ResponseValidationError(error.errors(), body=error.body, endpoint_ctx=context)


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return value in _JSON
    return False


def _is_plain(route: APIRoute) -> bool:
    needs = route.dependant
    others = (
        *(needs.dependencies, needs.path_params, needs.query_params, needs.header_params, needs.cookie_params),
        *(needs.http_connection_param_name, needs.websocket_param_name, needs.response_param_name),
        *(needs.background_tasks_param_name, needs.security_scopes_param_name),
    )
    # Several fields, or one that stands under its name, are put together in a body of their own.
    body = [] if route.body_field is None else [route.body_field]
    return (
        _SERIALISES_AS_HERE
        and inspect.iscoroutinefunction(needs.call)
        and not any(others)
        and needs.body_params == body
        and not any(isinstance(field.field_info, Form) for field in body)
        and isinstance(route.response_class, DefaultPlaceholder)
        and route.status_code is None
    )
