"""Bodies up and down, over a few connections at once; blocking sockets, as nothing else in Python is as cheap."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.load.lines import Session
from benchmarks.load.pipes import Job, Lead, serve

PATTERN: Final = bytes(range(256))


def body_of(size: int) -> bytes:
    """Return a body of so many bytes."""
    return (PATTERN * (size // 256 + 1))[:size]


class Transfer:
    """What one connection does.

    Args:
        session: The session, with its connection.
        direction: "up" or "down".
        size: The body's size in bytes.
    """

    def __init__(self, session: Session, direction: str, size: int) -> None:
        self._session = session
        self._size = size
        self._body = body_of(size)
        self._once = self._upload if direction == "up" else self._download
        self._check = self._check_upload if direction == "up" else self._check_download

    def check(self) -> None:
        """Transfer a body and look at every byte; the timed ones are looked at by their size."""
        self._check()

    def repeat(self, count: int) -> None:
        """Transfer it so many times."""
        for _ in range(count):
            self._once()

    def _upload(self) -> None:
        status, reply, _ = self._session.line.ask(self._session.post_head("/upload", self._size), self._body)
        if status != 200 or json.loads(reply)["size"] != self._size:
            raise ValueError(f"wrong answer to an upload: {status} {reply[:200]!r}")

    def _check_upload(self) -> None:
        head = self._session.post_head("/upload?checksum=true", self._size)
        _, reply, _ = self._session.line.ask(head, self._body)
        if json.loads(reply) != {"size": self._size, "crc": zlib.crc32(self._body)}:
            raise ValueError(f"an upload arrived damaged: {reply[:200]!r}")

    def _download(self) -> None:
        line = self._session.line
        line.sock.sendall(self._session.get(f"/download?size={self._size}"))
        status, length, _, rest = line.head()
        if status != 200 or length != self._size:
            raise ValueError(f"wrong answer to a download: {status}, {length} bytes")
        line.drain(length - len(rest))

    def _check_download(self) -> None:
        _, body, _ = self._session.line.ask(self._session.get(f"/download?size={self._size}"))
        if body != self._body:
            raise ValueError(f"a download arrived damaged: {len(body)} bytes")


async def work(lead: Lead, job: Job) -> None:
    """Do a job: `way`, `direction`, `size`, `count` (per connection), `connections`."""
    host, port, workers = job["host"], job["port"], job["workers"]
    transfers = [
        Transfer(Session(host, port, workers, job["way"]), job["direction"], job["size"])
        for _ in range(job["connections"])
    ]
    for transfer in transfers:
        transfer.check()
    await lead.go_ahead()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(transfers)) as threads:
        began = time.perf_counter()
        await asyncio.gather(*(loop.run_in_executor(threads, it.repeat, job["count"]) for it in transfers))
        seconds = time.perf_counter() - began
    requests = job["count"] * len(transfers)
    lead.tell({"requests": requests, "seconds": seconds, "bytes": requests * job["size"]})


if __name__ == "__main__":
    serve(work)
