"""The session cookie as Starlette's session middleware defines it, read and written with keys prepared once.

Whoever asks what a cookie says, the router or the session middleware, asks `SessionCookies`: the two can't disagree,
and a cookie is verified once. What is remembered of verified cookies is bounded, and the age is looked at each time.
"""

from __future__ import annotations

import hmac
import json
import re
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from itsdangerous import BadSignature, TimestampSigner
from itsdangerous.encoding import base64_decode, base64_encode, bytes_to_int, int_to_bytes
from starlette.datastructures import MutableHeaders, Secret
from starlette.middleware.sessions import Session, SessionMiddleware
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_OWNER_KEY: Final = "nemo_gym_worker"
FOURTEEN_DAYS: Final = 14 * 24 * 60 * 60
"""Starlette's default for the age of a session cookie, in seconds."""

_WORKER_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REMEMBERED: Final = 1024
_LONGEST_REMEMBERED: Final = 4096  # bytes; together with the count it bounds the memory to a few MB
_ORDINARY_DATE: Final = 6  # characters: 32 bits, until the year 2106
_IMMUTABLE: Final = frozenset({str, int, float, bool, type(None)})
_TEXT: Final = frozenset({str})
_INNER_PAD: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD: Final = bytes(byte ^ 0x5C for byte in range(256))


def is_worker_id(value: object) -> bool:
    """Tell whether `value` has the shape of a worker id."""
    return isinstance(value, str) and _WORKER_ID.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class SignedCookie:
    """One session cookie, verified.

    Attributes:
        owner: The worker that it names, if any.
        signed_at: When it was signed, in seconds since 1970; None where the signature is not genuine.
        replacement: What a session middleware that knows the first secret only must see instead (a cookie value, or
            empty for no cookie) of a value that it would choke on or could not verify; None where the value is good as
            it is. Ours needs none.
        payload: The session as JSON.
        session: The session, where nothing in it can be changed but by setting its keys; not to be changed itself.
    """

    owner: str | None = None
    signed_at: int | None = None
    replacement: bytes | None = None
    payload: bytes = b""
    session: Mapping[str, Any] | None = None

    def is_good(self, max_age: int | None) -> bool:
        """Tell whether the session middleware takes the session from it: genuine, and no older than `max_age`."""
        if self.signed_at is None:
            return False
        return max_age is None or 0 <= int(time.time()) - self.signed_at <= max_age

    def new_session(self) -> Session:
        """Return a session of one's own, to be changed at will."""
        return Session(json.loads(self.payload) if self.session is None else self.session)


def _said(payload: bytes, session: Mapping[str, Any], signed_at: int, replacement: bytes | None = None) -> SignedCookie:
    owner = session.get(SESSION_OWNER_KEY)
    is_flat = _IMMUTABLE.issuperset(map(type, session.values())) and _TEXT.issuperset(map(type, session))
    return SignedCookie(
        owner if is_worker_id(owner) else None, signed_at, replacement, payload, dict(session) if is_flat else None
    )


