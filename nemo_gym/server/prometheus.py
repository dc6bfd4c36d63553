"""The figures of a server in the text format of Prometheus, as `GET /metrics` answers them.

Whichever worker answers, the series are those of all workers, told apart by the label `worker`: the worker's slot,
which the process that replaces a dead one takes over, so that the number of series stays the same. Its counters then
begin at zero, as Prometheus expects of a restarted process; `nemo_gym_worker_start_time_seconds` tells when. The series
of a worker that does not answer are left out rather than shown as zeros, which would look like a restart. While one
process takes a slot over from another in good order, the one that comes or goes has the label `<slot>.1`.

Imported only where `/metrics` is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures
from nemo_gym.session_routing.lost import LostReason

_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SERVING: Final = "serving"
_LABELS: Final = ("server", "worker")
# A rate over a series that appears with its first event does not see that event.
_CODES: Final = ("2xx", "4xx", "5xx")

# What is known of a worker that does not answer, too.
_ALWAYS_KNOWN: Final[tuple[tuple[type[Metric], str, str, Callable[[WorkerFigures], float]], ...]] = (
    (GaugeMetricFamily, "worker_up", "Whether the worker answers (1) or not (0).", lambda it: it.responding),
    (
        CounterMetricFamily,
        "worker_restarts",
        "Processes of this worker's slot that have ended and been replaced, since the server started.",
        lambda it: it.restarts,
    ),
    (
        CounterMetricFamily,
        "sessions_lost",
        "Sessions that earlier processes of this worker's slot held when they died.",
        lambda it: it.sessions_lost,
    ),
)
_KNOWN_WHEN_IT_ANSWERS: Final[tuple[tuple[type[Metric], str, str, Callable[[WorkerFigures], float]], ...]] = (
    (GaugeMetricFamily, "sessions_open", "Sessions that the worker holds.", lambda it: it.sessions_open),
    (CounterMetricFamily, "sessions_created", "Sessions that began at the worker.", lambda it: it.sessions_created),
    (
        CounterMetricFamily,
        "sessions_ended",
        "Sessions that ended at the worker in an orderly way.",
        lambda it: it.sessions_ended,
    ),
    (
        CounterMetricFamily,
        "sessions_placed_elsewhere",
        "Sessions that the worker gave to another worker to begin.",
        lambda it: it.placed_elsewhere,
    ),
    (
        GaugeMetricFamily,
        "requests_in_flight",
        "Requests that the worker is handling.",
        lambda it: it.requests_in_flight,
    ),
    (
        CounterMetricFamily,
        "requests_forwarded_out",
        "Requests that the worker passed on to the worker that holds their session.",
        lambda it: it.forwarded_out,
    ),
    (
        CounterMetricFamily,
        "requests_forwarded_in",
        "Requests that other workers passed on to the worker.",
        lambda it: it.forwarded_in,
    ),
    (
        GaugeMetricFamily,
        "event_loop_lag_seconds",
        "The longest that the worker's event loop was late in about the last ten seconds.",
        lambda it: it.loop_lag_s,
    ),
    (
        GaugeMetricFamily,
        "worker_resident_memory_bytes",
        "Memory that the worker has in use (resident).",
        lambda it: it.memory_bytes,
    ),
    (
        CounterMetricFamily,
        "worker_cpu_seconds",
        "Processor time that the worker has used, user and system.",
        lambda it: it.cpu_s,
    ),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[WorkerFigures], Histogram]], ...]] = (
    (
        "request_duration_seconds",
        "From a request's arrival at its handling worker to the end of the reply.",
        lambda it: it.request_seconds,
    ),
    (
        "hop_duration_seconds",
        "From passing a request on to another worker to the end of its reply.",
        lambda it: it.hop_seconds,
    ),
)


def metrics_text(figures: ServerFigures) -> tuple[bytes, str]:
    """Return the figures as Prometheus reads them, and the content type of that text.

    Args:
        figures: The figures of one server.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FiguresCollector(figures))
    return generate_latest(registry), _CONTENT_TYPE


