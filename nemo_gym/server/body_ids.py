"""Sessions that are named in the request's body, by clients that keep no cookies.

An id that the server made (`new_body_session_id`) is signed like the session cookie and names the session and the
worker that holds it, so that it is routed. An id that the caller made stands for a session of its own kind: it can
begin one with `/seed_session` only, once at a time among all workers, and is served by the worker that began it.

Handlers see no difference: the session's id is in `request.session[SESSION_ID_KEY]`, however it was named.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from itsdangerous import BadData, SignatureExpired
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.server.id_claims import IdClaims
from nemo_gym.server.middleware import SESSION_ID_KEY
from nemo_gym.server.session_end import CLOSE_PATH, SEED_PATH, SESSIONLESS_PATHS, when_answered
from nemo_gym.server.session_lives import SessionLives
from nemo_gym.server.session_signing import SessionSerializer
from nemo_gym.session_routing import (
    SESSION_OWNER_KEY,
    BodyIdField,
    BodyIdProblem,
    LostReason,
    SessionRoutingMiddleware,
    lost_session_reply,
    route_path,
    unreadable_body_reply,
)

_SALT: Final = "nemo_gym.body_session_id"
_SESSION_ID: Final = "sid"
_CALLERS: Final = "body-"


def body_id_field(name: str, session_keys: Sequence[str]) -> BodyIdField:
    """Return the field `name` with what reads the ids that the server makes.

    Args:
        name: The field.
        session_keys: The server's session keys: the first signs, all of them verify.
    """
    return BodyIdField(name, SessionSerializer(session_keys, salt=_SALT), ignored_paths=SESSIONLESS_PATHS)


@dataclass(frozen=True, slots=True)
class _Named:
    """The session that a body names.

    Attributes:
        session_id: Its id.
        claim: What the claim of a caller's id is called; None for an id that the server made.
    """

    session_id: str
    claim: str | None = None


class BodySessions:
    """Which sessions of this worker were begun, so that none is begun twice or served unbegun.

    Where sessions end (`lives`), nothing is kept of those that have; else all are remembered.

    Args:
        name: The field in which bodies name their session.
        session_keys: The server's session keys: the first signs, all of them verify.
        lives: The sessions that live here, where the server keeps count of them.
    """

    def __init__(self, name: str, session_keys: Sequence[str], lives: SessionLives | None) -> None:
        self.field = body_id_field(name, session_keys)
        self._serializer = SessionSerializer(session_keys, salt=_SALT)
        self._lives = lives
        # With one worker it tells this process from an earlier one.
        self._own_id = uuid.uuid4().hex
        # The seeded sessions, each with its claim if it has one.
        self._seeded: dict[str, str | None] = {}
        self._claims: IdClaims | None = None
        if lives is not None:
            lives.when_gone(self._forget)

    def new_id(self, session_id: str, routing: SessionRoutingMiddleware | None) -> str:
        """Return a signed id of a session of this worker."""
        return str(self._serializer.dumps({_SESSION_ID: session_id, SESSION_OWNER_KEY: self._worker_id(routing)}))

    async def place(
        self, value: str, cookies: str | None, routing: SessionRoutingMiddleware | None, path: str
    ) -> str | Response:
        """Return the id of the session that a request names in its body, or what to answer instead.

        Args:
            value: What stands in the body.
            cookies: The id of the session that its cookie names, if any.
            routing: The session router, where there are several workers.
            path: The request's path. A seed begins the session; `not_begun` has to follow if it fails.
        """
        named = self._resolve(value, routing)
        if isinstance(named, Response):
            return named
        if cookies not in (None, named.session_id):
            return self._several_sessions()
        refusal = await self._begin(named, routing) if path == SEED_PATH else self._refusal(named, routing, path)
        return refusal or named.session_id

    def note(self, session_id: str) -> None:
        """Note that a session was seeded whose id the server may give out."""
        self._seeded.setdefault(session_id)

    def not_begun(self, session_id: str) -> None:
        """Take a session back whose seed has failed; where sessions end, that is done at its end."""
        if self._lives is None or self._lives.find(session_id) is None:
            self._forget(session_id)

    def _resolve(self, value: str, routing: SessionRoutingMiddleware | None) -> _Named | Response:
        try:
            payload = self._serializer.loads(value)
            session_id, owner = payload[_SESSION_ID], payload[SESSION_OWNER_KEY]
        except SignatureExpired:
            return lost_session_reply(LostReason.SESSION_EXPIRED)
        except (BadData, ValueError, TypeError, KeyError, RecursionError):
            digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
            return _Named(_CALLERS + digest, digest)
        if owner == self._worker_id(routing):
            return _Named(session_id)
        # With several workers the router has sent it to its owner, unless a cookie or token named another.
        return self._several_sessions() if routing is not None else lost_session_reply(LostReason.WORKER_GONE)

    async def _begin(self, named: _Named, routing: SessionRoutingMiddleware | None) -> Response | None:
        if self._lives is not None:
            await self._lives.settled(named.session_id)
        if named.session_id in self._seeded:
            return self._under_way()
        claims = self._claims_of(routing)
        if claims is not None and named.claim is not None and not claims.take(named.claim):
            return self._under_way()
        self._seeded[named.session_id] = named.claim
        return None

    def _refusal(self, named: _Named, routing: SessionRoutingMiddleware | None, path: str) -> Response | None:
        if named.claim is None or named.session_id in self._seeded:
            return None
        claims = self._claims_of(routing)
        if claims is None or claims.holder(named.claim) is None:
            # Closing what is over is no fault.
            return None if path == CLOSE_PATH else lost_session_reply(LostReason.SESSION_ENDED)
        return _conflict(
            f"Another worker has the session of this '{self.field.name}'. An id that the caller made is not routed: "
            "send the session's cookie with it, or use an id that this server gave out."
        )

    def _forget(self, session_id: str) -> None:
        claim = self._seeded.pop(session_id, None)
        if claim is not None and self._claims is not None:
            self._claims.release(claim)

    def _claims_of(self, routing: SessionRoutingMiddleware | None) -> IdClaims | None:
        if self._claims is None and routing is not None:
            self._claims = IdClaims(routing.socket_dir, routing.worker_id)
        return self._claims

    def _worker_id(self, routing: SessionRoutingMiddleware | None) -> str:
        return routing.worker_id if routing is not None else self._own_id

    def _under_way(self) -> Response:
        return _conflict(
            f"The session of this '{self.field.name}' is under way. A second seed would take its state away: "
            "close it first, or seed a session of another id."
        )

    def _several_sessions(self) -> Response:
        return _conflict(
            f"The request names two sessions: one by its cookie or token, another by '{self.field.name}'. "
            "Send those of one session, or one of them only."
        )


class BodySessionMiddleware:
    """Finds the session that a body names. Stands between `SessionMiddleware` and `SessionIdMiddleware`.

    Where a cookie names a session too, it must be the same one.

    Args:
        app: The application within.
        sessions: What is known of the sessions.
    """

    def __init__(self, app: ASGIApp, *, sessions: BodySessions) -> None:
        self.app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        found, receive = await self._sessions.field.read(scope, receive)
        session = scope["session"]
        if found.problem is BodyIdProblem.NOT_TEXT or (found.problem and SESSION_ID_KEY not in session):
            if found.problem is not BodyIdProblem.CLIENT_LEFT:
                await unreadable_body_reply(self._sessions.field.name, found.problem)(scope, receive, send)
            return
        path = route_path(scope)
        if found.value is None:
            if path == SEED_PATH:
                # A session of its own, whatever the cookie: its id is going to be given out.
                session.pop(SESSION_ID_KEY, None)
                send = when_answered(send, lambda: self._sessions.note(session[SESSION_ID_KEY]))
            await self.app(scope, receive, send)
            return
        routing: SessionRoutingMiddleware | None = getattr(scope["app"].state, "session_routing", None)
        placed = await self._sessions.place(found.value, session.get(SESSION_ID_KEY), routing, path)
        if isinstance(placed, Response):
            await placed(scope, receive, send)
            return
        session[SESSION_ID_KEY] = placed
        if path == SEED_PATH:
            await self._seed(placed, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _seed(self, session_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def begun() -> None:
            nonlocal has_begun
            has_begun = True

        try:
            await self.app(scope, receive, when_answered(send, begun))
        finally:
            if not has_begun:
                self._sessions.not_begun(session_id)


def _conflict(detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=409)
