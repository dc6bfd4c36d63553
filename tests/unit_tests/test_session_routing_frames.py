"""What only the hop in frames can get wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from nemo_gym.session_routing import worker_socket_path
from nemo_gym.session_routing.frame_hop import FrameHop
from tests.session_workers import make_app, owned_cookie, running_workers

MEGABYTE = 2**20


class Client:
    """A client that waits for its reply."""

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        raise AssertionError(message)


@asynccontextmanager
async def silent_owner(path: Path) -> AsyncIterator[FrameHop]:
    """Yield the hop to an owner that takes connections and no more."""
    connections = []
    server = await asyncio.start_unix_server(lambda _, writer: connections.append(writer), path, backlog=1000)
    hop = FrameHop(path)
    try:
        yield hop
    finally:
        await hop.close()
        server.close()
        for writer in connections:
            writer.close()


@pytest.mark.promise("nothing-left-behind")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_that_is_cancelled_while_it_connects_leaves_nothing(
    socket_dir: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    scope = {"method": "GET", "raw_path": b"/", "query_string": b"", "headers": []}

    async def cancelled_at_each_turn() -> int:
        clients = []
        async with silent_owner(worker_socket_path(socket_dir, "f" * 32)) as hop:
            for turns in [*range(8)] * 3:
                client = Client()
                clients.append(weakref.ref(client))
                task = asyncio.create_task(hop.forward(scope, client.receive, client.send))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            del client, task
            # The loop's own last words to what was closed.
            for _ in range(3):
                await asyncio.sleep(0)
            gc.collect()
            return sum(client() is not None for client in clients)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(cancelled_at_each_turn()) == 0


@pytest.mark.promise("request-unchanged", "large-reply-headers")
async def test_heads_of_megabytes_pass_and_longer_ones_are_refused(socket_dir: Path) -> None:
    async def repeat(request: Request) -> Response:
        return Response(headers={"x-long": request.headers["x-long"] * int(request.query_params["times"])})

    async with running_workers(socket_dir, 2, lambda: make_app(Route("/repeat", repeat)), hop="frames") as workers:
        here, there = workers
        statuses = []
        for megabytes, times in ((3, 1), (5, 1), (3, 2), (3, 1)):
            headers = [("x-long", "x" * megabytes * MEGABYTE)]
            cookie = owned_cookie(there.worker_id)
            reply = await here.request(f"/repeat?times={times}", headers=headers, cookie=cookie)
            statuses.append(reply.status)
            if reply.status == 200:
                assert reply.all("x-long") == ["x" * megabytes * MEGABYTE]
            elif reply.status == 431:
                assert "at most 4194304 pass" in reply.json()["detail"]
    assert statuses == [200, 431, 500, 200]
