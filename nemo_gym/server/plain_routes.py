"""Routes whose handlers take nothing but the request and one JSON body, answered without FastAPI's general machinery.

For every request FastAPI gets ready for dependencies, parameters of all kinds, forms and streams, which costs several
times what a tool's handler does. A route that needs none of it reads and validates the body, calls the handler and
serialises the reply with FastAPI's own fields, and nothing else. What is unusual about a request, an invalid body above
all, is left to FastAPI before the handler has run, so that there is one place that finds words for it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi.datastructures import DefaultPlaceholder
from fastapi.params import Form
from fastapi.routing import APIRoute, serialize_response
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

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
        dependant, field, response_field = self.dependant, self.body_field, self.response_field
        is_dumped = response_field is not None
        serialize = functools.partial(
            serialize_response,
            field=response_field,
            include=self.response_model_include,
            exclude=self.response_model_exclude,
            by_alias=self.response_model_by_alias,
            exclude_unset=self.response_model_exclude_unset,
            exclude_defaults=self.response_model_exclude_defaults,
            exclude_none=self.response_model_exclude_none,
            dump_json=is_dumped,
        )
        assert isinstance(self.response_class, DefaultPlaceholder)
        reply = functools.partial(Response, media_type="application/json") if is_dumped else self.response_class.value

        async def answer(request: Request) -> Response:
            if _TRACED in request.scope or _INCLUDED in request.scope:
                return await general(request)
            values = {}
            if field is not None:
                content = await _read_body(request)
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
            return reply(await serialize(response_content=result))

        return answer


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
