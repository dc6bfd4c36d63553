"""The log of a server with several workers, as a file that people and programs read."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.server_process import SERVER, WITH_APP, Process, eventually, gone

TIMES = 500
FEWER = 200
UNDER_WAY = 20
API_KEY = "an-api-key-of-the-test-0123456789"
SECRET = "a-session-secret-of-the-test-0123456789"
FAILING = """
import logging

class FailingServer(Server):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.post("/fail")
        async def fail(request: Request) -> dict:
            key = self.server_client.global_config_dict["policy_api_key"]
            raise ValueError(f"no spoon\\nfor {key}, {dict(request.headers)}")

        @app.post("/tell")
        async def tell(request: Request) -> dict:
            logging.getLogger("environment").info("told %s", await request.body())
            return {}

        return app

Server = FailingServer
"""


async def send(process: Process, path: str, cookie: str, times: int, body: bytes = b"") -> Counter[int]:
    """Send requests of one session and rollout, and count their statuses."""
    headers = {"Cookie": cookie, "nemo-gym-rollout": "17-3"}
    statuses: Counter[int] = Counter()
    left = iter(range(times))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{process.port}") as session:

        async def sender() -> None:
            for _ in left:
                async with session.post(path, headers=headers, data=body) as reply:
                    await reply.read()
                    statuses[reply.status] += 1

        await asyncio.gather(*(sender() for _ in range(UNDER_WAY)))
    return statuses


def written_or_counted(lines: list[dict[str, Any]], message: str) -> tuple[int, int]:
    """Return how many lines a trouble has got, and how often they say that it happened."""
    found = [line for line in lines if message in line["message"]]
    counts = [re.match(r"([\d,]+) more like this", line["message"]) for line in found]
    return len(found), sum(int(count[1].replace(",", "")) if count else 1 for count in counts)


async def test_a_log_names_its_worker_session_and_rollout_counts_troubles_and_holds_no_secret(
    start: Callable[..., Process],
) -> None:
    above = {"logging": {"format": "json"}, "policy_api_key": API_KEY, "session_secret": SECRET}
    process = start(SERVER + FAILING + WITH_APP, num_workers=2, above=above)
    process.wait_until_ready()
    _, first, cookie = process.call("/add")
    assert cookie is not None
    assert await send(process, "/fail", cookie, TIMES) == {500: TIMES}
    assert await send(process, "/tell", cookie, 1, b"a\nforged\x1b[31m line") == {200: 1}
    (owner,) = [worker for worker in process.workers() if worker.pid == first["pid"]]
    owner.kill()
    eventually(lambda: gone([owner]), 60)
    assert await send(process, "/fail", cookie, 200) == {410: 200}
    eventually(lambda: "ended with code" in process.log.read_text(), 60)
    process.process.send_signal(signal.SIGTERM)
    process.process.wait(60)

    text = process.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["server"] for line in lines} == {"server"}
    failed, times = written_or_counted(lines, "POST /fail failed")
    assert failed < 10
    # The owner was killed, perhaps before the window in which it counted was over.
    assert 3 <= times <= TIMES
    first_failure = next(line for line in lines if line["message"].endswith("POST /fail failed"))
    assert first_failure["pid"] == first["pid"]
    assert first_failure["rollout"] == "17-3"
    assert re.fullmatch("[0-9a-f]{8}", first_failure["session"])
    assert re.fullmatch("[0-9a-f]{8}", first_failure["worker"])
    assert first_failure["exception"].startswith("ValueError: no spoon\nfor ***, {")
    assert first_failure["traceback"].startswith("Traceback (most recent call last):\n")
    (told,) = [line for line in lines if line["logger"] == "environment"]
    assert told["message"] == r"told b'a\nforged\x1b[31m line'"
    by_main = [line["message"] for line in lines if line.get("worker") == "main"]
    assert any("ended with code" in message for message in by_main)
    assert any(re.fullmatch(rf"Worker [01] is process {owner.pid}", message) for message in by_main)
    value = cookie.partition("=")[2]
    for secret in (API_KEY, SECRET, value, value.rsplit(".", 1)[1]):
        assert secret not in text


async def test_what_was_counted_is_told_when_the_server_stops(start: Callable[..., Process]) -> None:
    process = start(SERVER + FAILING + WITH_APP, above={"policy_api_key": API_KEY})
    process.wait_until_ready()
    _, _, cookie = process.call("/add")
    assert cookie is not None
    assert await send(process, "/fail", cookie, FEWER) == {500: FEWER}
    process.process.send_signal(signal.SIGTERM)
    process.process.wait(60)
    lines = process.log.read_text().splitlines()
    pattern = re.compile(r"\S+ \S+ ERROR server \d+ (?:session=[0-9a-f]{8} rollout=17-3 )?\S+: (?P<message>.*)")
    found = [{"message": match["message"]} for match in map(pattern.fullmatch, lines) if match]
    failed, times = written_or_counted(found, "POST /fail failed")
    assert failed < 10
    assert times == FEWER
    assert API_KEY not in process.log.read_text()
