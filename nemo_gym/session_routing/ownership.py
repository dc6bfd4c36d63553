"""Who owns a session: claims read from, and written into, the session cookie and the MCP session token.

A session's owner is the worker that created it. Its id stands in the signed session under `SESSION_OWNER_KEY`. A
claim is believed only if its signature verifies and it has the shape of a worker id, so that it can never name
another path or host. Reading repeats Starlette's session middleware step by step (which of several cookies, what
is signed, when it is too old; see `session_cookie`), for the two must never disagree about a cookie.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import itsdangerous
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.session_routing.hop import HOP_HEADER, Headers
from nemo_gym.session_routing.session_cookie import (
    SESSION_OWNER_KEY as SESSION_OWNER_KEY,
    SessionCookies,
    SignedCookie,
    is_worker_id as is_worker_id,
)


def new_worker_id() -> str:
    """Return a fresh worker id: 32 hex digits, never used before and never again."""
    return uuid.uuid4().hex


def route_path(scope: Scope) -> str:
    """Return the path that the application's routes are matched with: without the root path, where it has one."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    rest = path.removeprefix(root_path)
    return rest if not rest or rest.startswith("/") else path


class TokenSerializer(Protocol):
    """What reads an MCP session token: a serializer of itsdangerous, or anything that raises its errors."""

    def loads(self, s: str) -> Any:
        """Return the payload of the signed token `s`."""


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What a request says in its token header.

    Attributes:
        value: The token; None where there is none (a blank value is none) or more than one.
        doubled: The header is there more than once. Whose token is meant is then not known, and none is to be taken.
    """

    value: str | None
    doubled: bool = False


def read_token_header(headers: Iterable[tuple[bytes, bytes]], name: str) -> TokenHeader:
    """Return what the token header says; whoever reads an MCP session token reads it so.

    Args:
        headers: A scope's headers, their names in any case.
        name: The token header's name, in any case.
    """
    sought = name.lower().encode("latin-1")
    values = [value for key, value in headers if key.lower() == sought]
    if len(values) > 1:
        return TokenHeader(None, doubled=True)
    token = values[0].strip().decode("latin-1") if values else ""
    return TokenHeader(token or None)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says about its owner.

    Attributes:
        owner: The worker that its cookie or token names, None where no genuine one does.
        expired: The signature is genuine but out of its time (too old, or dated in the future).
        headers: The headers to hand to the application instead of the received ones; None when those are right.
        is_open: No genuine cookie or token places the request, so that its body may.
    """

    owner: str | None
    expired: bool = False
    headers: Headers | None = None
    is_open: bool = False


