"""What the two ends of a forwarded request agree on.

Where it travels as HTTP/1.1 over a private socket (a WebSocket's upgrade always does), two things can't travel as
they are:

- what the receiving worker knows of the connection (the client's address, the scheme), which goes in one private
  header. It is read only from requests that came over the private socket; from all others it is removed;
- header values that are not ASCII: the client library writes text as UTF-8, so each value is taken as Latin-1
  text on the way out and turned back on the way in. ASCII, which is nearly all, is not touched by either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit

import orjson
from starlette.types import Scope
from yarl import URL

HOP_HEADER: Final = b"x-nemo-gym-forwarded-client"

ARRIVED_KEY: Final = "nemo_gym.session_routing.arrived"
"""The scope key that marks a request of the private socket. The outside can set headers, never scope keys."""

STRAIGHT_KEY: Final = "nemo_gym.session_routing.straight"
"""The scope key that marks a request which a client of this machine and user has sent to the private socket itself."""

OWNED_KEY: Final = "nemo_gym.session_routing.owned"
"""The scope key that marks a request which goes, or has come, to another worker because that one owns its session."""

PLACED_KEY: Final = "nemo_gym.session_routing.placed"
"""The scope key under which a request that may begin a session tells who placed it: a `loads.Sender`."""

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", HOP_HEADER}
)  # fmt: skip
"""Header fields that belong to one connection and not to the message (RFC 9110 section 7.6.1), and the private one.

What else a client names in `Connection` is not among them. That field tells a proxy what to remove, and the workers
of one port are one server: one that removed, say, the cookie would have its owner answer another request.
"""

Headers = list[tuple[bytes, bytes]]

_LOCAL_CLIENT: Final = ("127.0.0.1", 0)
_CACHED: Final = 1024
_LONGEST_CACHED: Final = 1024  # bytes


def end_to_end_headers(headers: Sequence[tuple[bytes, bytes]], *, keep: bytes = b"") -> Headers:
    """Return the headers without those that are the connection's own.

    Args:
        headers: The received headers.
        keep: One name that stays although it is the connection's own.
    """
    return [header for header in headers if header[0].lower() not in HOP_BY_HOP or header[0] == keep]


def offers_body(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Tell whether a client waits with its body until it is asked for it; the servers of both workers decide it so."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def describe_origin(scope: Scope) -> bytes:
    """Return what `scope` says of the connection and why it is sent, as one JSON list without a tab or a line break."""
    return orjson.dumps(
        (
            scope.get("client"),
            scope.get("server"),
            scope.get("scheme", "http"),
            scope.get("root_path", ""),
            scope.get("http_version", "1.1"),
            OWNED_KEY in scope,
            scope.get(PLACED_KEY),
        )
    )


def raw_path_of(scope: Scope) -> bytes:
    """Return the path with its percent-encoding as received."""
    raw_path: bytes | None = scope.get("raw_path")
    return raw_path or quote(scope["path"]).encode("ascii")


def owner_url(scope: Scope) -> URL:
    """Return where to send a request of `scope`: its path and query with their percent-encoding as received."""
    raw_path = raw_path_of(scope)
    query = scope["query_string"]
    return URL.build(
        scheme="http",
        host="localhost",
        path=raw_path.decode("latin-1"),
        query_string=query.decode("ascii") if query.isascii() else "",
        encoded=True,
    )


def outgoing_headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the headers to send to the owner over HTTP: the received end-to-end ones and the private one.

    The framing of the body stays as the client announced it, for the owner's handler may look at it.
    """
    sent = end_to_end_headers(scope["headers"], keep=b"transfer-encoding")
    query = scope["query_string"]
    origin = describe_origin(scope)
    sent.append((HOP_HEADER, origin if query.isascii() else origin + b"\t" + query))
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent]


def restore_origin(scope: Scope) -> None:
    """Make the scope of a request that came over the private socket what its handler must see.

    With the private header it was forwarded: it has arrived, and gets the origin that the receiving worker saw.
    Without, it comes straight from a client of this machine and user, and looks as if the shared port had taken it;
    the router decides on it as on any other.

    Raises:
        ValueError: The private header is not one of a worker's.
    """
    host = b""
    for name, value in scope["headers"]:
        if name == HOP_HEADER:
            _restore_forwarded(scope, _as_received(value))
            return
        if name == b"host":
            host = value
    scope[STRAIGHT_KEY] = True
    scope["client"] = _LOCAL_CLIENT
    scope["server"] = _named_by(host) if len(host) <= _LONGEST_CACHED else None


def read_origin(value: bytes) -> dict[str, Any]:
    """Return what `describe_origin` said, under the scope's keys.

    Raises:
        ValueError: It said nothing of the kind.
    """
    try:
        client, server, scheme, root_path, http_version, is_owned, placed = orjson.loads(value)
        origin: dict[str, Any] = {
            ARRIVED_KEY: True,
            "client": client and tuple(client),
            "server": server and tuple(server),
            "scheme": scheme,
            "root_path": root_path,
            "http_version": http_version,
        }
        if is_owned:
            origin[OWNED_KEY] = True
        if placed:
            slot, worker = placed
            origin[PLACED_KEY] = int(slot), worker
    except (TypeError, ValueError) as error:
        raise ValueError(f"{value!r} is no origin") from error
    return origin


def _restore_forwarded(scope: Scope, origin: bytes) -> None:
    origin, _, query = origin.partition(b"\t")
    scope.update(read_origin(origin))
    scope["headers"] = [(name, _as_received(value)) for name, value in scope["headers"] if name != HOP_HEADER]
    if query:
        scope["query_string"] = query


def _as_received(value: bytes) -> bytes:
    return value if value.isascii() else value.decode("utf-8", "replace").encode("latin-1", "replace")


@functools.lru_cache(_CACHED)
def _named_by(host: bytes) -> tuple[str, int] | None:
    """Return what a Host header names, as a scope's `server` has it; None where it names nothing."""
    try:
        parts = urlsplit(b"//" + host)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    return (name.decode("ascii"), 80 if port is None else port) if name else None
