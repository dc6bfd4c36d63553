"""The sessions that live in this worker: who is under way, what each is doing, and its end, exactly once.

A life begins with the request that begins the session, and ends for one reason only, whichever comes first. From then
on its new requests are refused; when those in flight are over, the server's hook runs, and then nothing is left of it.
An end is a task of its own: no request that goes away can leave it half done.

Everything is decided between two `await`s of one event loop, so that there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_LAST_WAIT_S: Final = 1.0  # for an end that was broken off to take notice

logger = logging.getLogger(__name__)


class SessionEndReason(StrEnum):
    """Why a session has ended.

    VERIFIED: it was scored. CLOSED: by `POST /close_session`. IDLE: no request for longer than the configured time.
    STOPPING: its worker stops. SEED_FAILED: `/seed_session` was answered with an error, or its client went away, so
    that the session never really began; what the handler had set up by then is still there to be released.
    """

    VERIFIED = "verified"
    CLOSED = "closed"
    IDLE = "idle"
    STOPPING = "stopping"
    SEED_FAILED = "seed_failed"


EndHook = Callable[[str, SessionEndReason], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Life:
    """One session from its beginning to its end.

    Attributes:
        session_id: The session.
        in_flight: Its requests and WebSockets that are being handled.
        seeds_in_flight: Those of them that are seeds.
        has_begun: Whether a request that begins it has been answered well.
        last_used: When its last request was over, on the event loop's clock.
        ending: The task of its end, once that has been decided.
        quiet: What the end waits for while there are requests in flight.
    """

    session_id: str
    in_flight: int = 0
    seeds_in_flight: int = 0
    has_begun: bool = False
    last_used: float = 0.0
    ending: asyncio.Task[None] | None = None
    quiet: asyncio.Event | None = None


@dataclass(frozen=True, slots=True)
class SessionLivesStatistics:
    """What a worker has to say of its sessions.

    Attributes:
        live: Sessions that take requests.
        ending: Sessions that take none any more, and whose end is not over.
        in_flight: Requests and WebSockets of all of them.
        ended: Sessions that have ended since the worker started.
    """

    live: int
    ending: int
    in_flight: int
    ended: int


class SessionLives:
    """The sessions of one worker.

    Args:
        name: The server's name, for the log.
        hook: Called exactly once at each session's end, with its id and the reason.
        idle_timeout_s: Seconds without a request after which a session ends; None for never.

    Attributes:
        is_stopping: No session can be begun any more.
    """

    def __init__(self, name: str, hook: EndHook, *, idle_timeout_s: float | None = None) -> None:
        self._name = name
        self._hook = hook
        self._idle_timeout_s = idle_timeout_s
        self.is_stopping = False
        self._lives: dict[str, Life] = {}
        # Those without a request in flight, the one unused for longest first.
        self._idle: OrderedDict[str, Life] = OrderedDict()
        self._some_are_idle = asyncio.Event()
        self._ended = 0
        self._when_gone: list[Callable[[str], None]] = []

    def statistics(self) -> SessionLivesStatistics:
        """Return what there is now."""
        ending = sum(life.ending is not None for life in self._lives.values())
        return SessionLivesStatistics(
            live=len(self._lives) - ending,
            ending=ending,
            in_flight=sum(life.in_flight for life in self._lives.values()),
            ended=self._ended,
        )

    def when_gone(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the id of each session whose end is over."""
        self._when_gone.append(callback)

    def find(self, session_id: str) -> Life | None:
        """Return a session that lives here, or whose end is not over."""
        return self._lives.get(session_id)

    async def settled(self, session_id: str) -> Life | None:
        """Return the session if it lives here, after its end is over if it is ending."""
        while (life := self._lives.get(session_id)) is not None and life.ending is not None:
            await asyncio.wait({life.ending})
        return life

    def begin(self, session_id: str) -> Life:
        """Begin a session that is not here, unless `is_stopping`; `using` has to follow before anything is awaited."""
        assert not self.is_stopping
        assert session_id not in self._lives
        life = self._lives[session_id] = Life(session_id)
        return life

    @contextmanager
    def using(self, life: Life) -> Iterator[None]:
        """Count a request in flight for as long as the context lasts."""
        life.in_flight += 1
        self._idle.pop(life.session_id, None)
        try:
            yield
        finally:
            life.in_flight -= 1
            if not life.in_flight:
                self._rest(life)

    @contextmanager
    def seeding(self, life: Life) -> Iterator[None]:
        """Count a request that begins `life`, as `using` does; the session ends if none of them sets `has_begun`."""
        life.seeds_in_flight += 1
        with self.using(life):
            try:
                yield
            finally:
                life.seeds_in_flight -= 1
                if not life.has_begun and not life.seeds_in_flight:
                    self.end(life, SessionEndReason.SEED_FAILED)

    def end(self, life: Life, reason: SessionEndReason) -> asyncio.Task[None]:
        """Begin the end of a session, unless it has begun; returns the task that is over when the end is."""
        if life.ending is None:
            self._idle.pop(life.session_id, None)
            life.ending = asyncio.create_task(self._end(life, reason), name=f"end of session {life.session_id}")
        return life.ending

    @asynccontextmanager
    async def running(self, grace_s: float) -> AsyncIterator[None]:
        """Let idle sessions end while the context lasts, and then all that are left.

        Args:
            grace_s: Seconds that the ends at the end may take. Half of them is for requests that are still in flight.
        """
        self.is_stopping = False
        expiry = asyncio.create_task(self._expire(), name=f"{self._name}: idle sessions")
        try:
            yield
        finally:
            self.is_stopping = True
            expiry.cancel()
            await asyncio.wait({expiry})
            await self._stop(grace_s)

    def _rest(self, life: Life) -> None:
        if life.quiet is not None:
            life.quiet.set()
        if life.ending is None and self._idle_timeout_s is not None:
            life.last_used = asyncio.get_running_loop().time()
            self._idle[life.session_id] = life
            self._some_are_idle.set()

    async def _end(self, life: Life, reason: SessionEndReason) -> None:
        try:
            if life.in_flight:
                life.quiet = asyncio.Event()
                await life.quiet.wait()
            await self._hook(life.session_id, reason)
        except asyncio.CancelledError:
            logger.error("%s: the end of session %s was broken off", self._name, life.session_id)  # noqa: TRY400
        except Exception:
            logger.exception("%s: on_session_end failed for session %s (%s)", self._name, life.session_id, reason)
        finally:
            del self._lives[life.session_id]
            self._ended += 1
            for callback in self._when_gone:
                callback(life.session_id)

    async def _expire(self) -> None:
        if self._idle_timeout_s is None:
            return
        clock = asyncio.get_running_loop().time
        while True:
            if not self._idle:
                self._some_are_idle.clear()
                await self._some_are_idle.wait()
            oldest = next(iter(self._idle.values()))
            due = oldest.last_used + self._idle_timeout_s
            if due > clock():
                # Whatever comes to rest meanwhile is due later.
                await asyncio.sleep(due - clock())
            else:
                self.end(oldest, SessionEndReason.IDLE)

    async def _stop(self, grace_s: float) -> None:
        ends = {self.end(life, SessionEndReason.STOPPING) for life in list(self._lives.values())}
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=grace_s / 2)
        for life in self._lives.values():
            if life.quiet is not None:
                life.quiet.set()
        if late:
            _, late = await asyncio.wait(late, timeout=grace_s / 2)
        if late:
            logger.error("%s: %d sessions did not end within %.0f s", self._name, len(late), grace_s)
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=_LAST_WAIT_S)
