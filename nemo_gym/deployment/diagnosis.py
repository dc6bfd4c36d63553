"""What is wrong with a server, told from its figures: the same findings for `gym env status` and the dashboard.

A finding says what was seen, in figures, and what to do. The limits below are meant for the person who is woken by
them: small numbers, which chance alone explains, are no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import Final

from nemo_gym.deployment.rates import WorkerRates, total_rates, worker_rates
from nemo_gym.server.figures import ServerFigures, WorkerFigures
from nemo_gym.server.worker_slots import TOLD_TO_STOP
from nemo_gym.session_routing.lost import LostReason

RECENT_S: Final = 600.0
"""So long a death is worth a warning: rollouts that it hit are still failing or being run again."""
OVER_AND_OVER: Final = 3
"""Deaths in one slot that are no accident, where they come more often than one in `RECENT_S` on average."""
BLOCKED_S: Final = 1.0
"""A late event loop keeps all sessions of its worker waiting. A busy machine makes a loop late by tenths of a second;
whole ones take a handler that blocks, or a processor that is far too busy."""
BUSY_CPU: Final = 0.8
"""The part of a processor from which on a late loop has too much to do, rather than waits in a call that blocks."""
MIN_SESSIONS: Final = 10
"""One worker that holds fewer keeps nobody waiting."""
UNEVEN_FACTOR: Final = 1.5
"""Times its even share that one worker may hold before rollouts wait for it while others are idle."""
UNEVEN_SIGMAS: Final = 5.0
"""And so many times the spread that chance alone gives (the square root of the even share)."""
NEWCOMER_S: Final = 60.0
"""A worker that started so much later than the first was not there when sessions were given out."""
MIN_REPLIES: Final = 20
"""With fewer bad replies their share says nothing."""
SERVER_ERRORS_SHARE: Final = 0.05
"""Server errors (5xx) are run again; above this part of all replies they are what the time goes into."""
LOST_SHARE: Final = 0.01
"""A lost session costs a whole rollout, so a small part of all replies counts."""
UNANSWERED_SHARE: Final = 0.1
"""Callers that leave before their reply are rare, but for a run that is stopped."""
MIN_WINDOW_S: Final = 10.0
"""An earlier look that is nearer says little of shares; those since the workers started are told then."""
STUCK_S: Final = 60.0
"""Most requests take less; where none ends for so long, it is worth a look, though a rollout may take longer."""

_STARTING: Final = "starting"
_LEAVING: Final = "leaving"
_ENDED: Final = "ended"
_KILLED: Final = "killed by SIGKILL"


class Severity(StrEnum):
    """How bad a finding is: an error means that the server does not do its work, or not all of it."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class FindingKind(StrEnum):
    """What was found; programs know a finding by it."""

    SERVER_DOWN = "server_down"
    FIGURES_HIDDEN = "figures_hidden"
    FIGURES_MISSING = "figures_missing"
    WORKER_MISSING = "worker_missing"
    NOT_RUNNING = "not_running"
    NOT_RESPONDING = "not_responding"
    STARTING = "starting"
    RESTARTING = "restarting"
    REPLACED = "replaced"
    SESSIONS_LOST = "sessions_lost"
    LOST_REPLIES = "lost_replies"
    UNEVEN = "uneven"
    LOOP_BLOCKED = "loop_blocked"
    SERVER_ERRORS = "server_errors"
    UNANSWERED = "unanswered"
    NO_PROGRESS = "no_progress"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or worth knowing.

    Attributes:
        severity: How bad it is.
        kind: What it is.
        server: The server's name.
        worker: The slot of the worker that it is about; None when it is about the server.
        text: What was seen, and what to do.
    """

    severity: Severity
    kind: FindingKind
    server: str
    worker: int | None
    text: str


def diagnose(
    figures: ServerFigures, earlier: ServerFigures | None = None, last: ServerFigures | None = None
) -> list[Finding]:
    """Return what is wrong with a server, the worst first.

    Args:
        figures: The present figures.
        earlier: A look some time before, best a minute or two. With it, shares of replies are those since then, and
            it is seen that nothing moves.
        last: The last look before; `earlier` where there is no other. With it, it is seen what lasts.
    """
    look = _Look(figures, earlier, last or earlier)
    found = [finding for rule in _RULES for finding in rule(look)]
    return sorted(found, key=lambda finding: (list(Severity).index(finding.severity), finding.worker or 0))


class _Look:
    """Present figures, with what an earlier look adds to them."""

    def __init__(self, figures: ServerFigures, earlier: ServerFigures | None, last: ServerFigures | None) -> None:
        self.figures = figures
        self.earlier = earlier
        self.last = last
        self.rates: Mapping[int, WorkerRates] = {} if earlier is None else worker_rates(figures, earlier)
        self._counts: ServerFigures | WorkerRates | None = figures
        self.since = "since the workers started"
        if earlier is not None and figures.at - earlier.at >= MIN_WINDOW_S:
            self._counts = total_rates(self.rates.values())
            self.since = f"in the last {seconds_text(figures.at - earlier.at)}"

    @property
    def replies(self) -> Mapping[str, int]:
        """The replies of the time `since`, by class."""
        return {} if self._counts is None else self._counts.replies

    @property
    def lost_replies(self) -> Mapping[str, int]:
        """The replies of the time `since` that told of lost sessions, by reason."""
        return {} if self._counts is None else self._counts.lost_replies

    def age(self, worker: WorkerFigures) -> float:
        return max(0.0, self.figures.at - worker.started_at)

    def before(self, worker: WorkerFigures) -> WorkerFigures | None:
        """The same process, or the same empty slot, at the last look."""
        return _same(worker, self.last)

    def held(self, worker: WorkerFigures) -> int:
        """The sessions that a silent worker held when it was last seen to answer."""
        seen = (_same(worker, look) for look in (self.last, self.earlier))
        return next((one.sessions_open for one in seen if one is not None and one.responding), 0)

    def died_recently(self, worker: WorkerFigures) -> bool:
        """Whether the process before this one has ended of its own accord, a short while ago."""
        died = worker.last_exit is not None and not worker.last_exit.startswith(TOLD_TO_STOP)
        return died and worker.state not in (_LEAVING, _ENDED) and self.age(worker) <= RECENT_S

    def finding(self, severity: Severity, kind: FindingKind, text: str, worker: WorkerFigures | None = None) -> Finding:
        slot = None if worker is None else worker.slot
        return Finding(severity, kind, self.figures.server, slot, text)


def _same(worker: WorkerFigures, look: ServerFigures | None) -> WorkerFigures | None:
    workers = () if look is None else look.workers
    return next((one for one in workers if (one.pid, one.slot) == (worker.pid, worker.slot)), None)


def _missing(look: _Look) -> Iterator[Finding]:
    for worker in look.figures.workers:
        if worker.state == _ENDED:
            before = look.before(worker)
            severity = Severity.ERROR if before is not None and before.state == _ENDED else Severity.WARNING
            text = (
                f"worker {worker.slot} is not running ({worker.last_exit}; restarts so far: {worker.restarts}); it is "
                "started again, after a pause where it does not come up. The server's log tells why"
            )
            yield look.finding(severity, FindingKind.NOT_RUNNING, text, worker)
    known = sum(worker.state != _LEAVING for worker in look.figures.workers)
    wanted = look.figures.num_workers
    if known < wanted:
        text = f"there are {known} of {wanted} workers; the server's log tells why"
        yield look.finding(Severity.WARNING, FindingKind.WORKER_MISSING, text)


def _silent(look: _Look) -> Iterator[Finding]:
    for worker in look.figures.workers:
        if worker.responding or worker.state in (_LEAVING, _ENDED):
            continue
        name = f"worker {worker.slot} (process {worker.pid})"
        if worker.state == _STARTING:
            text = f"{name} has been starting for {seconds_text(look.age(worker))}"
            yield look.finding(Severity.NOTE, FindingKind.STARTING, text, worker)
            continue
        waiting = look.held(worker)
        held = f" What it held waits: {_sessions(waiting)}." if waiting else ""
        text = (
            f"{name} does not answer: something blocks its event loop, or the process is stopped.{held} "
            f"`py-spy dump --pid {worker.pid}` shows what it does"
        )
        before = look.before(worker)
        was_silent = before is not None and not before.responding
        severity = Severity.ERROR if was_silent else Severity.WARNING
        yield look.finding(severity, FindingKind.NOT_RESPONDING, text, worker)


def _restarted(look: _Look) -> Iterator[Finding]:
    # At least so long the server has run.
    known_for = max((look.age(worker) for worker in look.figures.workers if worker.pid), default=0.0)
    for worker in look.figures.workers:
        if not look.died_recently(worker):
            continue
        lost = f"; {_sessions(worker.sessions_lost)} lost in its place so far" if worker.sessions_lost else ""
        ago = seconds_text(look.age(worker))
        if worker.deaths >= OVER_AND_OVER and worker.deaths * RECENT_S >= known_for:
            text = (
                f"worker {worker.slot} restarts over and over: {worker.deaths} times, the last time {ago} ago "
                f"({worker.last_exit}){lost}. {_advice(worker)}"
            )
            yield look.finding(Severity.ERROR, FindingKind.RESTARTING, text, worker)
        else:
            text = f"worker {worker.slot} was replaced {ago} ago ({worker.last_exit}){lost}. {_advice(worker)}"
            yield look.finding(Severity.WARNING, FindingKind.REPLACED, text, worker)


def _advice(worker: WorkerFigures) -> str:
    if worker.last_exit == _KILLED:
        return "That came from outside: the system kills so when memory runs out (`dmesg` tells)"
    return "The server's log tells more"


def _lost_before(look: _Look) -> Iterator[Finding]:
    recent = sum(worker.sessions_lost for worker in look.figures.workers if look.died_recently(worker))
    lost = look.figures.sessions_lost - recent
    if lost:
        text = f"{_sessions(lost)} lost with workers that ended, since the server started"
        yield look.finding(Severity.NOTE, FindingKind.SESSIONS_LOST, text)


_CAUSES: Final[Mapping[str, str]] = {
    LostReason.WORKER_GONE: " (the workers that held them have ended)",
    LostReason.SESSION_EXPIRED: " (cookies or tokens were older than the server accepts)",
    LostReason.SESSION_ENDED: " (they had ended before, or never began: look at `session_end`)",
}


def _lost_replies(look: _Look) -> Iterator[Finding]:
    lost = look.lost_replies
    count, of = sum(lost.values()), sum(look.replies.values())
    if count < MIN_REPLIES or count < LOST_SHARE * of:
        return
    reasons = ", ".join(f"{number} {reason}{_CAUSES.get(reason, '')}" for reason, number in sorted(lost.items()))
    text = f"{count} replies {look.since} told of lost sessions (410): {reasons}"
    yield look.finding(Severity.WARNING, FindingKind.LOST_REPLIES, text)


def _uneven(look: _Look) -> Iterator[Finding]:
    answering = [worker for worker in look.figures.workers if worker.responding and worker.state != _LEAVING]
    settled = [worker for worker in answering if not _is_newcomer(look, worker, answering)]
    if len(settled) < 2:
        return
    total = sum(worker.sessions_open for worker in settled)
    share = total / len(settled)
    most = max(settled, key=lambda worker: worker.sessions_open)
    if most.sessions_open >= max(MIN_SESSIONS, UNEVEN_FACTOR * share, share + UNEVEN_SIGMAS * sqrt(share)):
        text = (
            f"worker {most.slot} holds {most.sessions_open} of {total} open sessions on {len(settled)} workers "
            f"(an even share is {share:.0f}): rollouts wait for it while others are idle. "
            "Sessions that begin by POST /seed_session are spread evenly"
        )
        yield look.finding(Severity.WARNING, FindingKind.UNEVEN, text, most)


def _is_newcomer(look: _Look, worker: WorkerFigures, among: Sequence[WorkerFigures]) -> bool:
    first = min(among, key=lambda one: one.started_at)
    # One with more restarts has come in place of another, which took its sessions along, however young both are.
    came_later = worker.started_at - first.started_at >= NEWCOMER_S or worker.restarts > first.restarts
    return came_later and look.age(worker) <= RECENT_S


def _blocked(look: _Look) -> Iterator[Finding]:
    for worker in look.figures.workers:
        if not worker.responding or worker.loop_lag_s < BLOCKED_S:
            continue
        rates = look.rates.get(worker.pid)
        if rates is not None and rates.cpu >= BUSY_CPU:
            advice = f"It uses {rates.cpu:.0%} of a processor: give the server more workers, or its handlers less work"
        else:
            advice = (
                "A handler that blocks has to be `def` rather than `async def`, or to call what blocks in a thread; "
                "where none does, the machine has too much to do"
            )
        waiting = f"{worker.requests_in_flight} requests in flight"
        if worker.sessions_open:
            waiting = f"{_sessions(worker.sessions_open)}, {waiting}"
        text = (
            f"the event loop of worker {worker.slot} was blocked for {seconds_text(worker.loop_lag_s)} in the last "
            f"seconds, and so was all that it has: {waiting}. {advice}"
        )
        yield look.finding(Severity.WARNING, FindingKind.LOOP_BLOCKED, text, worker)


def _bad_replies(look: _Look) -> Iterator[Finding]:
    replies = look.replies
    of = sum(replies.values())
    errors, unanswered = replies.get("5xx", 0), replies.get("none", 0)
    if errors >= MIN_REPLIES and errors >= SERVER_ERRORS_SHARE * of:
        text = f"{errors} of {of} replies {look.since} were server errors (5xx); the server's log has their causes"
        yield look.finding(Severity.WARNING, FindingKind.SERVER_ERRORS, text)
    if unanswered >= MIN_REPLIES and unanswered >= UNANSWERED_SHARE * of:
        text = f"in {unanswered} of {of} requests {look.since} the caller left before the reply: a timeout, or a stop"
        yield look.finding(Severity.NOTE, FindingKind.UNANSWERED, text)


def _no_progress(look: _Look) -> Iterator[Finding]:
    if look.earlier is None or look.figures.at - look.earlier.at < STUCK_S:
        return
    in_flight = look.figures.requests_in_flight
    waited = min(in_flight, look.earlier.requests_in_flight)
    if waited and look.rates and not look.replies:
        text = f"no request was answered {look.since}, while {in_flight} are in flight: they may be long, or stuck"
        yield look.finding(Severity.NOTE, FindingKind.NO_PROGRESS, text)


_RULES: Final = (
    _missing,
    _silent,
    _restarted,
    _lost_before,
    _lost_replies,
    _uneven,
    _blocked,
    _bad_replies,
    _no_progress,
)


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def seconds_text(seconds: float) -> str:
    """Return a length of time in words, roughly: `0.4 s`, `12 s`, `5 min`, `3 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
