"""The counter as one would write it without any framework: FastAPI, Starlette's signed session cookie, a dict.

Run it as `python -m benchmarks.apps.bare_counter PORT WORKERS`. With several workers it answers wrongly, as sessions
stay with nobody, but it does the same work: a session that it does not know has the count 0.
"""

from __future__ import annotations

import socket
import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.sessions import SessionMiddleware
from uvicorn.supervisors import Multiprocess

KEEP_ALIVE_S = 75

app = FastAPI()
app.add_middleware(SessionMiddleware, secret_key="of the bare counter", session_cookie="bare_counter")
counters: dict[str, int] = {}


class Seed(BaseModel):
    """Where the counter starts."""

    responses_create_params: dict[str, Any]
    initial_count: int


class Increment(BaseModel):
    """What to add."""

    count: int


class Incremented(BaseModel):
    """That it was added."""

    success: bool


class Verify(BaseModel):
    """The finished rollout."""

    responses_create_params: dict[str, Any]
    response: dict[str, Any]
    expected_count: int


class Verified(Verify):
    """The verdict."""

    reward: float
    final_count: int


def session_id(request: Request) -> str:
    """Return the session's id; a session begins without one."""
    found: str = request.session.setdefault("session_id", uuid4().hex)
    return found


@app.get("/health")
async def health() -> dict[str, str]:
    """Answer."""
    return {"status": "ok"}


@app.post("/seed_session")
async def seed_session(request: Request, body: Seed) -> dict[str, str]:
    """Set the counter."""
    counters[session_id(request)] = body.initial_count
    return {}


@app.post("/increment_counter")
async def increment_counter(request: Request, body: Increment) -> Incremented:
    """Add to it."""
    session = session_id(request)
    counters[session] = counters.get(session, 0) + body.count
    return Incremented(success=True)


@app.post("/verify")
async def verify(request: Request, body: Verify) -> Verified:
    """Compare it."""
    count = counters.get(session_id(request), 0)
    return Verified(**dict(body), reward=float(count == body.expected_count), final_count=count)


def main(port: int, workers: int) -> None:
    """Serve."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # As our own servers do: uvicorn's workers would otherwise wait for delayed acknowledgements.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind(("127.0.0.1", port))
    sock.set_inheritable(True)
    config = uvicorn.Config(
        "benchmarks.apps.bare_counter:app",
        workers=workers,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        proxy_headers=False,
    )
    if workers == 1:
        uvicorn.Server(config).run(sockets=[sock])
    else:
        Multiprocess(config, sockets=[sock]).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
