"""Server-sent events, one stream at a time: when the first one comes, and how long each is under way."""

from __future__ import annotations

import re
import statistics
import time
from itertools import pairwise
from typing import Final

from benchmarks.load.lines import Session
from benchmarks.load.pipes import Job, Lead, serve

_EVENT: Final = re.compile(rb"data: (\d+)\n\n")


async def work(lead: Lead, job: Job) -> None:
    """Do a job: `way`, `streams`, `events` (per stream), `interval_ms`."""
    session = Session(job["host"], job["port"], job["workers"], job["way"])
    request = session.get(f"/events?count={job['events']}&interval_ms={job['interval_ms']}")
    for _ in range(job["warm_up"]):
        _stream(session, request, job["events"])
    await lead.go_ahead()
    began = time.perf_counter()
    streams = [_stream(session, request, job["events"]) for _ in range(job["streams"])]
    seconds = time.perf_counter() - began
    gaps = [gap for _, _, of_stream in streams for gap in of_stream]
    lead.tell(
        {
            "requests": len(streams),
            "seconds": seconds,
            "first_ms": statistics.median(first for first, _, _ in streams),
            "under_way_ms": statistics.median(delay for _, delays, _ in streams for delay in delays),
            "gap_ms": statistics.median(gaps),
            "longest_gap_ms": max(gaps),
        }
    )


def _stream(session: Session, request: bytes, events: int) -> tuple[float, list[float], list[float]]:
    """Return, in ms: after the request, when the first event came; how long each was under way; the gaps between."""
    line = session.line
    sent = time.monotonic_ns()
    line.sock.sendall(request)
    data, seen = b"", 0
    arrivals: list[int] = []
    delays: list[float] = []
    # A stream has no length, so it comes in chunks; the last one is empty.
    while not data.endswith(b"0\r\n\r\n"):
        data += line.receive()
        arrived = time.monotonic_ns()
        while found := _EVENT.search(data, seen):
            seen = found.end()
            arrivals.append(arrived)
            delays.append((arrived - int(found[1])) / 1e6)
    if len(arrivals) != events or not data.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"{len(arrivals)} of {events} events came: {data[:200]!r}")
    gaps = [(later - earlier) / 1e6 for earlier, later in pairwise(arrivals)]
    return (arrivals[0] - sent) / 1e6, delays, gaps


if __name__ == "__main__":
    serve(work)
