"""An environment that shows which process answers, whose state it has, and how bodies stream.

It is as careless as an environment may be: a session that it does not know has the number 0, so that a request which
missed its worker is answered wrongly and not refused.
"""

import asyncio
import multiprocessing
import os
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import PrivateAttr

from nemo_gym.base_resources_server import (
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint

MEGABYTE = bytes(range(256)) * 4096


class ProbeSeedSessionRequest(BaseSeedSessionRequest):
    """The number that the session keeps."""

    number: int


class SessionProbe(SimpleResourcesServer):
    """Keeps a number per session."""

    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)
    _children: list[multiprocessing.process.BaseProcess] = PrivateAttr(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        """Return the application with the probing routes."""
        app = super().setup_webserver()
        app.get("/worker")(self.worker)
        app.get("/routing")(self.routing)
        app.get("/number")(self.number)
        app.post("/add")(self.add)
        app.post("/add_slowly")(self.add_slowly)
        app.post("/fork")(self.fork)
        app.post("/upload")(self.upload)
        app.get("/download")(self.download)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: ProbeSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        """Keep the number."""
        self._numbers[request.session[SESSION_ID_KEY]] = body.number
        return BaseSeedSessionResponse()

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Give full marks; nobody asks."""
        return BaseVerifyResponse(**dict(body), reward=1.0)

    async def worker(self) -> dict[str, int]:
        """Tell which process answers."""
        return {"pid": os.getpid()}

    async def routing(self, request: Request) -> dict[str, Any]:
        """Tell what this worker has done with what came to it."""
        return asdict(request.app.state.session_routing.statistics())

    async def number(self, request: Request) -> dict[str, int]:
        """Read the session's number."""
        return {"number": self._number_of(request), "pid": os.getpid()}

    async def add(self, request: Request, amount: int) -> dict[str, int]:
        """Add to the session's number."""
        self._numbers[request.session[SESSION_ID_KEY]] = self._number_of(request) + amount
        return await self.number(request)

    async def add_slowly(self, request: Request, amount: int, seconds: float) -> StreamingResponse:
        """Say at once that the work has begun, and what came of it when it is done."""

        async def lines() -> AsyncIterator[str]:
            yield "begun\n"
            await asyncio.sleep(seconds)
            yield f"{(await self.add(request, amount))['number']}\n"

        return StreamingResponse(lines(), media_type="text/plain")

    async def fork(self) -> dict[str, int | None]:
        """Fork a process that does nothing for long, as a pool of processes does between two tasks."""
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        self._children.append(child)
        return {"pid": child.pid}

    async def upload(self, request: Request, pause: float) -> dict[str, int]:
        """Read a body of any size, after a pause in which nothing is read."""
        await asyncio.sleep(pause)
        size = checksum = 0
        async for part in request.stream():
            size += len(part)
            checksum = zlib.crc32(part, checksum)
        return {"size": size, "checksum": checksum, "pid": os.getpid()}

    async def download(self, megabytes: int) -> StreamingResponse:
        """Send a body of any size, as fast as it is taken."""

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(megabytes):
                yield MEGABYTE

        return StreamingResponse(parts(), headers={"x-pid": str(os.getpid())})

    def _number_of(self, request: Request) -> int:
        return self._numbers.get(request.session[SESSION_ID_KEY], 0)


if __name__ == "__main__":
    SessionProbe.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = SessionProbe.run_webserver()
