"""The figures of a server's workers, as they travel: from a worker to its fellow, and to whoever looks.

Only values. Versions may mix while a server is replaced, so unknown fields of a document are passed over, and fields
that it lacks have their defaults.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Self

HIDDEN: Final = "the figures are not shown at this address; `expose_figures: true` of the server shows them"
"""What `/workers` and `/metrics` answer, with status 404, where figures are not shown."""

_WHOLE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long something took, each time.

    Attributes:
        bounds: Seconds, ascending: the upper bounds of all ranges but the last, each within its range.
        counts: How many were in each range; the last range has no upper bound.
        sum: Seconds of all together.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return about how many seconds the part `q` of all did not exceed; 0 where there were none.

        Within a range all lengths are taken for equally frequent. In the last one it is its lower bound.

        Args:
            q: From 0 to 1.
        """
        if not self.count or not self.bounds:
            return 0.0
        wanted = min(max(q, 0.0), _WHOLE) * self.count
        sums = list(accumulate(self.counts))
        place = bisect_left(sums, wanted)
        while not self.counts[place]:
            place += 1
        if place >= len(self.bounds):
            return self.bounds[-1]
        lower = self.bounds[place - 1] if place else 0.0
        part = (wanted - (sums[place] - self.counts[place])) / self.counts[place]
        return lower + (self.bounds[place] - lower) * part

    def __add__(self, other: Histogram) -> Histogram:
        """Return both together; where their ranges differ, the one with more in it stands for both."""
        if not other.count:
            return self
        if not self.count:
            return other
        if self.bounds != other.bounds:
            return max(self, other, key=lambda histogram: histogram.count)
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def to_json(self) -> dict[str, Any]:
        """Return this as a JSON object."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Return what a JSON object says; an empty histogram where it says nothing that makes sense."""
        if not isinstance(document, Mapping):
            return cls()
        bounds = tuple(float(bound) for bound in document.get("bounds", ()))
        counts = tuple(int(count) for count in document.get("counts", ()))
        if len(counts) != len(bounds) + 1:
            return cls()
        return cls(bounds, counts, float(document.get("sum", 0.0)))


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker. Counts are since its process started, unless said otherwise.

    Attributes:
        worker_id: Its id, new for each process; empty where it is not known.
        slot: Its place among the server's workers, from 0; the worker that replaces one that died has its slot.
        pid: Its process.
        started_at: When that started, in seconds since 1970.
        restarts: How many processes of this slot have ended since the server started, and been replaced.
        last_exit: How the process before this one ended, such as "killed by SIGKILL"; None where there was none, or it
            has not ended yet.
        state: "starting", "serving", or "leaving" once it was told to stop; one that is starting or has nearly left
            does not answer, and nothing is wrong with it. "ended" where the slot is empty until another is started.
        responding: Whether it answered. Where it did not, only `slot`, `pid`, `started_at`, `restarts`, `last_exit`,
            `state`, `sessions_lost` and `deaths` mean anything.
        sessions_open: Sessions that it holds.
        sessions_created: Sessions that began here.
        sessions_ended: Sessions that ended here in an orderly way, as far as the server is told of it.
        sessions_lost: Sessions that earlier processes of this slot held when they ended, as far as is known.
        deaths: How many earlier processes of this slot ended without having been told to stop.
        requests_in_flight: Requests that it is handling.
        requests_handled: Requests that it has answered itself.
        forwarded_out: Requests that it passed on to another worker, or would have, had that one not been gone.
        forwarded_in: Requests that other workers passed on to it.
        placed_elsewhere: Those passed on that were to begin a session.
        replies: The replies to requests handled, by class: "2xx", "4xx", "5xx" and so on; "none" where the client
            went away, or the reply did not come to its end.
        lost_replies: Replies that told of a lost session (410), by reason.
        request_seconds: From a request's arrival at its handling worker to the end of the reply.
        hop_seconds: From passing a request on to the end of its reply.
        loop_lag_s: The longest that the event loop was late in about the last ten seconds.
        memory_bytes: Memory in use (resident).
        cpu_s: Processor time used, user and system.
    """

    worker_id: str = ""
    slot: int = 0
    pid: int = 0
    started_at: float = 0.0
    restarts: int = 0
    last_exit: str | None = None
    state: str = "serving"
    responding: bool = True
    sessions_open: int = 0
    sessions_created: int = 0
    sessions_ended: int = 0
    sessions_lost: int = 0
    deaths: int = 0
    requests_in_flight: int = 0
    requests_handled: int = 0
    forwarded_out: int = 0
    forwarded_in: int = 0
    placed_elsewhere: int = 0
    replies: dict[str, int] = field(default_factory=dict)
    lost_replies: dict[str, int] = field(default_factory=dict)
    request_seconds: Histogram = field(default_factory=Histogram)
    hop_seconds: Histogram = field(default_factory=Histogram)
    loop_lag_s: float = 0.0
    memory_bytes: int = 0
    cpu_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return this as a JSON object."""
        values = {name: getattr(self, name) for name in type(self).__dataclass_fields__}
        return {name: value.to_json() if isinstance(value, Histogram) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return what a JSON object says."""
        known = {name: value for name, value in document.items() if name in cls.__dataclass_fields__}
        for name in ("request_seconds", "hop_seconds"):
            if name in known:
                known[name] = Histogram.from_json(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server, with all its workers.

    Attributes:
        server: The instance's name.
        kind: Which kind of server it is, as the configuration names it, such as "resources_servers".
        at: When the figures were taken, in seconds since 1970.
        num_workers: How many workers there are to be.
        workers: The workers that there are, by slot. While one process takes a slot over from another (all workers
            are being replaced, or one is leaving), both are there: the one that leaves comes first.
        answered_by: The id of the worker that put this together.
        lost_with_removed: Sessions lost in slots that have no worker any more.
    """

    server: str = ""
    kind: str = ""
    at: float = 0.0
    num_workers: int = 1
    workers: tuple[WorkerFigures, ...] = ()
    answered_by: str = ""
    lost_with_removed: int = 0

    @property
    def sessions_open(self) -> int:
        """Sessions that are held by all workers."""
        return sum(worker.sessions_open for worker in self.workers)

    @property
    def sessions_created(self) -> int:
        """Sessions that have begun at the present workers."""
        return sum(worker.sessions_created for worker in self.workers)

    @property
    def sessions_ended(self) -> int:
        """Sessions that have ended in an orderly way at the present workers."""
        return sum(worker.sessions_ended for worker in self.workers)

    @property
    def sessions_lost(self) -> int:
        """Sessions lost with workers that ended, since the server started."""
        return sum(worker.sessions_lost for worker in self.workers) + self.lost_with_removed

    @property
    def restarts(self) -> int:
        """How many workers have been replaced in the present slots since the server started."""
        # While one process takes a slot over from another, both are there.
        by_slot = {worker.slot: worker.restarts for worker in sorted(self.workers, key=lambda one: one.restarts)}
        return sum(by_slot.values())

    @property
    def requests_in_flight(self) -> int:
        """Requests that are being handled."""
        return sum(worker.requests_in_flight for worker in self.workers)

    @property
    def requests_handled(self) -> int:
        """Requests that the present workers have answered, each counted once."""
        return sum(worker.requests_handled for worker in self.workers)

    @property
    def forwarded(self) -> int:
        """Requests that the present workers have passed on to another."""
        return sum(worker.forwarded_out for worker in self.workers)

    @property
    def replies(self) -> dict[str, int]:
        """The replies of the present workers, by class."""
        return summed(worker.replies for worker in self.workers)

    @property
    def lost_replies(self) -> dict[str, int]:
        """The replies of the present workers that told of a lost session, by reason."""
        return summed(worker.lost_replies for worker in self.workers)

    @property
    def request_seconds(self) -> Histogram:
        """How long the requests of the present workers took."""
        return sum((worker.request_seconds for worker in self.workers), Histogram())

    @property
    def hop_seconds(self) -> Histogram:
        """How long the requests took that the present workers passed on."""
        return sum((worker.hop_seconds for worker in self.workers), Histogram())

    @property
    def memory_bytes(self) -> int:
        """Memory in use by all workers; what they share is counted for each."""
        return sum(worker.memory_bytes for worker in self.workers)

    @property
    def cpu_s(self) -> float:
        """Processor time used by the present workers."""
        return sum(worker.cpu_s for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        """Return this as a JSON object."""
        values = {name: getattr(self, name) for name in type(self).__dataclass_fields__}
        return {**values, "workers": [worker.to_json() for worker in self.workers]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return what a JSON object says, such as the reply to `GET /workers`."""
        known = {name: value for name, value in document.items() if name in cls.__dataclass_fields__}
        known["workers"] = tuple(WorkerFigures.from_json(worker) for worker in known.get("workers", ()))
        return cls(**known)


def summed(dictionaries: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts, by name."""
    total: dict[str, int] = {}
    for dictionary in dictionaries:
        for name, number in dictionary.items():
            total[name] = total.get(name, 0) + number
    return total
