"""Bodies up and down through our own client."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import Any

from omegaconf import OmegaConf

from benchmarks.load.bulk import body_of
from benchmarks.load.pipes import Job, Lead, serve
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient, close_client


async def work(lead: Lead, job: Job) -> None:
    """Do a job: `config`, `name`, `straight_to_owner`, `direction`, `size`, `count` (per connection), `connections`."""
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=0),
        global_config_dict=OmegaConf.create(job["config"]),
        straight_to_owner=job["straight_to_owner"],
    )
    name, size, upload = job["name"], job["size"], job["direction"] == "up"
    body = body_of(size)

    async def cookies_of_a_session() -> Any:
        row = {"responses_create_params": {"input": "none"}, "initial_count": 0}
        reply = await client.post(name, "/seed_session", json=row)
        await reply.read()
        return reply.cookies

    async def check(cookies: Any) -> None:
        if upload:
            reply = await client.post(name, "/upload", params={"checksum": "true"}, data=body, cookies=cookies)
            right = await reply.json() == {"size": size, "crc": zlib.crc32(body)}
        else:
            reply = await client.get(name, "/download", params={"size": size}, cookies=cookies)
            right = await reply.read() == body
        if reply.status != 200 or not right:
            raise ValueError(f"a body arrived damaged, or not at all: {reply.status}")

    async def transfer(cookies: Any) -> None:
        if upload:
            reply = await client.post(name, "/upload", data=body, cookies=cookies)
            right = (await reply.json())["size"] == size
        else:
            reply = await client.get(name, "/download", params={"size": size}, cookies=cookies)
            right = len(await reply.read()) == size
        if reply.status != 200 or not right:
            raise ValueError(f"wrong answer: {reply.status}")

    async def repeat(cookies: Any, count: int) -> None:
        for _ in range(count):
            await transfer(cookies)

    sessions = [await cookies_of_a_session() for _ in range(job["connections"])]
    # Every byte is looked at here; the timed transfers are looked at by their size.
    await asyncio.gather(*(check(cookies) for cookies in sessions))
    await lead.go_ahead()
    began = time.perf_counter()
    await asyncio.gather(*(repeat(cookies, job["count"]) for cookies in sessions))
    seconds = time.perf_counter() - began
    await close_client()
    requests = job["count"] * len(sessions)
    lead.tell({"requests": requests, "seconds": seconds, "bytes": requests * size})


if __name__ == "__main__":
    serve(work)
