"""The figures of all workers, put together by whichever is asked: `GET /workers`, and `GET /metrics` for Prometheus.

The worker that is asked asks its fellows, all at once, at their private sockets. One that does not answer within
`PATIENCE_S`, be it frozen or blocked, is shown as not responding and holds up nobody for longer. What only the main
process knows is added from its file (see `worker_slots`).

Figures are no secret among those who can reach a loopback address, and nobody else's business: on other addresses both
paths answer 404 unless the configuration says `expose_figures`. The private sockets always answer: only processes of
this user reach them.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from fastapi import FastAPI
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.lazy_module import LazyModule
from nemo_gym.server.figures import HIDDEN, ServerFigures, WorkerFigures
from nemo_gym.server.host_header import is_loopback
from nemo_gym.server.recorder import FIGURES_PATH, FIGURES_PATHS, METRICS_PATH, Recorder, RecorderMiddleware, recording
from nemo_gym.server.worker_slots import WorkerRecord, WorkerRecords
from nemo_gym.session_routing import route_path, worker_socket_path
from nemo_gym.session_routing.hop import STRAIGHT_KEY
from nemo_gym.session_routing.ownership import is_worker_id
from nemo_gym.session_routing.private_socket import PrivateServer, is_own_socket

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = LazyModule("aiohttp")

PATIENCE_S: Final = 1.0
"""Seconds that a fellow has to answer."""

_ONLY_SELF: Final = "self"
_GRACE_S: Final = 1
_ASK: Final = f"http://localhost{FIGURES_PATH}?only={_ONLY_SELF}"
_METRICS_MODULE: Final = "nemo_gym.server.prometheus"
_STATES: Final = ("leaving", "serving", "starting", "ended")

logger = logging.getLogger(__name__)


class Fellows:
    """This worker and its fellows.

    Args:
        recorder: This worker's figures.
        server: The server's name in the configuration.
        kind: Which kind of server it is.
        socket_dir: The directory of the workers' sockets; None where this is the only worker.
        is_exposed: Whether the shared port answers.
        left_out: Paths that the application answers itself at the shared port.
        patience_s: Seconds that a fellow has to answer.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        server: str,
        kind: str,
        socket_dir: Path | None = None,
        is_exposed: bool = True,
        left_out: Collection[str] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._left_out = left_out
        self._patience_s = patience_s
        self._recorder = recorder
        self._server = server
        self._kind = kind
        self._socket_dir = socket_dir
        self._is_exposed = is_exposed

    @property
    def worker_id(self) -> str:
        """This worker."""
        return self._recorder.worker_id

    async def answer(self, scope: Scope) -> Response | None:
        """Return the reply to a request for figures; None where a request is for none."""
        path = route_path(scope)
        if path not in FIGURES_PATHS or (path in self._left_out and STRAIGHT_KEY not in scope):
            return None
        if not self._is_exposed and STRAIGHT_KEY not in scope:
            return _json(404, {"detail": HIDDEN})
        if path == METRICS_PATH:
            return await _metrics(await self.figures())
        if _asks_for_self(scope):
            return _json(200, self._recorder.figures().to_json())
        return _json(200, (await self.figures()).to_json())

    async def figures(self) -> ServerFigures:
        """Ask all workers."""
        at = time.time()
        records, sockets = await asyncio.to_thread(self._look)
        # Taken now, for a silent fellow makes the rest take a second, and counts are of the time `at`.
        own = self._recorder.figures()
        answers = await asyncio.gather(*(_ask(path, self._patience_s) for path in sockets))
        workers = [worker for worker in (*answers, own) if worker is not None]
        return ServerFigures(
            server=self._server,
            kind=self._kind,
            at=at,
            num_workers=records.num_workers if records else len(workers),
            workers=_merged(workers, records.workers if records else ()),
            answered_by=own.worker_id,
            lost_with_removed=records.lost_with_removed if records else 0,
        )

    async def answer_alone(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for this worker, as an ASGI application that does nothing else."""
        asked = scope["type"] == "http" and scope["path"] == FIGURES_PATH
        reply = _json(200, self._recorder.figures().to_json()) if asked else _json(404, {"detail": "Not Found"})
        await reply(scope, receive, send)

    def _look(self) -> tuple[WorkerRecords | None, list[Path]]:
        """Return what the main process tells, and the sockets of the others."""
        if self._socket_dir is None:
            return None, []
        own = worker_socket_path(self._socket_dir, self._recorder.worker_id)
        try:
            found = [path for path in self._socket_dir.iterdir() if is_worker_id(path.name) and path != own]
        except OSError:
            found = []
        return WorkerRecords.read(self._socket_dir), [path for path in found if is_own_socket(path)]


def install_figures(
    app: FastAPI, recorder: Recorder, config: BaseRunServerInstanceConfig, kind: str, *, serves_socket: bool
) -> None:
    """Have a finished application's figures taken and shown; to be called before it gets its router.

    With that, handlers whose client has gone away are cancelled, too: see `RecorderMiddleware`.

    A route of its own at one of the paths stays what it is.

    Args:
        app: The application.
        recorder: Takes the figures.
        config: The server's settings.
        kind: Which kind of server it is.
        serves_socket: Whether there is to be a private socket for this alone, as no router makes one.
    """
    left_out = frozenset(
        path for route in app.routes if (path := getattr(route, "path", "")) in FIGURES_PATHS and _takes_get(route)
    )
    for path in left_out:
        logger.info("%s has a route GET %s of its own, which stays; figures are not shown there", config.name, path)
    fellows = Fellows(
        recorder,
        server=config.name,
        kind=kind,
        socket_dir=recorder.socket_dir,
        is_exposed=is_loopback(config.host) if config.expose_figures is None else config.expose_figures,
        left_out=left_out,
    )
    app.add_middleware(RecorderMiddleware, recorder=recorder, answer=fellows.answer)
    if serves_socket and recorder.socket_dir is not None:
        path = worker_socket_path(recorder.socket_dir, recorder.worker_id)
        app.router.lifespan_context = _serving_alone(app.router.lifespan_context, fellows, path)
    app.router.lifespan_context = recording(app.router.lifespan_context, recorder)


def _takes_get(route: object) -> bool:
    return "GET" in (getattr(route, "methods", None) or ())


def _serving_alone(
    inner: Callable[[Any], AbstractAsyncContextManager[Any]], fellows: Fellows, path: Path
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return the lifespan `inner` with a private server within it that answers for this worker's figures alone.

    Args:
        inner: The application's lifespan.
        fellows: Has the figures.
        path: The private server's socket.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            private = PrivateServer(fellows.answer_alone, path, state={}, grace=_GRACE_S)
            await private.start()
            try:
                yield state
            finally:
                await private.stop()

    return lifespan


async def _ask(path: Path, patience_s: float) -> WorkerFigures | None:
    """Return what a fellow says; None where it says nothing in time."""
    connector = aiohttp.UnixConnector(path=str(path))
    limit = aiohttp.ClientTimeout(total=patience_s)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session, session.get(_ASK) as reply:
            if reply.status != 200:
                return None
            return WorkerFigures.from_json(orjson.loads(await reply.read()))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def _merged(workers: list[WorkerFigures], records: tuple[WorkerRecord, ...]) -> tuple[WorkerFigures, ...]:
    """Return a row for each worker that runs, by slot; one that the main process has not told of yet comes last."""
    known = {record.pid for record in records}
    rows = []
    for record in records:
        found = next((worker for worker in workers if worker.pid == record.pid), WorkerFigures(responding=False))
        rows.append(
            replace(
                found,
                slot=record.slot,
                pid=record.pid,
                started_at=record.started_at,
                restarts=record.restarts,
                last_exit=record.last_exit,
                state=record.state,
                sessions_lost=record.sessions_lost,
                deaths=record.deaths,
            )
        )
    rows.sort(key=lambda row: (row.slot, _STATES.index(row.state), row.started_at))
    first = max((row.slot for row in rows), default=-1) + 1
    others = [worker for worker in workers if worker.pid not in known]
    others.sort(key=lambda worker: (worker.started_at, worker.worker_id))
    return (*rows, *(replace(worker, slot=slot) for slot, worker in enumerate(others, first)))


async def _metrics(figures: ServerFigures) -> Response:
    # In a thread, for the first one has to import it.
    try:
        content, media_type = await asyncio.to_thread(_metrics_text, figures)
    except ImportError as error:
        return _json(501, {"detail": f"{METRICS_PATH} needs a package that is not installed: {error.name}"})
    return Response(content, headers={"content-type": media_type})


def _metrics_text(figures: ServerFigures) -> tuple[bytes, str]:
    text: tuple[bytes, str] = importlib.import_module(_METRICS_MODULE).metrics_text(figures)
    return text


def _asks_for_self(scope: Scope) -> bool:
    return QueryParams(scope["query_string"]).get("only") == _ONLY_SELF


def _json(status: int, content: Any) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
