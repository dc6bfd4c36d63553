"""Our own client: the same sessions through `ServerClient`, as an agent server calls a resources server.

More sessions are under way than requests may be open, so that a session does not get back the connection that it just
gave to the client's pool, which would spare the servers all forwarding by accident.

Where it calls the shared port of several workers, each of them holds equally many of its connections, as with the
foreign client. Left alone, one or two workers win most of them: they are woken less often, each time for more
requests, and that is the price of fewer workers and not of less routing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from benchmarks.load.counting import CounterSession
from benchmarks.load.pipes import Job, Lead, serve
from benchmarks.load.turns import let_all_run, let_only_run
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient, close_client


class ClientSession(CounterSession):
    """A session whose cookies are carried as replies give them."""

    async def play(self, client: ServerClient, name: str, turn: asyncio.Semaphore, latencies: list[float]) -> bool:
        """Run it to its end and return whether all answers were right."""
        cookies: Any = None
        goes_on = True
        while goes_on:
            path, body = self._call()
            async with turn:
                began = time.perf_counter()
                reply = await client.post(name, path, json=body, cookies=cookies)
                content = await reply.read()
                latencies.append(time.perf_counter() - began)
            if cookies is None:
                cookies = reply.cookies
            else:
                cookies.update(reply.cookies)
            goes_on = self.answered(reply.status, content, [])
        return self.right


async def open_evenly(client: ServerClient, name: str, count: int, workers: Sequence[int]) -> None:
    """Fill the client's pool with connections of which each worker holds equally many.

    All workers but one are stopped for a moment, so that this one accepts. Requests that wait at the stopped ones
    keep the connections opened before from being used again.
    """
    share = -(-count // len(workers))
    calls: set[asyncio.Task[None]] = set()

    async def call() -> None:
        await (await client.get(name, "/health")).read()

    try:
        for number, accepting in enumerate(workers):
            await let_only_run(accepting, workers)
            calls |= {asyncio.create_task(call()) for _ in range(2 * share if number else share)}
            while len(waiting := {one for one in calls if not one.done()}) > number * share:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        let_all_run(workers)
    await asyncio.gather(*calls)


async def work(lead: Lead, job: Job) -> None:
    """Do a job.

    Its keys: `config`, `name`, `straight_to_owner`; `sessions`, `live`, `connections`, `warm_up` (sessions);
    `workers` (process ids of those that accept connections, if there are several to spread them over).
    """
    config = OmegaConf.create(job["config"])
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=0),
        global_config_dict=config,
        straight_to_owner=job["straight_to_owner"],
    )
    latencies: list[float] = []
    turn = asyncio.Semaphore(job["connections"])
    if len(job["workers"]) > 1 and not job["straight_to_owner"]:
        lead.when_abandoned = lambda: let_all_run(job["workers"])
        await open_evenly(client, job["name"], job["connections"], job["workers"])

    async def play(count: int) -> int:
        numbers = iter(range(count))

        async def one_by_one() -> int:
            return sum(
                [await ClientSession("", number).play(client, job["name"], turn, latencies) for number in numbers]
            )

        return sum(await asyncio.gather(*(one_by_one() for _ in range(job["live"]))))

    await play(job["warm_up"])
    latencies.clear()
    await lead.go_ahead()
    began = time.perf_counter()
    right = await play(job["sessions"])
    seconds = time.perf_counter() - began
    await close_client()
    latencies.sort()
    lead.tell(
        {
            "requests": len(latencies),
            "sessions": job["sessions"],
            "right": right,
            "seconds": seconds,
            "client_cpu": time.process_time(),
            "p50_ms": 1000 * latencies[len(latencies) // 2],
            "p99_ms": 1000 * latencies[len(latencies) * 99 // 100],
        }
    )


if __name__ == "__main__":
    serve(work)
