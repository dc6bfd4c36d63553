"""A refusal as a JSON-RPC client understands it.

A client of MCP ties its whole connection to the HTTP status: a plain 410 ends more than the one call. So a reply to
a JSON-RPC request can say the same in the protocol's own words, under status 200.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.session_routing.lost import SESSION_LOST_HEADER

SESSION_LOST_CODE: Final = -32010
"""The error code of a lost session; `data` has the fields of the plain 410.

Of the codes that MCP leaves to implementations, -32000 to -32019, the official SDKs use those nearest to -32000.
"""

UNANSWERED_CODE: Final = -32011
"""The error code of any other refusal; `data` has the plain reply's `status`."""

LARGEST_KEPT: Final = 4 * 2**20
"""Bytes; a longer body is not kept, so what is said to it stays plain."""

_JSON_SPACE: Final = b" \t\r\n"  # RFC 8259 section 2
_OF_THE_PLAIN_BODY: Final = frozenset({b"content-length", b"content-type"})


def jsonrpc_error_reply(body: bytes, reply: Response) -> Response:
    """Return what to answer to a POST on the MCP path instead of a plain refusal.

    To a request it is status 200 with a JSON-RPC error that carries the refusal's text; to a notification or a
    response, which take no answer, it is 202. The refusal's own headers stay.

    Args:
        body: The POST's body.
        reply: The refusal; its `detail` is taken where its body is JSON, else its text.

    Returns:
        The translated reply, or `reply` itself where the body is not exactly one JSON-RPC message.
    """
    message = _parse(body)
    if message.get("jsonrpc") != "2.0":
        return reply
    if "method" not in message:
        answers = "id" in message and ("result" in message or "error" in message)
        return _with_headers_of(reply, Response(status_code=202)) if answers else reply
    if not isinstance(message["method"], str):
        return reply
    if "id" not in message:
        return _with_headers_of(reply, Response(status_code=202))
    request_id = message["id"]
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | float | None):
        return reply
    # Escaped to ASCII: an id may hold what UTF-8 can't encode.
    content = json.dumps({"jsonrpc": "2.0", "id": request_id, "error": _error(reply)})
    return _with_headers_of(reply, Response(content, media_type="application/json"))


def _parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object that `body` is, empty when it is none."""
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in {float("inf"), float("-inf")}:
        raise ValueError("a number that is too large to be repeated")
    return number


def _error(reply: Response) -> dict[str, Any]:
    plain = bytes(reply.body)
    fields = _parse(plain)
    text = fields.pop("detail", None)
    if not isinstance(text, str):
        text = plain.decode("utf-8", "replace") or f"status {reply.status_code}"
    if SESSION_LOST_HEADER in reply.headers:
        return {"code": SESSION_LOST_CODE, "message": text, "data": fields}
    return {"code": UNANSWERED_CODE, "message": text, "data": {"status": reply.status_code}}


def _with_headers_of(plain: Response, reply: Response) -> Response:
    reply.raw_headers += [header for header in plain.raw_headers if header[0] not in _OF_THE_PLAIN_BODY]
    return reply


class RecordedBody:
    """A request's body, kept as it passes, so that it is known after whoever read it has failed.

    Args:
        scope: The request's scope.
        receive: Its ASGI receive; the one to use instead is this object's `receive`.

    Attributes:
        client_left: The client went away before the body's end.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"")
        self._receive = receive
        self._kept = bytearray()
        self._too_long = length.isdigit() and int(length) > LARGEST_KEPT
        self._complete = False
        self.client_left = False

    async def receive(self) -> Message:
        """Receive the next event, and keep its part of the body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = not self._complete
        elif not self._complete:
            if not self._too_long:
                self._kept += message.get("body", b"")
            if len(self._kept) > LARGEST_KEPT:
                self._too_long = True
                self._kept.clear()
            self._complete = not message.get("more_body", False)
        return message

    async def whole(self) -> bytes:
        """Receive what is left of the body and return all of it; empty when it is too long or the client left."""
        while not (self._complete or self._too_long or self.client_left):
            await self.receive()
        return bytes(self._kept) if self._complete else b""


class WatchedReply:
    """A reply as it passes.

    As long as it is nothing but a successful JSON reply's leading white space, which keeps a waiting client alive,
    another JSON value may still follow.

    Args:
        send: The request's ASGI send; the one to use instead is this object's `send`.

    Attributes:
        is_open: Whether the reply has begun, and any JSON value may still follow.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_open = False

    async def send(self, message: Message) -> None:
        """Send the next event."""
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            self.is_open = message["status"] == 200 and kind.partition(b";")[0].strip().lower() == b"application/json"
        elif message.get("body", b"").strip(_JSON_SPACE) or not message.get("more_body", False):
            self.is_open = False
        await self._send(message)
