"""What is known of one server: its latest figures, how it came by them, and what has happened to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from nemo_gym.config_types import ServerInstance
from nemo_gym.dashboard.history import RequestCount, Sample
from nemo_gym.deployment.diagnosis import Finding, FindingKind, Severity, diagnose
from nemo_gym.deployment.rates import Looks, WorkerRates, worker_rates
from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures
from nemo_gym.server.worker_slots import TOLD_TO_STOP

State: TypeAlias = Literal["starting", "ok", "hidden", "silent"]
Level: TypeAlias = Literal["good", "note", "error"]
MILLISECONDS: Final = 1000
RATES_OVER_S: Final = 15.0
"""Rates and latencies are of about so many seconds: long enough to be read, short enough to be the present."""
DIAGNOSED_OVER_S: Final = 60.0
_LEAVING: Final = "leaving"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Args:
        at: When it was noticed, in seconds since 1970.
        level: How bad it is.
        server: To which server.
        text: What, in plain words.
    """

    at: float
    level: Level
    server: str
    text: str


class ServerWatch:
    """Keeps what is known of one server.

    Args:
        instance: The server.
        on_event: Told what happens to it.
    """

    def __init__(self, instance: ServerInstance, on_event: Callable[[Event], None]) -> None:
        self.instance = instance
        self.figures: ServerFigures | None = None
        self.state: State = "starting"
        self.problem: str | None = None
        self._since = 0.0
        # The last worker that was seen in each slot, though there may be none for a while.
        self._workers: dict[int, WorkerFigures] = {}
        self._silent: set[int] = set()
        self._count = RequestCount()
        self._looks = Looks(DIAGNOSED_OVER_S)
        self._on_event = on_event

    def answered(self, at: float, figures: ServerFigures) -> None:
        """Take in figures that came at a time, in seconds since 1970."""
        self._serves(at, "ok")
        # While one process takes a slot over from another, both are there.
        newest = {one.slot: one for one in sorted(figures.workers, key=lambda one: one.restarts)}
        for worker in (one for one in newest.values() if one.pid):
            before = self._workers.get(worker.slot)
            if before is not None:
                self._compare(at, before, worker)
            self._workers[worker.slot] = worker
        self.figures = figures
        self._count.add(figures)
        self._looks.add(figures)

    def _compare(self, at: float, before: WorkerFigures, now: WorkerFigures) -> None:
        level: Level | None = None
        if now.restarts > before.restarts:
            self._silent.discard(before.pid)
            level, text = _replaced(before, now)
        elif now.sessions_lost > before.sessions_lost:
            # The process before it has ended after this one had taken its slot over.
            level, text = "error", f"took over from one that has ended{_cost(before, now)}"
        elif now.responding and now.pid in self._silent:
            self._silent.discard(now.pid)
            level, text = "good", "responds again"
        elif before.responding and not now.responding and now.pid == before.pid and now.state != _LEAVING:
            self._silent.add(now.pid)
            level, text = "error", "does not respond"
        if level is not None:
            self._on_event(Event(at, level, self.instance.name, f"worker {now.slot} {text}"))

    def answered_without_figures(self, at: float) -> None:
        """Take in that the server serves and does not show its figures."""
        self._serves(at, "hidden")
        self.figures = None

    def failed(self, at: float, problem: str) -> None:
        """Take in that the server did not answer. Until it first has, it is taken to be starting."""
        self.problem = problem
        if self.state in ("ok", "hidden"):
            self.state, self._since = "silent", at
            self._on_event(Event(at, "error", self.instance.name, f"does not answer: {problem}"))

    def _serves(self, at: float, state: State) -> None:
        if self.state == "silent":
            self._on_event(Event(at, "good", self.instance.name, "answers again"))
        if self.state not in ("ok", "hidden"):
            self._since = at
        self.state, self.problem = state, None

    def sample(self) -> Sample | None:
        """Return what goes into the history; None while the server does not answer."""
        if self.state != "ok" or self.figures is None:
            return None
        return Sample(self.figures.sessions_open, self.figures.requests_in_flight, self._count.total)

    def findings(self) -> list[Finding]:
        """Return what is wrong with the server, the worst first."""
        name = self.instance.name
        if self.state == "silent":
            return [Finding(Severity.ERROR, FindingKind.SERVER_DOWN, name, None, f"does not answer: {self.problem}")]
        if self.figures is None:
            return []
        looks = self._looks
        return diagnose(self.figures, looks.before(self.figures, DIAGNOSED_OVER_S), looks.before(self.figures, 0.0))

    def _rates(self) -> Mapping[int, WorkerRates]:
        """Return what each worker did lately, by process id."""
        earlier = None if self.figures is None else self._looks.before(self.figures, RATES_OVER_S)
        return {} if self.figures is None or earlier is None else worker_rates(self.figures, earlier)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        instance, rates = self.instance, self._rates()
        # What a server said last is not the present any more once it does not answer.
        figures = None if self.state == "silent" else self.figures
        return {
            "name": instance.name,
            "kind": instance.kind,
            "implementation": instance.implementation,
            "url": instance.url,
            "num_workers": instance.num_workers if figures is None else figures.num_workers,
            "state": self.state,
            "problem": self.problem,
            "since": round(self._since, 1),
            "totals": None if figures is None else _totals(figures, list(rates.values())),
            "workers": [_worker_json(one, rates.get(one.pid)) for one in (figures.workers if figures else ())],
        }


