"""What the two ends of a forwarded request agree on.

Between two workers a request travels as plain HTTP/1.1 over a Unix socket. Two things can't travel as they are:

- what the receiving worker knows of the connection (the client's address, the scheme), which goes in one private
  header. It is read only from requests that came over the private socket; from all others it is removed;
- header values that are not ASCII: the client library writes text as UTF-8, so each value is taken as Latin-1
  text on the way out and turned back on the way in. ASCII, which is nearly all, is not touched by either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import orjson
from starlette.types import Scope
from yarl import URL

HOP_HEADER: Final = b"x-nemo-gym-forwarded-client"

ARRIVED_KEY: Final = "nemo_gym.session_routing.arrived"
"""The scope key that marks a request of the private socket. The outside can set headers, never scope keys."""

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""Header fields that belong to one connection and not to the message (RFC 9110 section 7.6.1)."""

Headers = list[tuple[bytes, bytes]]


def end_to_end_headers(headers: Iterable[tuple[bytes, bytes]], *, keep: bytes = b"") -> Headers:
    """Return the headers without those that are the connection's own, including the ones `Connection` names.

    Args:
        headers: The received headers.
        keep: One name that stays although it is the connection's own.
    """
    dropped = HOP_BY_HOP
    for name, value in headers:
        if name.lower() == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in dropped or name == keep]


def describe_origin(scope: Scope) -> bytes:
    """Return the private header's value: what `scope` says of the connection, as one JSON list."""
    query = scope["query_string"]
    return orjson.dumps(
        [
            scope.get("client"),
            scope.get("server"),
            scope.get("scheme", "http"),
            scope.get("root_path", ""),
            scope.get("http_version", "1.1"),
            None if query.isascii() else query.decode("latin-1"),
        ]
    )


def owner_url(scope: Scope) -> URL:
    """Return where to send a request of `scope`: its path and query with their percent-encoding as received."""
    raw_path = scope.get("raw_path") or quote(scope["path"]).encode("ascii")
    query = scope["query_string"]
    return URL.build(
        scheme="http",
        host="localhost",
        path=raw_path.decode("latin-1"),
        query_string=query.decode("ascii") if query.isascii() else "",
        encoded=True,
    )


def outgoing_headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the headers to send to the owner: the received end-to-end ones and the private one.

    The framing of the body stays as the client announced it, for the owner's handler may look at it.
    """
    headers = end_to_end_headers(scope["headers"], keep=b"transfer-encoding")
    sent = [(name, value) for name, value in headers if name != HOP_HEADER]
    sent.append((HOP_HEADER, describe_origin(scope)))
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent]


def restore_origin(scope: Scope) -> None:
    """Make the scope of a request that came over the private socket what the receiving worker's was."""
    scope[ARRIVED_KEY] = True
    scope["client"] = scope["server"] = None
    origin: bytes | None = None
    headers: Headers = []
    for name, value in scope["headers"]:
        plain = value if value.isascii() else value.decode("utf-8", "replace").encode("latin-1", "replace")
        if name == HOP_HEADER:
            origin = plain
        else:
            headers.append((name, plain))
    scope["headers"] = headers
    if origin is None:
        return
    client, server, scheme, root_path, http_version, query = orjson.loads(origin)
    scope["client"] = client and tuple(client)
    scope["server"] = server and tuple(server)
    scope["scheme"] = scheme
    scope["root_path"] = root_path
    scope["http_version"] = http_version
    if query is not None:
        scope["query_string"] = query.encode("latin-1")
