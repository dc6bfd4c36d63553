"""The foreign client: sessions woven together, each request over whichever connection is free.

There are more sessions than connections. A connection that has become free takes the request of any session that
waits, chosen at random. So a session's requests change connections, and with them the workers that receive them; a
pool that hands out the connection that came back last would keep each session on one.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.load.counting import Session, SessionMaker, session_maker
from benchmarks.load.pipes import Job, Lead, serve
from benchmarks.load.wire import Connection, open_connections

_SAMPLES = 12
_MOST_LOST = 20


class Driver:
    """Runs a number of sessions over some connections.

    Args:
        make: Makes a session by its number.
        connections: The connections, all free.
        total: How many sessions to run.
        live: How many of them at once.
        seed: Of the random choices.
    """

    def __init__(
        self, make: SessionMaker, connections: Sequence[Connection], total: int, live: int, seed: int = 0
    ) -> None:
        self.latencies = array("d")
        self.right = 0
        self.lost = 0
        self.owners: Counter[str] = Counter()
        self.live_by_owner: Counter[str] = Counter()
        self.live_samples: list[dict[str, int]] = []
        self._make = make
        self._free = list(connections)
        self._total = total
        self._live = min(live, total)
        self._begun = 0
        self._ended = 0
        self._waiting: list[Session] = []
        self._parked: list[Session] = []
        self._random = random.Random(seed)
        self._part_done: asyncio.Future[None] | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._until_seeded = False
        for connection in connections:
            connection.on_reply = self._on_reply
            connection.on_lost = self._on_lost

    async def seed(self) -> None:
        """Begin all sessions that are to be live at once, and go no further with them."""
        self._until_seeded = True
        await self._go()
        self._until_seeded = False
        self._waiting, self._parked = self._parked, []

    async def run(self) -> None:
        """Run all sessions to their end."""
        await self._go()

    async def _go(self) -> None:
        self._part_done = asyncio.get_running_loop().create_future()
        while self._begun < self._live:
            self._begin()
        self._hand_out()
        await self._part_done

    def _begin(self) -> None:
        self._waiting.append(self._make(self._begun))
        self._begun += 1

    def _hand_out(self) -> None:
        waiting, free = self._waiting, self._free
        while waiting and free:
            position = int(self._random.random() * len(waiting))
            waiting[position], waiting[-1] = waiting[-1], waiting[position]
            session = waiting.pop()
            connection = free.pop()
            connection.session = session
            connection.send(session.request())

    def _on_reply(self, connection: Connection) -> None:
        self.latencies.append(time.perf_counter() - connection.sent_at)
        session: Session = connection.session
        knew_owner = session.owner is not None
        goes_on = session.answered(connection.status, connection.body, connection.cookies)
        if session.owner is not None and not knew_owner:
            self.owners[session.owner] += 1
            self.live_by_owner[session.owner] += 1
        self._free.append(connection)
        if not goes_on:
            self._end(session)
        elif self._until_seeded:
            self._parked.append(session)
            if len(self._parked) == self._live:
                self._finish_part()
        else:
            self._waiting.append(session)
        self._hand_out()

    def _end(self, session: Session) -> None:
        self._ended += 1
        self.right += session.right
        if session.owner is not None:
            self.live_by_owner[session.owner] -= 1
        if self._begun < self._total:
            self._begin()
        # Of the time in which as many are live as are to be: after the first, before the last have begun.
        if self._live < self._ended <= self._total - self._live:
            step = max(1, (self._total - 2 * self._live) // _SAMPLES)
            if self._ended % step == 0 and session.owner is not None:
                self.live_samples.append(dict(self.live_by_owner))
        if self._ended == self._total:
            self._finish_part()

    def _finish_part(self) -> None:
        if self._part_done is not None and not self._part_done.done():
            self._part_done.set_result(None)

    def _on_lost(self, connection: Connection) -> None:
        if connection in self._free:
            self._free.remove(connection)
            self._fail("the server closed an idle connection")
            return
        self.lost += 1
        session: Session = connection.session
        session.right = False
        if self.lost > _MOST_LOST:
            self._fail(f"the server closed {self.lost} connections without an answer")
            return
        self._replacing.add(replacing := asyncio.create_task(self._replace(connection)))
        replacing.add_done_callback(self._replacing.discard)
        self._end(session)

    async def _replace(self, lost: Connection) -> None:
        try:
            connection = await Connection.open(*lost.address)
        except OSError as error:
            self._fail(f"the server closed a connection, and then: {error}")
            return
        connection.on_reply, connection.on_lost = self._on_reply, self._on_lost
        self._free.append(connection)
        self._hand_out()

    def _fail(self, reason: str) -> None:
        if self._part_done is not None and not self._part_done.done():
            self._part_done.set_exception(ConnectionError(reason))


def summary(driver: Driver, seconds: float, sessions: int) -> dict[str, Any]:
    """Return what a part of the work came to."""
    latencies = sorted(driver.latencies)
    return {
        "requests": len(latencies),
        "sessions": sessions,
        "right": driver.right,
        "lost": driver.lost,
        "seconds": seconds,
        "client_cpu": time.process_time(),
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[len(latencies) * 99 // 100],
        "owners": dict(driver.owners),
        "live_samples": driver.live_samples,
    }


async def work(lead: Lead, job: Job) -> None:
    """Do a job.

    Its keys, beside those of `session_maker`: `host`, `port`; `connections`, `workers` (process ids that are to hold
    equally many; none: as they come); `sessions`, `live`, `warm_up` (sessions), `seed`; `hold`: stop when the first
    are seeded, and tell.
    """
    make = session_maker(job)
    connections = await open_connections(job["host"], job["port"], job["connections"], job.get("workers", ()))
    if job.get("warm_up"):
        await Driver(make, connections, job["warm_up"], job["live"]).run()
    driver = Driver(make, connections, job["sessions"], job["live"], job.get("seed", 0))
    await lead.go_ahead()
    if job.get("hold"):
        began = time.perf_counter()
        await driver.seed()
        lead.tell(summary(driver, time.perf_counter() - began, job["sessions"]))
        driver.latencies = array("d")
        await lead.go_ahead()
    began = time.perf_counter()
    await driver.run()
    seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    by_worker = Counter(str(connection.worker) for connection in connections)
    lead.tell({**summary(driver, seconds, job["sessions"]), "connections": dict(by_worker)})


if __name__ == "__main__":
    serve(work)
