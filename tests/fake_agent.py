"""An agent server that does as its rows say, served by uvicorn in a thread of the test's process.

A row's `behaviours` lists what becomes of its first, second, ... attempt (the last one repeats): `ok`, `hold`
(answer when released), `broken` (the connection closes in mid-answer), `text:...` (answer these bytes), a status such
as `410`, or an object that is answered as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from omegaconf import DictConfig, OmegaConf
from starlette.types import Receive, Scope, Send

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.metrics import compute_aggregate_metrics

WAIT_LIMIT_S = 60


class FakeAgent:
    """What the agent was asked, and how many requests it has in hand."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.calls: list[dict[str, Any]] = []
        self.aggregated: list[dict[str, Any]] = []
        self.rollout_ids: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._changed = threading.Condition()
        self._released = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def config(self, *names: str) -> DictConfig:
        """A configuration in which this server is the agent of each of the names."""
        address = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        return OmegaConf.create(
            {
                "head_server": {"host": "127.0.0.1", "port": 1},
                **{name: {"responses_api_agents": {"fake_agent": address}} for name in names or ("agent",)},
            }
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this object's counts holds."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_LIMIT_S), "the condition did not come true"

    async def until(self, condition: Callable[[], bool]) -> None:
        """As `wait_until`, from an event loop."""
        await asyncio.to_thread(self.wait_until, condition)

    def release(self) -> None:
        """Answer every held request, those to come as well."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._released.set)

    async def forget(self) -> None:
        """Answer what is held, and begin anew for the next test."""
        self.release()
        await self.until(lambda: self.in_flight == 0)
        self._released = asyncio.Event()
        self.calls.clear()
        self.aggregated.clear()
        self.rollout_ids.clear()
        self.most_in_flight = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/run")
        async def run(request: Request) -> Response:
            row = orjson.loads(await request.body())
            self._loop = asyncio.get_running_loop()
            self.rollout_ids.append(request.headers.get("nemo-gym-rollout"))
            self._count(row)
            try:
                return await self._answer(row)
            finally:
                self._count(None)

        @app.post("/aggregate_metrics")
        async def aggregate_metrics(body: AggregateMetricsRequest) -> AggregateMetrics:
            self.aggregated.extend(body.verify_responses)
            return compute_aggregate_metrics(body.verify_responses)

        return app

    def _count(self, row: dict[str, Any] | None) -> None:
        with self._changed:
            if row is None:
                self.in_flight -= 1
            else:
                self.calls.append(row)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()

    async def _answer(self, row: dict[str, Any]) -> Response:
        behaviours = row.get("behaviours", ["ok"])
        behaviour = behaviours[min(row["_ng_attempt_index"], len(behaviours) - 1)]
        if behaviour == "broken":
            return BrokenResponse()
        if behaviour == "hold":
            await self._released.wait()
        elif isinstance(behaviour, str) and behaviour.startswith("text:"):
            return Response(behaviour.removeprefix("text:"), media_type="application/json")
        elif isinstance(behaviour, int):
            return json_response({"detail": f"said {behaviour}"}, behaviour)
        elif behaviour != "ok":
            return json_response(behaviour)
        usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        output = [
            {"type": "function_call", "name": "a", "call_id": "1", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "1"},
            {"type": "message", "role": "assistant", "content": []},
        ]
        return json_response({**row, "response": {"output": output, "usage": usage}, "reward": row.get("reward", 1.0)})


class BrokenResponse(Response):
    """Promises a hundred bytes and sends one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"{"})


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


@contextlib.contextmanager
def running_fake_agent() -> Iterator[FakeAgent]:
    """Serve a fake agent on a free port."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        agent = FakeAgent(listener.getsockname()[1])
        server = uvicorn.Server(uvicorn.Config(agent.app(), log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield agent
        finally:
            agent.release()
            server.should_exit = True
            thread.join(WAIT_LIMIT_S)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; none where there is no file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
