"""The counter with routes for bodies of any size, for streams and for slow requests."""

import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

PART = bytes(range(256)) * 1024


class LoadProbe(StatefulCounterResourcesServer):
    """Takes and gives what the benchmarks ask for."""

    def setup_webserver(self) -> FastAPI:
        """Return the application with the probing routes."""
        app = super().setup_webserver()
        app.get("/pid")(self.pid)
        app.post("/upload")(self.upload)
        app.get("/download")(self.download)
        app.get("/events")(self.events)
        app.post("/slow")(self.slow)
        return app

    async def pid(self) -> dict[str, int]:
        """Tell which process answers."""
        return {"pid": os.getpid()}

    async def upload(self, request: Request, checksum: bool = False) -> dict[str, int]:
        """Read a body, and tell its size; the checksum, which would cost more than all else, only when asked."""
        size = crc = 0
        async for part in request.stream():
            size += len(part)
            if checksum:
                crc = zlib.crc32(part, crc)
        return {"size": size, "crc": crc}

    async def download(self, size: int) -> StreamingResponse:
        """Send a body, in parts."""

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, size, len(PART)):
                yield PART[: size - start]

        return StreamingResponse(parts(), headers={"content-length": str(size)})

    async def events(self, count: int, interval_ms: float) -> StreamingResponse:
        """Send server-sent events, each with the time at which it is sent."""

        async def parts() -> AsyncIterator[bytes]:
            for number in range(count):
                if number:
                    await asyncio.sleep(interval_ms / 1000)
                yield b"data: %d\n\n" % time.monotonic_ns()

        return StreamingResponse(parts(), media_type="text/event-stream")

    async def slow(self, request: Request, seconds: float) -> dict[str, int]:
        """Answer late, with the session's count."""
        await asyncio.sleep(seconds)
        return {"count": self._count_of(request)}


if __name__ == "__main__":
    LoadProbe.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = LoadProbe.run_webserver()