class _FiguresCollector(Collector):
    """Gives the figures of one moment; a registry of its own holds it for one reply."""

    def __init__(self, figures: ServerFigures) -> None:
        self._figures = figures
        self._workers = list(_labelled(figures))
        self._answering = [(worker, labels) for worker, labels in self._workers if worker.responding]

    def collect(self) -> Iterator[Metric]:
        """Yield every family of series."""
        yield from self._of_the_server()
        help_text = "When the worker's process started, in seconds since 1970."
        running = [(worker, labels) for worker, labels in self._workers if worker.pid]
        yield self._family(GaugeMetricFamily, "worker_start_time_seconds", help_text, running, lambda it: it.started_at)
        for family, name, help_text, value in _ALWAYS_KNOWN:
            yield self._family(family, name, help_text, self._workers, value)
        for family, name, help_text, value in _KNOWN_WHEN_IT_ANSWERS:
            yield self._family(family, name, help_text, self._answering, value)
        yield self._counts_by(
            "requests",
            "Requests that the worker has answered, by class of reply; none: the caller left before the reply.",
            "code",
            lambda it: {**dict.fromkeys(_CODES, 0), **it.replies},
        )
        yield self._counts_by(
            "lost_session_replies",
            "Replies of the worker that told of a lost session (410), by reason.",
            "reason",
            lambda it: {**{reason.value: 0 for reason in LostReason}, **it.lost_replies},
        )
        for name, help_text, histogram in _HISTOGRAMS:
            yield self._histogram(name, help_text, histogram)

    def _of_the_server(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("nemo_gym_server_info", "The server; always 1.", labels=("server", "kind"))
        info.add_metric((self._figures.server, self._figures.kind), 1)
        yield info
        wanted = GaugeMetricFamily("nemo_gym_workers", "Workers that the server is to have.", labels=("server",))
        wanted.add_metric((self._figures.server,), self._figures.num_workers)
        yield wanted
        lost = "Sessions lost in places that have no worker any more, since the number of workers was lowered."
        removed = CounterMetricFamily("nemo_gym_sessions_lost_with_removed_workers", lost, labels=("server",))
        removed.add_metric((self._figures.server,), self._figures.lost_with_removed)
        yield removed

    def _family(
        self,
        family: type[Metric],
        name: str,
        help_text: str,
        workers: Iterable[tuple[WorkerFigures, tuple[str, str]]],
        value: Callable[[WorkerFigures], float],
    ) -> Metric:
        assert issubclass(family, CounterMetricFamily | GaugeMetricFamily)
        metric = family(f"nemo_gym_{name}", help_text, labels=_LABELS)
        for worker, labels in workers:
            metric.add_metric(labels, float(value(worker)))
        return metric

    def _counts_by(
        self, name: str, help_text: str, label: str, counts: Callable[[WorkerFigures], Mapping[str, int]]
    ) -> Metric:
        metric = CounterMetricFamily(f"nemo_gym_{name}", help_text, labels=(*_LABELS, label))
        for worker, labels in self._answering:
            for key, count in counts(worker).items():
                metric.add_metric((*labels, key), count)
        return metric

    def _histogram(self, name: str, help_text: str, histogram: Callable[[WorkerFigures], Histogram]) -> Metric:
        metric = HistogramMetricFamily(f"nemo_gym_{name}", help_text, labels=_LABELS)
        for worker, labels in self._answering:
            it = histogram(worker)
            bounds = (*(str(float(bound)) for bound in it.bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(it.counts), strict=True))
            metric.add_metric(labels, buckets, it.sum)
        return metric


def _labelled(figures: ServerFigures) -> Iterator[tuple[WorkerFigures, tuple[str, str]]]:
    """Yield each worker with its labels; the slot alone is the name of the process that serves in it."""
    taken = Counter[int]()
    for worker in sorted(figures.workers, key=lambda it: it.state != _SERVING):
        others = taken[worker.slot]
        yield worker, (figures.server, f"{worker.slot}.{others}" if others else str(worker.slot))
        taken[worker.slot] += 1
