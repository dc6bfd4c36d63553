"""What happened between two looks at a server: figures count from a process's start, people ask for the present."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures, summed

_NOTHING: Final = WorkerFigures()


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker did between two looks.

    Attributes:
        seconds: The time between the looks; since the worker started, where it was not there at the first one.
        requests_per_s: Requests that it answered itself.
        sessions_per_s: Sessions that began at it.
        cpu: The part of one processor that it used, from 0 to 1, above 1 with threads that run side by side.
        replies: The replies of that time, by class.
        lost_replies: The replies of that time that told of a lost session, by reason.
        request_seconds: How long its requests of that time took.
    """

    seconds: float
    requests_per_s: float
    sessions_per_s: float
    cpu: float
    replies: Mapping[str, int]
    lost_replies: Mapping[str, int]
    request_seconds: Histogram


def worker_rates(now: ServerFigures, earlier: ServerFigures) -> dict[int, WorkerRates]:
    """Return what each worker did since an earlier look, by its process id; those that do not answer are left out.

    A process that was not there is counted from its start. One that was silent at the earlier look has no rates,
    for where it stood then is not known.

    Args:
        now: The present figures.
        earlier: Figures of the same server some time before.
    """
    known = {worker.pid: worker for worker in earlier.workers}
    found = {}
    for worker in now.workers:
        before = known.get(worker.pid, _NOTHING)
        seconds = now.at - (earlier.at if worker.pid in known else worker.started_at)
        if worker.responding and before.responding and seconds > 0:
            found[worker.pid] = _rates(worker, before, seconds)
    return found


def total_rates(rates: Iterable[WorkerRates]) -> WorkerRates | None:
    """Return what several workers did together; None where there are no rates.

    Args:
        rates: Those of the workers.
    """
    every = list(rates)
    if not every:
        return None
    return WorkerRates(
        max(one.seconds for one in every),
        sum(one.requests_per_s for one in every),
        sum(one.sessions_per_s for one in every),
        sum(one.cpu for one in every),
        summed(one.replies for one in every),
        summed(one.lost_replies for one in every),
        sum((one.request_seconds for one in every), Histogram()),
    )


def _rates(now: WorkerFigures, before: WorkerFigures, seconds: float) -> WorkerRates:
    return WorkerRates(
        seconds,
        max(0, now.requests_handled - before.requests_handled) / seconds,
        max(0, now.sessions_created - before.sessions_created) / seconds,
        max(0.0, now.cpu_s - before.cpu_s) / seconds,
        _risen(now.replies, before.replies),
        _risen(now.lost_replies, before.lost_replies),
        _histogram_since(now.request_seconds, before.request_seconds),
    )


def _risen(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def _histogram_since(now: Histogram, before: Histogram) -> Histogram:
    if now.bounds != before.bounds:
        return now
    counts = tuple(max(0, later - sooner) for later, sooner in zip(now.counts, before.counts, strict=True))
    return Histogram(now.bounds, counts, max(0.0, now.sum - before.sum))


class Looks:
    """The looks at one server that are recent enough to compare a present one with.

    Args:
        kept_s: How far back they go.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._looks: deque[ServerFigures] = deque()

    def __iter__(self) -> Iterator[ServerFigures]:
        return iter(self._looks)

    def add(self, figures: ServerFigures) -> None:
        """Keep a look, and forget those that it makes too old, save for the last of them.

        After a step back of the clock, all are forgotten.
        """
        if self._looks and figures.at < self._looks[-1].at:
            self._looks.clear()
        self._looks.append(figures)
        while len(self._looks) > 2 and self._looks[1].at <= figures.at - self._kept_s:
            self._looks.popleft()

    def before(self, figures: ServerFigures, seconds: float) -> ServerFigures | None:
        """Return a look about so many seconds before `figures` (0: the last), or else the oldest one before it."""
        earlier = [look for look in self._looks if look.at < figures.at]
        far_enough = [look for look in earlier if look.at <= figures.at - seconds]
        return far_enough[-1] if far_enough else next(iter(earlier), None)
