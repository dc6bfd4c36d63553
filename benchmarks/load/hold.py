"""Many slow requests, open at once, each of a session of its own and on another connection than its seed."""

from __future__ import annotations

import asyncio
import json

from benchmarks.load.pipes import Job, Lead, serve
from benchmarks.load.wire import Connection, json_bytes, post, take_cookies

_AT_ONCE = 50
_ROW = {"responses_create_params": {"input": "none"}}


async def work(lead: Lead, job: Job) -> None:
    """Do a job: `requests`, `slow_s`. It tells when all requests are open, and then when all are answered."""
    host = f"{job['host']}:{job['port']}"
    connections: list[Connection] = []
    turn = asyncio.Semaphore(_AT_ONCE)

    async def seed(number: int) -> dict[bytes, bytes]:
        async with turn:
            connection = await Connection.open(job["host"], job["port"])
            await connection.ask(post(host, "/seed_session", json_bytes({**_ROW, "initial_count": number})))
        connections.append(connection)
        jar: dict[bytes, bytes] = {}
        take_cookies(jar, connection.cookies)
        return jar

    jars = await asyncio.gather(*(seed(number) for number in range(job["requests"])))
    # By a step that leads all over the list: a session is not to come back where it began.
    moved = [connections[(7 * number + 3) % len(connections)] for number in range(len(connections))]
    if len(set(map(id, moved))) != len(connections):
        moved = connections[1:] + connections[:1]
    await lead.go_ahead()

    async def ask(number: int) -> bool:
        connection = moved[number]
        await connection.ask(post(host, f"/slow?seconds={job['slow_s']}", b"", jars[number]))
        return connection.status == 200 and json.loads(connection.body) == {"count": number}

    asked = [asyncio.create_task(ask(number)) for number in range(len(moved))]
    await asyncio.sleep(0)
    lead.tell({"open": len(asked)})
    right = sum(await asyncio.gather(*asked))
    lead.tell({"requests": len(asked), "right": right})


if __name__ == "__main__":
    serve(work)
