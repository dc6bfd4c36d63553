"""Looks at all servers of a deployment again and again, and puts what it sees into one JSON document.

Each server is asked by a task of its own: one that hangs keeps nobody else's figures back. While nobody looks at the
page, the servers are asked seldom, only so that there is a history.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import orjson
from starlette.routing import BaseRoute

from nemo_gym.config_types import ServerInstance
from nemo_gym.dashboard.asking import NoAnswerError, NoFiguresError, ask_server
from nemo_gym.dashboard.history import History
from nemo_gym.dashboard.pages import dashboard_routes
from nemo_gym.dashboard.watch import Event, ServerWatch
from nemo_gym.deployment import Deployment
from nemo_gym.deployment.diagnosis import Finding, Severity
from nemo_gym.rollouts.progress_record import RunProgress, read_runs

LOOKED_AT_S: Final = 1.5
"""Seconds between two looks while somebody has the page open."""
UNSEEN_S: Final = 10.0
"""Seconds between two looks while nobody has."""
SEEN_FOR_S: Final = 60.0
"""How long after the last request the page counts as open."""
LONGEST_WAIT_S: Final = 0.75
"""How long a look waits for the servers; who answers later is in the next."""
KEPT_EVENTS: Final = 100
SHOWN_RUNS: Final = 10

logger = logging.getLogger(__name__)


class Board:
    """What the dashboard shows, kept up to date by `run`.

    Args:
        instances: The servers.
        head_url: The deployment's head server.
        working_dir: The folder in which the deployment was started.
    """

    def __init__(self, instances: Iterable[ServerInstance], head_url: str, working_dir: Path) -> None:
        self._started_at = round(time.time(), 1)
        self._deployment = {
            "id": secrets.token_hex(8),
            "head_url": head_url,
            "working_dir": str(working_dir),
            "started_at": self._started_at,
        }
        self._history = History()
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._watches = [ServerWatch(instance, self._events.append) for instance in instances]
        self._runs: list[RunProgress] = []
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._generation = 0
        self._document = b""
        self._seen_at = -SEEN_FOR_S
        self._seen = asyncio.Event()
        self._publish(time.time())

    @property
    def has_seen_all(self) -> bool:
        """Whether every server has answered once."""
        return all(watch.state != "starting" for watch in self._watches)

    def look(self) -> tuple[str, bytes]:
        """Return the newest document, JSON, and its entity tag; someone is taken to look for the next minute."""
        self._seen_at = time.monotonic()
        self._seen.set()
        return f'"{self._deployment["id"]}-{self._generation}"', self._document

    async def run(self) -> None:
        """Look at the servers until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                while True:
                    try:
                        await self._look_once(session)
                    except Exception:  # the outermost boundary: one bad look is not the last
                        logger.exception("the dashboard could not be brought up to date")
                    await self._pause()
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _pause(self) -> None:
        if not self.has_seen_all or time.monotonic() - self._seen_at < SEEN_FOR_S:
            await asyncio.sleep(LOOKED_AT_S)
            return
        self._seen.clear()
        try:
            async with asyncio.timeout(UNSEEN_S):
                await self._seen.wait()
        except TimeoutError:
            pass

    async def _look_once(self, session: aiohttp.ClientSession) -> None:
        for watch in self._watches:
            self._begin(watch.instance.name, partial(self._ask, session, watch))
        self._begin("", self._read_runs)
        await asyncio.wait(self._asking.values(), timeout=LONGEST_WAIT_S)
        at = time.time()
        samples = {watch.instance.name: watch.sample() for watch in self._watches}
        self._history.add(at, {name: sample for name, sample in samples.items() if sample is not None})
        self._publish(at)

    def _begin(self, name: str, ask: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self._asking.get(name)
        if task is not None and not task.done():
            return
        if task is not None and (error := task.exception()) is not None:
            logger.error("the dashboard could not look at %s", name or "the runs", exc_info=error)
        self._asking[name] = asyncio.create_task(ask())

    async def _ask(self, session: aiohttp.ClientSession, watch: ServerWatch) -> None:
        try:
            figures = await ask_server(session, watch.instance.url)
        except NoFiguresError:
            watch.answered_without_figures(time.time())
        except NoAnswerError as error:
            watch.failed(time.time(), str(error))
        else:
            if figures.server == watch.instance.name:
                watch.answered(time.time(), figures)
            else:  # a route of the server's own
                watch.answered_without_figures(time.time())

    async def _read_runs(self) -> None:
        self._runs = await asyncio.to_thread(read_runs)

    def _publish(self, at: float) -> None:
        found = [finding for watch in self._watches for finding in watch.findings()]
        document = {
            "deployment": self._deployment,
            "at": round(at, 1),
            "findings": [asdict(finding) for finding in sorted(found, key=_badness)],
            "events": [asdict(event) for event in reversed(self._events)],
            "servers": [watch.to_json() for watch in self._watches],
            "history": self._history.to_json(),
            "runs": [run.to_json() for run in self._shown_runs()],
        }
        # A number that is none in JSON (an infinite reward, say) becomes null.
        self._document = orjson.dumps(document)
        self._generation += 1

    def _shown_runs(self) -> list[RunProgress]:
        """Return the runs that use this deployment, those that go on first, then the newest."""
        own = [
            run
            for run in self._runs
            if run.head_url in (None, self._deployment["head_url"])
            and (run.finished is None or run.updated_at >= self._started_at)
        ]
        own.sort(key=lambda run: (run.finished is None, run.started_at), reverse=True)
        return own[:SHOWN_RUNS]


def _badness(finding: Finding) -> int:
    return list(Severity).index(finding.severity)


@asynccontextmanager
async def running_dashboard(deployment: Deployment) -> AsyncIterator[list[BaseRoute]]:
    """Look at the servers of a deployment while the context is open; gives the routes of its dashboard."""
    board = Board(deployment.config.instances.values(), deployment.head_url, deployment.working_dir)
    looking = asyncio.create_task(board.run())
    try:
        yield dashboard_routes(board.look)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
