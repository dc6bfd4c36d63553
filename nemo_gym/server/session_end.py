"""Session end: a server is told once when each of its sessions is over, so that it can release what they hold.

Off unless the configuration says `session_end`; then this middleware keeps a life per session (`session_lives`),
answers `POST /close_session`, and refuses what comes for a session that has ended or is not known here: to serve that
with a fresh empty state would be a silent wrong answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.errors import ConfigError
from nemo_gym.server.middleware import NEW_SESSION_KEY, SESSION_ID_KEY
from nemo_gym.server.new_sessions import SESSIONLESS_PATHS as SESSIONLESS_PATHS
from nemo_gym.server.session_lives import (
    Life,
    SessionEndReason as SessionEndReason,
    SessionLives,
    SessionLivesStatistics as SessionLivesStatistics,
)
from nemo_gym.session_routing import LostReason, lost_session_reply, route_path

SEED_PATH: Final = "/seed_session"
CLOSE_PATH: Final = "/close_session"

_TRY_AGAIN_LATER: Final = 1013  # WebSocket close code, registered by IANA
_SHORTEST_GRACE_S: Final = 1.0


class SessionEndConfig(BaseModel):
    """When sessions end by themselves; with this in a server's settings, `on_session_end` is called.

    Attributes:
        idle_timeout_s: Seconds without a request in flight after which a session ends; None for never.
    """

    model_config = ConfigDict(extra="forbid")

    idle_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ResourcesSessionEndConfig(SessionEndConfig):
    """The same for a resources server.

    Attributes:
        after_verify: Whether a session ends when its `/verify` has been answered (2xx).
    """

    after_verify: bool = False


class AgentSessionEndConfig(SessionEndConfig):
    """The same for an agent.

    Attributes:
        after_run: Whether a session ends when its `/run` has been answered (2xx).
    """

    after_run: bool = False


@dataclass(frozen=True, slots=True)
class SessionEndRules:
    """What begins and ends the sessions of one server.

    Attributes:
        idle_timeout_s: Seconds without a request in flight after which a session ends; None for never.
        final_path: The route whose good reply ends the session; None where there is none.
        begins_anywhere: A session begins with its first request, whatever that is, and not only with
            `POST /seed_session`.
    """

    idle_timeout_s: float | None = None
    final_path: str | None = None
    begins_anywhere: bool = False


class SessionEndMiddleware:
    """Knows which sessions live here. Stands just inside `SessionIdMiddleware`.

    Args:
        app: The application within.
        lives: The sessions.
        rules: What begins and ends them.
    """

    def __init__(self, app: ASGIApp, *, lives: SessionLives, rules: SessionEndRules) -> None:
        self.app = app
        self._lives = lives
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = route_path(scope)
        if path in SESSIONLESS_PATHS:
            await self.app(scope, receive, send)
        elif _is_post(scope) and path == CLOSE_PATH:
            await self._close(scope, receive, send)
        elif _is_post(scope) and path == SEED_PATH:
            await self._seed(scope, receive, send)
        else:
            await self._use(path, scope, receive, send)

    async def _use(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._lives.find(scope["session"][SESSION_ID_KEY])
        if life is None and NEW_SESSION_KEY in scope:
            if not self._rules.begins_anywhere:
                # A request outside of sessions; there is nothing to keep for it.
                await self.app(scope, receive, send)
                return
            if self._lives.is_stopping:
                await _answer(_stopping_reply(), scope, receive, send)
                return
            life = self._lives.begin(scope["session"][SESSION_ID_KEY])
            life.has_begun = True
        if life is None or life.ending is not None:
            await _answer(lost_session_reply(LostReason.SESSION_ENDED), scope, receive, send)
            return
        with self._lives.using(life):
            if path == self._rules.final_path and _is_post(scope):
                send = when_answered(send, lambda: self._lives.end(life, SessionEndReason.VERIFIED))
            await self.app(scope, receive, send)

    async def _seed(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id = scope["session"][SESSION_ID_KEY]
        # What is left of an ended session would be taken for the new one's.
        life = await self._lives.settled(session_id)
        if life is None and self._lives.is_stopping:
            await _answer(_stopping_reply(), scope, receive, send)
            return
        life = life or self._lives.begin(session_id)
        with self._lives.seeding(life):
            await self.app(scope, receive, when_answered(send, lambda: _mark_begun(life)))

    async def _close(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = scope["session"]
        life = self._lives.find(session[SESSION_ID_KEY])
        closes = life is not None and life.ending is None
        if life is not None:
            # Only this wait goes when the client does, not the end.
            await asyncio.wait({self._lives.end(life, SessionEndReason.CLOSED)})
        elif NEW_SESSION_KEY in scope:
            session.clear()
        await JSONResponse({"closed": closes})(scope, receive, send)


def install_session_end(app: FastAPI, lives: SessionLives, rules: SessionEndRules, *, grace_s: float) -> None:
    """Add session end to an application; call it right before `SessionIdMiddleware` is added.

    Args:
        app: The application. Its sessions end before its shutdown begins.
        lives: The sessions, also found at `app.state.session_lives`.
        rules: What begins and ends them.
        grace_s: Seconds that the ends may take when the server stops; at least one second.
    """
    app.state.session_lives = lives
    app.add_middleware(SessionEndMiddleware, lives=lives, rules=rules)
    app.router.lifespan_context = _ending_sessions(
        app.router.lifespan_context, lives, max(float(grace_s), _SHORTEST_GRACE_S)
    )


def check_close_route(app: FastAPI, name: str) -> None:
    """Refuse an application whose own route session end would hide.

    Args:
        app: The finished application.
        name: The server's instance name.

    Raises:
        ConfigError: If it has a route `POST /close_session` of its own.
    """
    if not hasattr(app.state, "session_lives"):
        return
    if any(getattr(route, "path", None) == CLOSE_PATH for route in app.routes):
        raise ConfigError(
            f"the server has a route {CLOSE_PATH} of its own, which session end answers",
            key=f"{name}.session_end",
            hint="Move what it does to on_session_end, or leave the setting out.",
        )


def when_answered(send: Send, then: Callable[[], object]) -> Send:
    """Return a `send` that calls `then` right before the end of a good reply (2xx) goes out."""
    is_good = False

    async def watching_send(message: Message) -> None:
        nonlocal is_good
        if message["type"] == "http.response.start":
            is_good = 200 <= message["status"] < 300
        elif message["type"] == "http.response.body" and is_good and not message.get("more_body", False):
            is_good = False
            then()
        await send(message)

    return watching_send


def _ending_sessions(
    inner: Callable[[Any], AbstractAsyncContextManager[Any]], lives: SessionLives, grace_s: float
) -> Callable[[Any], Any]:
    """Return the lifespan `inner` with the sessions' within it: the hooks find everything still open."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state, lives.running(grace_s):
            yield state

    return lifespan


def _is_post(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == "POST")


def _mark_begun(life: Life) -> None:
    life.has_begun = True


def _stopping_reply() -> Response:
    return JSONResponse({"detail": "The server is stopping; no session can be begun here."}, status_code=503)


async def _answer(reply: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or the upgrade to a WebSocket: by closing where the server can't send a reply to it."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": f"status {reply.status_code}"})
    else:
        await reply(scope, receive, send)
