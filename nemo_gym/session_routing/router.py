"""Here, there, or 410: the middleware that sends each request to the worker that owns its session.

The receiving worker answers itself what is its own, what has no owner, and what came over its private socket; it
forwards what another worker owns; and it says in plain words when a session is lost, for to serve it with a fresh
empty state would be a silent wrong answer.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Secret
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.session_routing.body_field import BodyIdField, BodyIdProblem, unreadable_body_reply
from nemo_gym.session_routing.forwarding import Forwarder, ReplyBrokenOffError
from nemo_gym.session_routing.hop import ARRIVED_KEY
from nemo_gym.session_routing.jsonrpc import RecordedBody, WatchedReply, jsonrpc_error_reply
from nemo_gym.session_routing.lost import LostReason, lost_session_reply
from nemo_gym.session_routing.owner_pool import NoReplyError, OutOfDescriptorsError, OwnerGoneError
from nemo_gym.session_routing.ownership import (
    ClaimReader,
    SessionOwnerMiddleware,
    TokenSerializer,
    is_worker_id,
    new_worker_id,
    read_owner,
)
from nemo_gym.session_routing.private_socket import PrivateServer, still_listens, worker_socket_path

FOURTEEN_DAYS: Final = 14 * 24 * 60 * 60
"""Starlette's default for the age of a session cookie, in seconds."""

_TRY_AGAIN_LATER: Final = 1013  # WebSocket close code, registered by IANA

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """What a worker's router has done since it started.

    Attributes:
        served_here: Requests and WebSockets answered by this worker, those that others forwarded to it included.
        arrived: Those of them that other workers forwarded.
        forwarded: Requests that this worker forwarded to their owner.
        lost: Requests whose session was lost.
        open_pools: Owners that this worker keeps connections to.
    """

    served_here: int
    arrived: int
    forwarded: int
    lost: int
    open_pools: int


