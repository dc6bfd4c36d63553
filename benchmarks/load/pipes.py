"""How a load generator speaks to the benchmark that started it: lines of JSON over standard input and output.

It gets a job, prepares (connections, warm-up), says that it is ready, and does each part of the work when told to.
It ends when its standard input does, so that it never outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import uvloop

Job: TypeAlias = dict[str, Any]

_ABANDONED = 1
_LONGEST_LINE = 2**24


class Lead:
    """The benchmark at the other end.

    Attributes:
        when_abandoned: Called before this process ends because the benchmark is gone.
    """

    def __init__(self) -> None:
        self.when_abandoned: Callable[[], object] = lambda: None
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    async def listen(self) -> None:
        """Take in lines until there are no more, and end this process then."""
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            self._lines.put_nowait(line.decode())
        self.when_abandoned()
        os._exit(_ABANDONED)

    async def job(self) -> Job:
        """Return what to do."""
        job: Job = json.loads(await self._lines.get())
        return job

    async def go_ahead(self) -> None:
        """Say that everything is prepared, and wait for the word."""
        self.tell({"ready": True})
        await self._lines.get()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message."""
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def serve(work: Callable[[Lead, Job], Awaitable[None]]) -> None:
    """Run a load generator: `work` does the job that comes first."""

    async def main() -> None:
        lead = Lead()
        listening = asyncio.create_task(lead.listen())
        await work(lead, await lead.job())
        listening.cancel()

    uvloop.run(main())
