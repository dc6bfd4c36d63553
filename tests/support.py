"""What several tests need: applications and processes on real sockets, asked until they are ready."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import uvicorn


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty where it has ended since it was found."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@asynccontextmanager
async def serving(app: Any, *, port: int = 0, **config: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on the running event loop; yields its address.

    Args:
        app: The application.
        port: The port; a free one when 0.
        **config: Settings of uvicorn.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # As the bootstrap's socket; else each reply waits 40 ms for the client's delayed acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(("127.0.0.1", port))
        settings = {"log_config": None, "access_log": False, "lifespan": "on", "timeout_graceful_shutdown": 1, **config}
        server = _Server(uvicorn.Config(app, **settings))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            if task.done():
                await task
                raise AssertionError("the server ended before it started")
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