class ClaimReader:
    """Reads the claim of a request.

    Args:
        cookies: Reads the session cookie. One that an earlier secret signed is signed anew, under its old date, in
            the headers that the application sees.
        max_age: Seconds that a cookie is valid; None for ever.
        mcp_token_header: Name of the header that carries the MCP session token, in any case.
        mcp_token_serializer: Reads that token; its payload is a mapping with `SESSION_OWNER_KEY`.
        mcp_path: Where, and below which, the token decides even if there is a cookie.
    """

    def __init__(
        self,
        cookies: SessionCookies,
        max_age: int | None,
        mcp_token_header: str | None = None,
        mcp_token_serializer: TokenSerializer | None = None,
        mcp_path: str = "/mcp",
    ) -> None:
        self._cookies = cookies
        self._max_age = max_age
        self._token_header = mcp_token_header
        self._token_serializer = mcp_token_serializer
        self._mcp_path = mcp_path.rstrip("/")

    def read(self, scope: Scope) -> Claim:
        """Return the claim of an HTTP or WebSocket scope."""
        cookie: SignedCookie | None = None
        foreign_hop_header = False
        for name, value in scope["headers"]:
            if name == b"cookie":
                cookie = self._cookies.verify(value) or cookie
            elif name == HOP_HEADER:
                foreign_hop_header = True

        headers: Headers | None = None
        if cookie is not None and cookie.replacement is not None:
            headers = self._with_cookie(scope["headers"], cookie.replacement)
        if foreign_hop_header:
            received = scope["headers"] if headers is None else headers
            headers = [header for header in received if header[0] != HOP_HEADER]

        token = None
        if self._token_header and (cookie is None or self.is_mcp(scope)):
            token = read_token_header(scope["headers"], self._token_header)
        if token is not None and token.value is not None:
            owner, expired = read_owner(self._token_serializer, token.value)
        elif cookie is not None and (token is None or not token.doubled):
            owner, expired = cookie.owner, self._is_expired(cookie.signed_at)
        else:
            owner, expired = None, False
        has_genuine_cookie = cookie is not None and cookie.signed_at is not None
        is_open = owner is None and not has_genuine_cookie and not self.is_mcp(scope)
        return Claim(owner, expired and owner is not None, headers, is_open)

    def is_mcp(self, scope: Scope) -> bool:
        """Tell whether a request is on the MCP path."""
        path = route_path(scope)
        return path == self._mcp_path or path.startswith(self._mcp_path + "/")

    def _is_expired(self, signed_at: int | None) -> bool:
        """One second stricter than the session middleware, whose clock may tick between our look and its own."""
        if signed_at is None or self._max_age is None:
            return False
        age = int(time.time()) - signed_at
        return age >= self._max_age or age < 0

    def _with_cookie(self, headers: Headers, value: bytes) -> Headers:
        """Return the headers with the session cookie's value replaced, wherever it stands; empty removes it."""
        name = self._cookies.name.encode("latin-1")
        replaced: Headers = []
        for header in headers:
            if header[0] != b"cookie":
                replaced.append(header)
                continue
            others = [part for part in header[1].split(b";") if part.partition(b"=")[0].strip() != name]
            if others:
                replaced.append((b"cookie", b";".join(others).strip()))
        if value:
            replaced.append((b"cookie", name + b"=" + value))
        return replaced


def read_owner(serializer: TokenSerializer | None, token: str) -> tuple[str | None, bool]:
    """Return the owner that a signed token names, None where no genuine one does, and whether it is out of its time."""
    if serializer is None:
        return None, False
    expired = False
    try:
        try:
            payload = serializer.loads(token)
        except itsdangerous.SignatureExpired as error:
            expired = True
            load_payload = getattr(serializer, "load_payload", None)
            payload = load_payload(error.payload) if load_payload and error.payload else None
    except (itsdangerous.BadData, ValueError, RecursionError):
        return None, False
    owner = payload.get(SESSION_OWNER_KEY) if isinstance(payload, dict) else None
    return (owner, expired) if is_worker_id(owner) else (None, False)


class SessionCounter(Protocol):
    """What counts the sessions that this worker holds."""

    def note_reply(self, scope: Scope, status: int, *, is_stamped: bool) -> None:
        """Count the session that a reply begins."""

    def ends_session(self, scope: Scope) -> bool:
        """Tell whether a good reply to a request ends its session."""

    def note_end(self, scope: Scope) -> None:
        """Count the end of a request's session."""


class SessionOwnerMiddleware:
    """Stamps sessions that are created or adopted here with this worker's id.

    It stands just inside the session middleware, so that it sees what all others have written into the session. A
    session is stamped when the reply begins, and only if there is something in it: a request that writes no
    session gets no cookie.

    Args:
        app: The application within.
        worker_id: This worker.
        counter: Counts the sessions, where that is wanted.
    """

    def __init__(self, app: ASGIApp, worker_id: str, counter: SessionCounter | None = None) -> None:
        self.app = app
        self.worker_id = worker_id
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        counter = self._counter
        is_last = False

        async def stamp_and_send(message: Message) -> None:
            nonlocal is_last
            if message["type"] == "http.response.start":
                session = scope.get("session")
                if session:
                    is_stamped = not is_worker_id(session.get(SESSION_OWNER_KEY))
                    if is_stamped:
                        session[SESSION_OWNER_KEY] = self.worker_id
                    if counter is not None:
                        counter.note_reply(scope, message["status"], is_stamped=is_stamped)
                        is_last = 200 <= message["status"] < 300 and counter.ends_session(scope)
            elif is_last and counter is not None and not message.get("more_body", False):
                is_last = False
                counter.note_end(scope)
            await send(message)

        await self.app(scope, receive, stamp_and_send)
