"""What one worker counts of itself: a few additions and two looks at the clock for each request, and no lock.

The recorder stands outside the middleware for sessions and errors and inside the router, so it sees what this worker
answers itself, however it came here. Sessions are counted where new ones are placed anyway; elsewhere the recorder does
it. The server's own questions (`/health` and the figures themselves) do not count.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.server.figures import Histogram, WorkerFigures
from nemo_gym.server.middleware import NEW_SESSION_KEY, DisconnectMiddleware, DisconnectWatch
from nemo_gym.server.worker_slots import OpenSessions
from nemo_gym.session_routing import SESSION_LOST_HEADER, Placement, SessionRoutingMiddleware, route_path
from nemo_gym.session_routing.durations import BOUNDS, Durations
from nemo_gym.session_routing.held_sessions import SessionTally
from nemo_gym.session_routing.ownership import new_worker_id

FIGURES_PATH: Final = "/workers"
METRICS_PATH: Final = "/metrics"
FIGURES_PATHS: Final = frozenset({FIGURES_PATH, METRICS_PATH})
UNCOUNTED_PATHS: Final = frozenset({"/health", *FIGURES_PATHS})
"""The server's own questions; asked with GET, they do not count."""

_LOST: Final = 410
_LOST_HEADER: Final = SESSION_LOST_HEADER.encode("ascii")
_CLASSES: Final = ("none", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx")
_SAMPLE_S: Final = 0.25
_SAMPLES: Final = 40
_STATM: Final = Path("/proc/self/statm")


class LoopLag:
    """How late the event loop is: the longest of the last ten seconds."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=_SAMPLES)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + _SAMPLE_S
        self._timer = loop.call_at(self._due, self._sample)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def worst(self) -> float:
        """Return the longest, in seconds; what is late right now counts too."""
        if self._timer is None:
            return 0.0
        return max(0.0, asyncio.get_running_loop().time() - self._due, *self._lags)

    def _sample(self) -> None:
        self._lags.append(asyncio.get_running_loop().time() - self._due)
        self.start()


class Recorder:
    """The figures of this worker.

    Args:
        sessions: What the application says of its sessions; None where it has none to count.
        socket_dir: The directory of the workers' sockets; None where this is the only worker.

    Attributes:
        begun: Requests that have come so far.
        replies: The requests that are over, by the hundreds of the reply's status; the first are those without one.
        lengths: Those requests by how long they took, in the ranges of `BOUNDS`.
        seconds: How long all of them took together.
        edge_paths: Routes at which a session may begin or end; None where this recorder counts no sessions.
        hop_durations: For the router to count in.
        worker_id: This worker.
        socket_dir: As given.
    """

    def __init__(self, sessions: Placement | None = None, socket_dir: Path | None = None) -> None:
        self.worker_id = new_worker_id()
        self.hop_durations = Durations()
        self.begun = 0
        self.edge_paths: frozenset[str] | None = None
        self._first_paths = self._last_paths = self._ignored_paths = frozenset[str]()
        self._session_key: str | None = None
        self.lengths = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0
        self._tally: SessionTally | None = None
        self._placement = sessions
        self.socket_dir = socket_dir
        self._started_at = time.time()
        self.replies = [0] * len(_CLASSES)
        self._lost: dict[str, int] = {}
        self._lag = LoopLag()
        self._routing: SessionRoutingMiddleware | None = None

    def figures(self) -> WorkerFigures:
        """Return how this worker is doing; on its event loop."""
        tally = self._counted_sessions()
        routing = None if self._routing is None else self._routing.statistics()
        handled = sum(self.replies)
        lost = dict(self._lost)
        for reason, number in (routing.lost_by_reason if routing else {}).items():
            lost[str(reason)] = lost.get(str(reason), 0) + number
        return WorkerFigures(
            worker_id=self.worker_id,
            pid=os.getpid(),
            started_at=self._started_at,
            sessions_open=tally.held if tally else 0,
            sessions_created=tally.begun if tally else 0,
            sessions_ended=tally.ended if tally else 0,
            requests_in_flight=self.begun - handled,
            requests_handled=handled,
            forwarded_out=routing.forwarded if routing else 0,
            forwarded_in=routing.arrived if routing else 0,
            placed_elsewhere=routing.placed_elsewhere if routing else 0,
            replies={name: number for name, number in zip(_CLASSES, self.replies, strict=True) if number},
            lost_replies=lost,
            request_seconds=Histogram(BOUNDS, tuple(self.lengths), self.seconds),
            hop_seconds=Histogram(BOUNDS, tuple(self.hop_durations.counts), self.hop_durations.sum),
            loop_lag_s=self._lag.worst(),
            memory_bytes=_memory_bytes(),
            cpu_s=time.process_time(),
        )

    def start(self, app: FastAPI) -> None:
        """Begin to record; on the running event loop, before the application serves."""
        routing = getattr(app.state, "session_routing", None)
        if isinstance(routing, SessionRoutingMiddleware):
            self._routing = routing
            self.worker_id = routing.worker_id
        if self._placement is not None and self._counted_sessions() is None:
            self._count_sessions(self._placement, app.root_path)
        counted = self._counted_sessions()
        if counted is not None and self.socket_dir is not None:
            # Where that can't be, nobody is told what this worker held when it dies.
            with suppress(OSError):
                counted.when_changed(OpenSessions(self.socket_dir).hold)
        self._lag.start()

    def stop(self) -> None:
        """Record no more. Calling it again is harmless."""
        self._lag.stop()
        if self._tally is not None:
            self._tally.stop_forgetting()

    def unanswered(self, seconds: float) -> None:
        """Count a request that is over without a whole reply.

        Args:
            seconds: How long it took.
        """
        self.replies[0] += 1
        self.lengths[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def lost(self, message: Message) -> None:
        """Count a reply that tells of a lost session, if it does."""
        for name, value in message.get("headers", ()):
            if name == _LOST_HEADER:
                reason = value.decode("latin-1")
                self._lost[reason] = self._lost.get(reason, 0) + 1

    def note_session(self, scope: Scope, status: int) -> object:
        """Count the session that a reply begins; if the request is the last of its session, return that one's id.

        It has to be called for requests that came without a session, and for those to `edge_paths`.
        """
        if status >= 400 or scope["method"] != "POST" or self._tally is None or "session" not in scope:
            return None
        session_id: object = scope["session"].get(self._session_key)
        path = scope["path"]
        if session_id is None:
            return None
        if path in self._first_paths or (NEW_SESSION_KEY in scope and path not in self._ignored_paths):
            self._tally.begin(session_id)
        return session_id if path in self._last_paths and status < 300 else None

    def note_session_end(self, session_id: object) -> None:
        """Count the end of a session."""
        if self._tally is not None:
            self._tally.end(session_id)

    def _counted_sessions(self) -> SessionTally | None:
        placed = None if self._routing is None else self._routing.sessions
        return self._tally if placed is None else placed

    def _count_sessions(self, placement: Placement, root_path: str) -> None:
        """Count sessions here, as no router does; the paths are taken as they stand in a scope."""

        def in_scope(*paths: str | None) -> frozenset[str]:
            return frozenset(f"{root}{path}" for path in paths if path for root in ("", root_path))

        self._tally = SessionTally(placement)
        self._session_key = placement.session_key
        self._first_paths = in_scope(placement.first_path)
        self._last_paths = in_scope(placement.last_path if placement.when_ended is None else None)
        self._ignored_paths = in_scope(*placement.ignored_paths)
        self.edge_paths = self._first_paths | self._last_paths
        self._tally.start_forgetting()


class RecorderMiddleware(DisconnectMiddleware):
    """Counts the requests that the application answers, where their clients' going is watched anyway.

    A middleware of its own would cost more than all that it counts.

    Args:
        app: The application within.
        recorder: Where they are counted.
        answer: Returns the reply to a request for figures; None where the application is to answer.
    """

    def __init__(
        self, app: ASGIApp, *, recorder: Recorder, answer: Callable[[Scope], Awaitable[Response | None]]
    ) -> None:
        super().__init__(app)
        self._handle = super().__call__
        self._recorder = recorder
        self._answer = answer

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Handle one connection (ASGI)."""
        if scope.get("method") == "GET" and route_path(scope) in UNCOUNTED_PATHS and scope["type"] == "http":
            return self._reply(scope, receive, send)
        return self._handle(scope, receive, send)

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._answer(scope)
        await (self.app if reply is None else reply)(scope, receive, send)

    def watch(self, scope: Scope, receive: Receive, send: Send) -> DisconnectWatch:
        """Return what watches and counts one request."""
        request = _CountedRequest(receive, send, self.delay)
        request.recorder = recorder = self._recorder
        request.scope = scope
        recorder.begun += 1
        request.began = perf_counter()
        return request


class _CountedRequest(DisconnectWatch):
    # Few calls and no further attributes: there is one of these for each request.

    recorder: Recorder
    scope: Scope
    began: float
    _status = 0
    _ending: object = None

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._status = status = message["status"]
            scope, edges = self.scope, self.recorder.edge_paths
            if edges is not None and (scope["path"] in edges or NEW_SESSION_KEY in scope):
                self._ending = self.recorder.note_session(scope, status)
            if status == _LOST:
                self.recorder.lost(message)
        elif kind == "http.response.body" and not message.get("more_body"):
            if not self._answered:
                self._answered = True
                # Before it goes out: whoever has got the reply finds it counted.
                recorder = self.recorder
                seconds = perf_counter() - self.began
                recorder.seconds += seconds
                recorder.lengths[bisect_left(BOUNDS, seconds)] += 1
                # What is said to a client that has gone away reaches nobody.
                recorder.replies[self._status // 100 if self._gone is None else 0] += 1
                if self._ending is not None:
                    recorder.note_session_end(self._ending)
            self.close()
        await self._send(message)

    def end(self) -> None:
        if not self._answered:
            self.recorder.unanswered(perf_counter() - self.began)
            self.close()


def recording(
    inner: Callable[[Any], AbstractAsyncContextManager[Any]], recorder: Recorder
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return the lifespan `inner` with the recorder's around."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        recorder.start(app)
        try:
            async with inner(app) as state:
                yield state
        finally:
            recorder.stop()

    return lifespan


def _memory_bytes() -> int:
    """Return the memory in use; where the system does not tell, the most that there has been."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
