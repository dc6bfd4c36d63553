"""A session named in the request's body: a field of its JSON object, read ahead of the application.

Only for servers that declare such a field; and of their requests only a POST of JSON is looked into. What was read is
handed on as it came, part by part.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import orjson
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope

from nemo_gym.session_routing.ownership import TokenSerializer, route_path

LARGEST_READ_AHEAD: Final = 64 * 2**20
"""Bytes of a body that are held to look for the field."""

_SCOPE_KEY: Final = "nemo_gym.body_id"


class BodyIdProblem(Enum):
    """Why a body does not tell which session it names."""

    TOO_LARGE = auto()
    NOT_TEXT = auto()
    CLIENT_LEFT = auto()


@dataclass(frozen=True, slots=True)
class BodyId:
    """What a request's body says of its session.

    Attributes:
        value: The field's text; None where there is none.
        problem: Why that can't be told.
    """

    value: str | None = None
    problem: BodyIdProblem | None = None


@dataclass(frozen=True)
class BodyIdField:
    """The field in which bodies name their session.

    Attributes:
        name: The field, at the top of the JSON object.
        serializer: Reads an id that the server made; its payload is a mapping with `SESSION_OWNER_KEY`.
        ignored_paths: Routes outside of sessions, whose bodies are not looked into.
        limit: Bytes of a body that are held to look for the field.
    """

    name: str
    serializer: TokenSerializer
    ignored_paths: Collection[str] = field(default_factory=frozenset)
    limit: int = LARGEST_READ_AHEAD

    async def read(self, scope: Scope, receive: Receive) -> tuple[BodyId, Receive]:
        """Return what a request's body says, and the ASGI `receive` to go on with.

        The result is kept in the scope, so that whoever asks again reads nothing.
        """
        found = scope.get(_SCOPE_KEY)
        if found is None:
            found, receive = await self._read(scope, receive)
            scope[_SCOPE_KEY] = found
        return found, receive

    async def _read(self, scope: Scope, receive: Receive) -> tuple[BodyId, Receive]:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) in self.ignored_paths:
            return BodyId(), receive
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if not _may_be_json(headers.get("content-type", "")):
            return BodyId(), receive
        if length.isdigit() and int(length) > self.limit:
            return BodyId(problem=BodyIdProblem.TOO_LARGE), receive
        messages: deque[Message] = deque()
        body = bytearray()
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return BodyId(problem=BodyIdProblem.CLIENT_LEFT), _replayed(messages, receive)
            body += message.get("body", b"")
            if len(body) > self.limit:
                return BodyId(problem=BodyIdProblem.TOO_LARGE), _replayed(messages, receive)
            if not message.get("more_body", False):
                return self._find(bytes(body)), _replayed(messages, receive)

    def _find(self, body: bytes) -> BodyId:
        # Most bodies that have no such field need not be parsed to see it.
        if json.dumps(self.name).encode() not in body:
            return BodyId()
        parsed = _parse(body)
        value = parsed.get(self.name) if isinstance(parsed, dict) else None
        if value is None:
            return BodyId()
        if not isinstance(value, str) or not value:
            return BodyId(problem=BodyIdProblem.NOT_TEXT)
        return BodyId(value)


def unreadable_body_reply(name: str, problem: BodyIdProblem) -> Response:
    """Return what to answer to a request whose body does not tell its session.

    Args:
        name: The field.
        problem: Why it can't be told.
    """
    if problem is BodyIdProblem.NOT_TEXT:
        detail = f"'{name}' must be a text that is not empty."
        return JSONResponse({"detail": detail}, status_code=422)
    detail = f"The body is too large to look for '{name}' in it. Send the session's cookie with this request."
    return JSONResponse({"detail": detail}, status_code=413)


def _may_be_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return not media_type or media_type.endswith(("/json", "+json"))


def _parse(body: bytes) -> Any:
    """Return the JSON value; what handlers read with `json` counts too, such as NaN and lone surrogates."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _replayed(messages: deque[Message], receive: Receive) -> Receive:
    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