def _replaced(before: WorkerFigures, now: WorkerFigures) -> tuple[Level, str]:
    end = now.last_exit or TOLD_TO_STOP
    times = now.restarts - before.restarts
    often = f" {times} times, the last one" if times > 1 else ""
    died = now.deaths > before.deaths or not end.startswith(TOLD_TO_STOP)
    return "error" if died else "note", f"was replaced{often} ({end}){_cost(before, now)}"


def _cost(before: WorkerFigures, now: WorkerFigures) -> str:
    lost = now.sessions_lost - before.sessions_lost
    return f"; {lost} session{'' if lost == 1 else 's'} lost with it" if lost > 0 else ""


def _totals(figures: ServerFigures, rates: Sequence[WorkerRates]) -> dict[str, Any]:
    return {
        "responding": sum(worker.responding and worker.state != _LEAVING for worker in figures.workers),
        "sessions_open": figures.sessions_open,
        "sessions_created": figures.sessions_created,
        "sessions_ended": figures.sessions_ended,
        "sessions_lost": figures.sessions_lost,
        "restarts": figures.restarts,
        "in_flight": figures.requests_in_flight,
        "handled": figures.requests_handled,
        "forwarded": figures.forwarded,
        "replies": figures.replies,
        "lost_replies": figures.lost_replies,
        "memory_bytes": figures.memory_bytes,
        **_rates_json(rates, figures.hop_seconds),
    }


def _worker_json(worker: WorkerFigures, rates: WorkerRates | None) -> dict[str, Any]:
    return {
        "slot": worker.slot,
        "id": worker.worker_id,
        "pid": worker.pid,
        "state": worker.state,
        "responding": worker.responding,
        "started_at": round(worker.started_at, 1),
        "restarts": worker.restarts,
        "last_exit": worker.last_exit,
        "sessions_open": worker.sessions_open,
        "sessions_created": worker.sessions_created,
        "sessions_ended": worker.sessions_ended,
        "sessions_lost": worker.sessions_lost,
        "in_flight": worker.requests_in_flight,
        "handled": worker.requests_handled,
        "forwarded_out": worker.forwarded_out,
        "forwarded_in": worker.forwarded_in,
        "replies": worker.replies,
        "lost_replies": worker.lost_replies,
        "loop_lag_ms": round(worker.loop_lag_s * MILLISECONDS, 1),
        "memory_bytes": worker.memory_bytes,
        **_rates_json([] if rates is None else [rates], worker.hop_seconds),
    }


def _rates_json(rates: Sequence[WorkerRates], hops: Histogram) -> dict[str, float | None]:
    requests = sum((one.request_seconds for one in rates), Histogram())
    return {
        "requests_per_s": round(sum(one.requests_per_s for one in rates), 2) if rates else None,
        "cpu": round(sum(one.cpu for one in rates), 3) if rates else None,
        "request_p50_ms": _milliseconds(requests, 0.5),
        "request_p99_ms": _milliseconds(requests, 0.99),
        "hop_p99_ms": _milliseconds(hops, 0.99),
    }


def _milliseconds(histogram: Histogram, q: float) -> float | None:
    return round(histogram.quantile(q) * MILLISECONDS, 2) if histogram.count else None
