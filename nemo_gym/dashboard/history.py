"""What the figures were: the last minutes as they were seen, the last hour thinned out.

Of requests, sessions begun and sessions lost, sums are kept that never fall, though each worker counts from zero. So
a rate between any two points is exact, however many between them were dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nemo_gym.server.figures import ServerFigures

FINE_S: Final = 300.0
COARSE_STEP_S: Final = 20.0
WHOLE_S: Final = 3600.0
RATE_OVER_S: Final = 10.0
RATE_AT_LEAST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One server at one time.

    Args:
        sessions: Sessions open.
        in_flight: Requests in flight.
        requests: Requests handled since the dashboard began to look.
    """

    sessions: int
    in_flight: int
    requests: int


class History:
    """A bounded number of points; each has a sample of the servers that answered."""

    def __init__(self) -> None:
        self._fine: deque[tuple[float, Mapping[str, Sample]]] = deque()
        self._coarse: deque[tuple[float, Mapping[str, Sample]]] = deque()

    def add(self, at: float, samples: Mapping[str, Sample]) -> None:
        """Add a point.

        Args:
            at: Seconds, later than those of all points before; after a step back of the clock history begins anew.
            samples: By the server's name.
        """
        if self._fine and at <= self._fine[-1][0]:
            self._fine.clear()
            self._coarse.clear()
        self._fine.append((at, samples))
        while self._fine[0][0] < at - FINE_S:
            point = self._fine.popleft()
            if not self._coarse or point[0] - self._coarse[-1][0] >= COARSE_STEP_S:
                self._coarse.append(point)
        while self._coarse and self._coarse[0][0] < at - WHOLE_S:
            self._coarse.popleft()

    def __len__(self) -> int:
        return len(self._fine) + len(self._coarse)

    def to_json(self) -> dict[str, Any]:
        """Return `at`, a list of times, and for each server lists of what it was then; None where it is not known."""
        points = [*self._coarse, *self._fine]
        names = dict.fromkeys(name for _, samples in points for name in samples)
        servers: dict[str, dict[str, list[float | None]]] = {}
        for name in names:
            series = [samples.get(name) for _, samples in points]
            servers[name] = {
                "sessions": [sample.sessions if sample else None for sample in series],
                "in_flight": [sample.in_flight if sample else None for sample in series],
                "requests_per_s": _rates([at for at, _ in points], series),
            }
        return {"at": [round(at, 1) for at, _ in points], "servers": servers}


def _rates(times: list[float], series: list[Sample | None]) -> list[float | None]:
    """Return the rate at each point: over `RATE_OVER_S`, or since the point before where that is longer ago.

    Over very short times chance alone makes a rate, so there is none.
    """
    rates: list[float | None] = []
    first = 0
    for place, sample in enumerate(series):
        if sample is None:
            first = place + 1
        while first < place - 1 and times[place] - times[first + 1] >= RATE_OVER_S:
            first += 1
        before = series[first] if first < place else None
        if sample is None or before is None or times[place] - times[first] < RATE_AT_LEAST_S:
            rates.append(None)
        else:
            rates.append(round((sample.requests - before.requests) / (times[place] - times[first]), 2))
    return rates


class RequestCount:
    """Counts what a server's workers handle, though they come and go and each counts from zero."""

    def __init__(self) -> None:
        self.total = 0
        # By process: of a silent worker nothing else is known.
        self._handled: dict[int, int] | None = None

    def add(self, figures: ServerFigures) -> None:
        """Take in figures. What was handled before the first ones is not counted."""
        before = self._handled
        now = {worker.pid: worker.requests_handled for worker in figures.workers if worker.responding}
        if before is not None:
            self.total += sum(max(0, handled - before.get(pid, 0)) for pid, handled in now.items())
            silent = {worker.pid for worker in figures.workers if not worker.responding}
            # Where a silent worker stood is needed when it answers again.
            now |= {pid: handled for pid, handled in before.items() if pid in silent}
        self._handled = now
