"""Here, there, or 410: the middleware that sends each request to the worker that owns its session.

The receiving worker answers itself what is its own, what has no owner, and what came over its private socket; it
forwards what another worker owns; and it says in plain words when a session is lost, for to serve it with a fresh
empty state would be a silent wrong answer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Secret
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.session_routing.body_field import BodyIdField, BodyIdProblem, unreadable_body_reply
from nemo_gym.session_routing.durations import Durations
from nemo_gym.session_routing.forwarding import Forwarder, HopName, HopObserver
from nemo_gym.session_routing.held_sessions import SessionTally
from nemo_gym.session_routing.hop import ARRIVED_KEY, OWNED_KEY, PLACED_KEY
from nemo_gym.session_routing.jsonrpc import RecordedBody, WatchedReply, jsonrpc_error_reply
from nemo_gym.session_routing.loads import SharedLoads
from nemo_gym.session_routing.lost import (
    LostReason,
    lost_session_reply,
    no_descriptors_reply,
    no_reply,
    not_the_owner_reply,
)
from nemo_gym.session_routing.owner_socket import (
    NoReplyError,
    OutOfDescriptorsError,
    OwnerGoneError,
    ReplyBrokenOffError,
)
from nemo_gym.session_routing.ownership import (
    Claim,
    ClaimReader,
    TokenSerializer,
    is_worker_id,
    read_owner,
    route_path,
)
from nemo_gym.session_routing.placement import CountedReply, KeptBody, Placer, names_no_session
from nemo_gym.session_routing.private_socket import PrivateServer, still_listens, worker_socket_path
from nemo_gym.session_routing.session_cookie import FOURTEEN_DAYS, SessionCookies

_TRY_AGAIN_LATER: Final = 1013  # WebSocket close code, registered by IANA

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """What a worker's router has done since it started.

    Attributes:
        served_here: Requests and WebSockets answered by this worker, those that others forwarded to it included.
        arrived: Those of them that other workers forwarded.
        forwarded: Requests that this worker forwarded to their owner.
        lost: Requests whose session was lost, as this router found.
        open_pools: Owners that this worker keeps connections to.
        sessions_held: Sessions that this worker holds, as far as it knows; 0 where new sessions are not placed.
        placed_elsewhere: Requests among the forwarded ones that could begin a session.
        lost_by_reason: The lost ones by `LostReason`.
    """

    served_here: int
    arrived: int
    forwarded: int
    lost: int
    open_pools: int
    sessions_held: int = 0
    placed_elsewhere: int = 0
    lost_by_reason: Mapping[LostReason, int] = field(default_factory=dict)


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
        hop: The way in which HTTP requests reach their owner: `frames`, or `aiohttp` to compare it with.
        cookies: Reads the session cookie, where the session middleware shares what it knows; of the same name and
            secrets.
        placer: Chooses the worker of each new session; None to keep them where they arrive.
        hop_durations: Counts how long each forwarded request took, where that is wanted.
        any_worker_paths: Routes that, asked with GET, are answered where they arrive, whatever session is named.

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
        hop: HopName = "frames",
        cookies: SessionCookies | None = None,
        placer: Placer | None = None,
        hop_durations: Durations | None = None,
        any_worker_paths: Collection[str] = (),
    ) -> None:
        if not is_worker_id(worker_id):
            raise ValueError(f"worker_id must be 32 hex digits, not {worker_id!r}")
        self.app = app
        self.worker_id = worker_id
        self.socket_dir = Path(socket_dir)
        self._socket_path = worker_socket_path(socket_dir, worker_id)
        secrets = secrets_of(secret_key)
        if cookies is None or (cookies.name, cookies.secrets) != (session_cookie, tuple(secrets)):
            cookies = SessionCookies(session_cookie, secrets)
        self._claims = ClaimReader(cookies, max_age, mcp_token_header, mcp_token_serializer, mcp_path)
        self._forwarder = Forwarder(socket_dir, hop, durations=hop_durations)
        self._has_mcp = mcp_token_header is not None
        self._mcp_errors_as_jsonrpc = mcp_errors_as_jsonrpc
        self._body_ids = body_ids
        self._grace = grace
        self._placer = placer
        self._any_worker_paths = any_worker_paths
        self._served_here = self._arrived = self._forwarded = self._placed_elsewhere = 0
        self._lost: dict[LostReason, int] = {}

    @property
    def sessions(self) -> SessionTally | None:
        """The sessions of this worker; None where it counts none, as new sessions are not placed."""
        return None if self._placer is None else self._placer.sessions

    def statistics(self) -> RoutingStatistics:
        """Return what this router has done so far. The middleware is `app.state.session_routing`."""
        return RoutingStatistics(
            served_here=self._served_here,
            arrived=self._arrived,
            forwarded=self._forwarded,
            lost=sum(self._lost.values()),
            open_pools=self._forwarder.open_pools,
            sessions_held=0 if self._placer is None else self._placer.sessions.held,
            placed_elsewhere=self._placed_elsewhere,
            lost_by_reason=dict(self._lost),
        )

    def observe_hops(self, observer: HopObserver) -> None:
        """Have each HTTP request forwarded within the context that `observer` gives for its owner and scope."""
        self._forwarder.observer = observer

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
        found = None
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
        if claim.expired and not self._is_for_any(scope):
            self._count_lost(LostReason.SESSION_EXPIRED)
            reply = lost_session_reply(LostReason.SESSION_EXPIRED)
            body = self._recorded(scope, receive) if self._mcp_errors_as_jsonrpc else None
            await _answer(reply, scope, receive, send, body)
        elif OWNED_KEY in scope and claim.owner != self.worker_id:
            # Served here, it might be with a fresh empty state: of the two workers one has misread it.
            logger.error("%s %s came as this worker's, and is not", scope["type"], scope["path"])
            await _answer(not_the_owner_reply(), scope, receive, send)
        elif arrived or claim.owner is None or claim.owner == self.worker_id:
            begins = self._placer is not None and self._placer.begins_session(scope, claim)
            if begins and not arrived and names_no_session(found):
                await self._place(claim, scope, receive, send)
            else:
                self._arrived += arrived
                await self._serve(claim, scope, receive, send)
        elif self._is_for_any(scope):
            await self._serve(claim, scope, receive, send)
        else:
            await self._forward(claim.owner, scope, receive, send)

    def _is_for_any(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["method"] == "GET" and route_path(scope) in self._any_worker_paths

    async def _serve(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        self._served_here += 1
        if claim.headers is not None:
            scope["headers"] = claim.headers
        loads = self._placer.loads if self._placer is not None and PLACED_KEY in scope else None
        if loads is None:
            await self.app(scope, receive, send)
            return
        loads.taken(scope[PLACED_KEY])
        counted = CountedReply(loads, send)
        try:
            await self.app(scope, receive, counted.send)
        finally:
            counted.end()

    async def _place(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a new session begin at the worker that is to hold it, and here where that one can't be reached."""
        assert self._placer is not None
        loads = self._placer.loads
        if loads is None:
            await self._serve(claim, scope, receive, send)
            return
        scope[PLACED_KEY] = loads.sender
        slot = self._placer.choose(loads, scope)
        owner = None if slot == loads.slot else loads.worker_at(slot)
        if owner is not None:
            counted = loads.sent(slot)
            again = None
            try:
                again = await self._place_elsewhere(loads, owner, scope, receive, send)
            finally:
                loads.answered(slot, counted, was_sent=again is None)
            if again is None:
                return
            receive = again
        await self._serve(claim, scope, receive, send)

    async def _place_elsewhere(
        self, loads: SharedLoads, owner: str, scope: Scope, receive: Receive, send: Send
    ) -> Receive | None:
        """Forward a request that may begin a session; returns the ASGI receive to serve it with if nothing was sent."""
        self._forwarded += 1
        self._placed_elsewhere += 1
        body = KeptBody(receive)
        try:
            await self._forwarder.forward(owner, scope, body.receive, send)
        except (OwnerGoneError, OutOfDescriptorsError, NoReplyError) as error:
            if isinstance(error, OwnerGoneError):
                loads.unreachable(owner)
            again = body.again()
            is_unsent = isinstance(error, OutOfDescriptorsError) or (
                isinstance(error, OwnerGoneError) and not error.may_have_run
            )
            if is_unsent and again is not None:
                self._forwarded -= 1
                self._placed_elsewhere -= 1
                return again
            await self._refuse(owner, error, scope, receive, send, had_begun=False)
        return None

    async def _forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._forwarded += 1
        scope[OWNED_KEY] = True
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
        except (OwnerGoneError, OutOfDescriptorsError, NoReplyError) as error:
            spoken = body if self._mcp_errors_as_jsonrpc else None
            await self._refuse(owner, error, scope, receive, send, spoken)

    async def _refuse(
        self,
        owner: str,
        error: OwnerGoneError | OutOfDescriptorsError | NoReplyError,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: RecordedBody | None = None,
        *,
        had_begun: bool = True,
    ) -> None:
        """Count, log and say that a forward has failed before its reply began."""
        if isinstance(error, OwnerGoneError):
            self._count_lost(LostReason.WORKER_GONE)
            reply = lost_session_reply(LostReason.WORKER_GONE, may_have_run=error.may_have_run, had_begun=had_begun)
        elif isinstance(error, NoReplyError):
            logger.warning("worker %s gave no reply: %s", owner, error)
            reply = no_reply()
        else:
            logger.error("can't forward to worker %s: %s", owner, error)
            reply = no_descriptors_reply()
        await _answer(reply, scope, receive, send, body)

    async def _broken_off(self, owner: str) -> Response:
        """Return what there is to say of a reply that was begun and broken off by its owner."""
        if await still_listens(worker_socket_path(self._socket_path.parent, owner)):
            return no_reply()
        self._count_lost(LostReason.WORKER_GONE)
        return lost_session_reply(LostReason.WORKER_GONE, may_have_run=True)

    def _count_lost(self, reason: LostReason) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + 1

    def _recorded(self, scope: Scope, receive: Receive) -> RecordedBody | None:
        """Return a request's body where it may be looked at when this router answers itself."""
        if self._has_mcp and scope["type"] == "http" and scope["method"] == "POST" and self._claims.is_mcp(scope):
            return RecordedBody(scope, receive)
        return None

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application's lifespan with the private server's within it."""
        app = scope.get("app", self)
        private = PrivateServer(app, self._socket_path, state=scope.setdefault("state", {}), grace=self._grace)
        if isinstance(app, Starlette):
            app.state.session_routing = self

        async def stop_before_shutdown() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                if self._placer is not None:
                    self._placer.leave()
                await private.stop()
            return message

        async def start_after_startup(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._forwarder.prepare()
                await private.start()
                if self._placer is not None:
                    self._placer.start()
            await send(message)

        try:
            await self.app(scope, stop_before_shutdown, start_after_startup)
        finally:
            if self._placer is not None:
                self._placer.close()
            await private.stop()
            await self._forwarder.close()


def secrets_of(secret_key: str | Secret | Sequence[str]) -> list[str]:
    """Return the secrets, one or several, as a list; each must be something."""
    secrets = [str(secret_key)] if isinstance(secret_key, str | Secret) else [str(key) for key in secret_key]
    if not all(secrets) or not secrets:
        raise ValueError("secret_key must hold at least one secret, and none may be empty")
    return secrets


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