class _Signer:
    """Signs and verifies as `TimestampSigner` does, with what depends only on the key done beforehand."""

    def __init__(self, secret: str) -> None:
        self._signer = TimestampSigner(secret)
        # The two halves of an HMAC (RFC 2104), each with its part of the key taken in. A derived key is never longer
        # than a block, for it is a digest.
        digest = self._signer.digest_method
        key = self._signer.derive_key().ljust(digest().block_size, b"\0")
        self._inner = digest(key.translate(_INNER_PAD))
        self._outer = digest(key.translate(_OUTER_PAD))

    def sign(self, payload: bytes) -> tuple[bytes, int]:
        """Return the signed payload and when it was signed."""
        signed_at = self._signer.get_timestamp()
        dated = payload + b"." + base64_encode(int_to_bytes(signed_at))
        return dated + b"." + self.signature(dated), signed_at

    def signature(self, value: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(value)
        outer.update(inner.digest())
        return base64_encode(outer.digest())

    def unsign(self, signed: bytes) -> tuple[bytes, int]:
        """Return the payload and when it was signed; raises what `TimestampSigner.unsign` does."""
        dated, _, signature = signed.rpartition(b".")
        if hmac.compare_digest(signature, self.signature(dated)):
            payload, _, date = dated.rpartition(b".")
            if len(date) == _ORDINARY_DATE:
                return payload, bytes_to_int(base64_decode(date))
        # Not as it is written here: forged, or of a form that only a full look accepts.
        payload, signed_at = self._signer.unsign(signed, return_timestamp=True)
        return payload, int(signed_at.timestamp())


class SessionCookies:
    """Reads and writes the session cookies of one name.

    Args:
        name: The cookie's name.
        secrets: The session secrets: the first signs, all of them verify. Cookies that one of the others signed get a
            `replacement`, signed anew under their old date, for a session middleware that knows the first only.
    """

    def __init__(self, name: str, secrets: Sequence[str]) -> None:
        self.name = name
        self.secrets = tuple(secrets)
        self._signers = [_Signer(secret) for secret in secrets]
        self._remembered: OrderedDict[bytes, SignedCookie] = OrderedDict()

    @property
    def remembered(self) -> int:
        """How many verified cookies are remembered; there is a limit."""
        return len(self._remembered)

    def read(self, headers: Iterable[tuple[bytes, bytes]]) -> SignedCookie | None:
        """Return the session cookie of a request; of several, the one that Starlette takes, if any."""
        cookie = None
        for name, value in headers:
            if name == b"cookie":
                cookie = self.verify(value) or cookie
        return cookie

    def verify(self, header: bytes) -> SignedCookie | None:
        """Return the session cookie in one `Cookie` header; None when it holds none of that name."""
        cookie = self._remembered.get(header)
        if cookie is None:
            cookie = self._verify(header)
            # What is not genuine is not remembered: anyone can make any number of it.
            if cookie is not None and cookie.signed_at is not None:
                self._remember(header, cookie)
        return cookie

    def sign(self, session: Mapping[str, Any]) -> str:
        """Return the cookie's value for a session."""
        payload = json.dumps(session).encode()
        signed, signed_at = self._signers[0].sign(b64encode(payload))
        # The client's next request is going to bring it.
        header = f"{self.name}={signed.decode()}".encode("latin-1")
        self._remember(header, _said(payload, session, signed_at))
        return signed.decode()

    def _remember(self, header: bytes, cookie: SignedCookie) -> None:
        if len(header) > _LONGEST_REMEMBERED:
            return
        if len(self._remembered) >= _REMEMBERED and header not in self._remembered:
            self._remembered.popitem(last=False)
        self._remembered[header] = cookie

    def _verify(self, header: bytes) -> SignedCookie | None:
        value = cookie_parser(header.decode("latin-1")).get(self.name)
        if value is None:
            return None
        signed = value.encode("utf-8")
        for signer in self._signers:
            try:
                encoded, signed_at = signer.unsign(signed)
                payload = b64decode(encoded)
                session = json.loads(payload)
            except BadSignature:
                continue
            except (ValueError, OverflowError, OSError, RecursionError):
                return SignedCookie(replacement=b"")
            if not isinstance(session, dict):
                return SignedCookie(replacement=b"")
            replacement = None if signer is self._signers[0] else self._signed_anew(signed)
            return _said(payload, session, signed_at, replacement)
        return SignedCookie()

    def _signed_anew(self, signed: bytes) -> bytes:
        dated_payload = signed.rpartition(b".")[0]
        return dated_payload + b"." + self._signers[0].signature(dated_payload)


class SessionCookieMiddleware(SessionMiddleware):
    """Starlette's session middleware, at a fraction of its cost.

    Args:
        app: The application within.
        secret_key: Signs and verifies.
        session_cookie: The cookie's name.
        max_age: Seconds that a cookie is valid; None for ever.
        cookies: Reads and writes the cookies, where others read them too or several secrets verify them; its name and
            first secret must be these.

    Raises:
        ValueError: `cookies` has another name or secret.
    """

    def __init__(
        self,
        app: ASGIApp,
        secret_key: str | Secret,
        session_cookie: str = "session",
        max_age: int | None = FOURTEEN_DAYS,
        *,
        cookies: SessionCookies | None = None,
    ) -> None:
        super().__init__(app, secret_key, session_cookie, max_age)
        self._cookies = cookies or SessionCookies(session_cookie, [str(secret_key)])
        if (self._cookies.name, self._cookies.secrets[0]) != (session_cookie, str(secret_key)):
            raise ValueError("cookies must have the same session_cookie and secret_key as the middleware")
        age = f"Max-Age={max_age}; " if max_age is not None else ""
        self._attributes = f"; path={self.path}; {age}{self.security_flags}"
        self._removal = f"null; path={self.path}; expires=Thu, 01 Jan 1970 00:00:00 GMT; {self.security_flags}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        cookie = self._cookies.read(scope["headers"])
        had_session = cookie is not None and cookie.is_good(self.max_age)
        scope["session"] = cookie.new_session() if cookie is not None and had_session else Session()

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                session = scope["session"]
                if session.accessed or session.modified:
                    self._complete(message, session, had_session)
            await send(message)

        await self.app(scope, receive, send_with_cookie)

    def _complete(self, reply: Message, session: Session, had_session: bool) -> None:
        """Add to the head of a reply what tells caches and the client of the session."""
        headers = [*reply.get("headers", ())]
        if session.accessed:
            if any(name == b"vary" for name, _ in headers):
                MutableHeaders(raw=headers).add_vary_header("Cookie")
            else:
                headers.append((b"vary", b"Cookie"))
        if session.modified and session:
            value = f"{self.session_cookie}={self._cookies.sign(session)}{self._attributes}"
            headers.append((b"set-cookie", value.encode("latin-1")))
        elif session.modified and had_session:
            headers.append((b"set-cookie", f"{self.session_cookie}={self._removal}".encode("latin-1")))
        reply["headers"] = headers
