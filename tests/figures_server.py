"""A server that answers with the figures that a test makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_gym.config_types import ServerInstance
from nemo_gym.server.figures import ServerFigures, WorkerFigures


class FiguresServer:
    """Answers what a test tells it to."""

    def __init__(self, name: str = "counter", workers: int = 2) -> None:
        self.figures = ServerFigures(
            server=name,
            kind="resources_servers",
            at=1000.0,
            num_workers=workers,
            workers=tuple(worker(slot) for slot in range(workers)),
        )
        self.reply: Callable[[], Response] = lambda: JSONResponse(self.figures.to_json())
        self.health = 200
        self.free = asyncio.Event()
        self.free.set()
        self.app = Starlette(routes=[Route("/workers", self.workers), Route("/health", self.answer_health)])

    async def workers(self, request: Request) -> Response:
        await self.free.wait()
        return self.reply()

    async def answer_health(self, request: Request) -> Response:
        return Response(status_code=self.health)

    def change(self, slot: int, **values: Any) -> None:
        """Change a worker, half a minute later."""
        workers = list(self.figures.workers)
        workers[slot] = replace(workers[slot], **values)
        self.figures = replace(self.figures, at=self.figures.at + 30, workers=tuple(workers))


def worker(slot: int) -> WorkerFigures:
    return WorkerFigures(worker_id=f"id{slot}", slot=slot, pid=100 + slot, started_at=900.0)


def instance(name: str, url: str, workers: int = 2) -> ServerInstance:
    host, _, port = url.removeprefix("http://").partition(":")
    return ServerInstance(
        name=name,
        kind="resources_servers",
        implementation="example",
        entrypoint="app.py",
        host=host,
        port=int(port),
        num_workers=workers,
        folder=Path(),
        settings={},
    )