class SessionRoutingMiddleware:
    """Routes each request to the worker that owns its session. Stands outside the session middleware.

    Args:
        app: The application within.
        socket_dir: The directory of the workers' sockets, made by `create_socket_dir` in the main process.
        worker_id: This worker's id, new for each process.
        session_cookie: Name of the session middleware's cookie.
        secret_key: The session middleware's secret. Of several, the first signs (it is the one the session
            middleware has) and all verify.
        max_age: Seconds that a session cookie is valid, as for the session middleware; None for ever.
        mcp_token_header: Name of the header that carries an MCP session token, if any.
        mcp_token_serializer: Reads that token.
        mcp_path: Where, and below which, the token decides even if the request has a session cookie.
        mcp_errors_as_jsonrpc: Say what this router itself answers to a JSON-RPC request on the MCP path as a JSON-RPC
            error under status 200, as `jsonrpc_error_reply` does.
        body_ids: The field of a body that names the owner where neither cookie nor token does, if any. Such bodies
            are read ahead of the application; no others are.
        grace: Seconds that requests received from other workers may take when this worker stops.

    Attributes:
        worker_id: This worker.
        socket_dir: The directory of the workers' sockets.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        socket_dir: Path | str,
        worker_id: str,
        session_cookie: str,
        secret_key: str | Secret | Sequence[str],
        max_age: int | None = FOURTEEN_DAYS,
        mcp_token_header: str | None = None,
        mcp_token_serializer: TokenSerializer | None = None,
        mcp_path: str = "/mcp",
        mcp_errors_as_jsonrpc: bool = False,
        body_ids: BodyIdField | None = None,
        grace: int | None = 10,
    ) -> None:
        if not is_worker_id(worker_id):
            raise ValueError(f"worker_id must be 32 hex digits, not {worker_id!r}")
        self.app = app
        self.worker_id = worker_id
        self.socket_dir = Path(socket_dir)
        self._socket_path = worker_socket_path(socket_dir, worker_id)
        self._claims = ClaimReader(
            session_cookie, _secrets(secret_key), max_age, mcp_token_header, mcp_token_serializer, mcp_path
        )
        self._forwarder = Forwarder(socket_dir)
        self._has_mcp = mcp_token_header is not None
        self._mcp_errors_as_jsonrpc = mcp_errors_as_jsonrpc
        self._body_ids = body_ids
        self._grace = grace
        self._served_here = self._arrived = self._forwarded = self._lost = 0

    def statistics(self) -> RoutingStatistics:
        """Return what this router has done so far. The middleware is `app.state.session_routing`."""
        return RoutingStatistics(
            served_here=self._served_here,
            arrived=self._arrived,
            forwarded=self._forwarded,
            lost=self._lost,
            open_pools=self._forwarder.open_pools,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
            return
        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
            return

        arrived = ARRIVED_KEY in scope
        claim = self._claims.read(scope)
        if self._body_ids is not None and claim.is_open:
            found, receive = await self._body_ids.read(scope, receive)
            if found.problem is BodyIdProblem.CLIENT_LEFT:
                return
            if found.problem is BodyIdProblem.TOO_LARGE:
                # Served here, it might be with a fresh empty state instead of the owner's.
                await unreadable_body_reply(self._body_ids.name, found.problem)(scope, receive, send)
                return
            if found.value is not None:
                owner, expired = read_owner(self._body_ids.serializer, found.value)
                claim = dataclasses.replace(claim, owner=owner, expired=expired)
        if claim.expired:
            self._lost += 1
            reply = lost_session_reply(LostReason.SESSION_EXPIRED)
            body = self._recorded(scope, receive) if self._mcp_errors_as_jsonrpc else None
            await _answer(reply, scope, receive, send, body)
        elif arrived or claim.owner is None or claim.owner == self.worker_id:
            self._served_here += 1
            self._arrived += arrived
            if claim.headers is not None:
                scope["headers"] = claim.headers
            await self.app(scope, receive, send)
        else:
            await self._forward(claim.owner, scope, receive, send)

    async def _forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._forwarded += 1
        body = self._recorded(scope, receive)
        passing = WatchedReply(send)
        try:
            if body is None:
                await self._forwarder.forward(owner, scope, receive, send)
            else:
                await self._forwarder.forward(owner, scope, body.receive, passing.send)
            return
        except ReplyBrokenOffError:
            if body is None or not passing.is_open:
                raise
            # The status has gone out, so the plain refusal can't follow in either mode.
            rest = jsonrpc_error_reply(await body.whole(), await self._broken_off(owner))
            if rest.status_code != 200:
                raise
            await send({"type": "http.response.body", "body": rest.body})
            return
        except OwnerGoneError as error:
            self._lost += 1
            reply = lost_session_reply(LostReason.WORKER_GONE, may_have_run=error.may_have_run)
        except OutOfDescriptorsError as error:
            logger.error("can't forward to worker %s: %s", owner, error)  # noqa: TRY400, it is no bug of ours
            reply = JSONResponse(
                {"detail": "This worker has no file descriptors left to reach the session's worker; try again."},
                status_code=503,
                headers={"retry-after": "1"},
            )
        except NoReplyError as error:
            logger.warning("worker %s gave no reply: %s", owner, error)
            reply = _no_reply()
        await _answer(reply, scope, receive, send, body if self._mcp_errors_as_jsonrpc else None)

    async def _broken_off(self, owner: str) -> Response:
        """Return what there is to say of a reply that was begun and broken off by its owner."""
        if await still_listens(worker_socket_path(self._socket_path.parent, owner)):
            return _no_reply()
        self._lost += 1
        return lost_session_reply(LostReason.WORKER_GONE, may_have_run=True)

    def _recorded(self, scope: Scope, receive: Receive) -> RecordedBody | None:
        """Return a request's body where it may be looked at when this router answers itself."""
        if self._has_mcp and scope["type"] == "http" and scope["method"] == "POST" and self._claims.is_mcp(scope):
            return RecordedBody(scope, receive)
        return None

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application's lifespan with the private server's within it."""
        app = scope.get("app", self.app)
        private = PrivateServer(app, self._socket_path, state=scope.setdefault("state", {}), grace=self._grace)
        if isinstance(app, Starlette):
            app.state.session_routing = self

        async def stop_before_shutdown() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await private.stop()
            return message

        async def start_after_startup(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await private.start()
            await send(message)

        try:
            await self.app(scope, stop_before_shutdown, start_after_startup)
        finally:
            await private.stop()
            await self._forwarder.close()


def install_session_routing(
    app: Starlette,
    *,
    socket_dir: Path | str,
    session_cookie: str,
    secret_key: str | Secret | Sequence[str],
    max_age: int | None = FOURTEEN_DAYS,
    mcp_token_header: str | None = None,
    mcp_token_serializer: TokenSerializer | None = None,
    mcp_path: str = "/mcp",
    mcp_errors_as_jsonrpc: bool = False,
    body_ids: BodyIdField | None = None,
    grace: int | None = 10,
) -> str:
    """Make an application's sessions stay with the worker that created them.

    Call it once in each worker process, after `SessionMiddleware` was added: the router becomes the outermost
    middleware so far, and sessions are stamped just inside `SessionMiddleware`. What is added later stands outside
    the router: right for error replies and the handling of client disconnects, wrong for all that reads or writes
    the session. The application's lifespan must run (it does under uvicorn, unless `lifespan="off"`), because the
    private server starts and stops with it.

    Args:
        app: The application, not yet started.
        socket_dir: The directory of the workers' sockets, made by `create_socket_dir` in the main process.
        session_cookie: Name of the session middleware's cookie.
        secret_key: The session middleware's secret, or several: the first is the middleware's, cookies signed with
            one of the others are accepted too.
        max_age: The session middleware's, in seconds.
        mcp_token_header: Name of the header that carries an MCP session token, if any.
        mcp_token_serializer: Reads that token; its payload is a mapping with `SESSION_OWNER_KEY`.
        mcp_path: Where, and below which, the token decides even if the request has a session cookie.
        mcp_errors_as_jsonrpc: As for `SessionRoutingMiddleware`.
        body_ids: As for `SessionRoutingMiddleware`.
        grace: Seconds that requests received from other workers may take when this worker stops.

    Returns:
        This worker's id, which an MCP session token must carry under `SESSION_OWNER_KEY`.

    Raises:
        ValueError: There is no `SessionMiddleware` yet, or it has another cookie, secret or age.
    """
    position = _session_middleware_position(app, session_cookie, _secrets(secret_key)[0], max_age)
    worker_id = new_worker_id()
    app.user_middleware.insert(position + 1, Middleware(SessionOwnerMiddleware, worker_id=worker_id))
    app.add_middleware(
        SessionRoutingMiddleware,
        socket_dir=socket_dir,
        worker_id=worker_id,
        session_cookie=session_cookie,
        secret_key=secret_key,
        max_age=max_age,
        mcp_token_header=mcp_token_header,
        mcp_token_serializer=mcp_token_serializer,
        mcp_path=mcp_path,
        mcp_errors_as_jsonrpc=mcp_errors_as_jsonrpc,
        body_ids=body_ids,
        grace=grace,
    )
    return worker_id


def _secrets(secret_key: str | Secret | Sequence[str]) -> list[str]:
    secrets = [str(secret_key)] if isinstance(secret_key, str | Secret) else [str(key) for key in secret_key]
    if not all(secrets) or not secrets:
        raise ValueError("secret_key must hold at least one secret, and none may be empty")
    return secrets


def _session_middleware_position(app: Starlette, cookie: str, secret: str, max_age: int | None) -> int:
    stack = app.user_middleware
    found = [i for i, m in enumerate(stack) if isinstance(m.cls, type) and issubclass(m.cls, SessionMiddleware)]
    if not found:
        raise ValueError("add SessionMiddleware before install_session_routing")
    position = found[-1]
    middleware = stack[position]
    bound = inspect.signature(middleware.cls).bind(app, *middleware.args, **middleware.kwargs)
    bound.apply_defaults()
    ours = {"session_cookie": cookie, "secret_key": secret, "max_age": max_age}
    for name, value in ours.items():
        theirs = bound.arguments.get(name, value)
        if (str(theirs) if name == "secret_key" else theirs) != value:
            raise ValueError(f"install_session_routing and SessionMiddleware must have the same {name}")
    return position


def _no_reply() -> JSONResponse:
    detail = "The session's worker closed the connection without a reply; the request may have run."
    return JSONResponse({"detail": detail}, status_code=502)


async def _answer(
    reply: Response, scope: Scope, receive: Receive, send: Send, body: RecordedBody | None = None
) -> None:
    """Answer an HTTP request, or the upgrade to a WebSocket: by closing where the server can't send a reply to it.

    Args:
        reply: The plain answer.
        scope: The request's scope.
        receive: Its ASGI receive.
        send: Its ASGI send.
        body: Its body, where a JSON-RPC message in it is to be answered as such.
    """
    if body is not None:
        reply = jsonrpc_error_reply(await body.whole(), reply)
        if body.client_left:
            return
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": f"status {reply.status_code}"})
    else:
        await reply(scope, receive, send)
