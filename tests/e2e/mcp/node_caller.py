"""The official TypeScript clients, in a process of their own that takes orders on stdin."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.e2e.mcp.callers import LIMIT, Exchange, Kind, Outcome, within_limit
from tests.e2e.mcp.episodes import Target


class NodeCaller:
    """One client in one process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Outcome]] = {}

    async def connect(self) -> Outcome:
        return await self.do("connect")

    async def do(self, order: str, **details: Any) -> Outcome:
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, "number": number, **details}).encode() + b"\n")
        return await within_limit(self._replies[number])

    async def abort(self) -> None:
        await self._accepted("abort")

    async def terminate(self) -> None:
        await self._accepted("terminate")

    async def exchanges(self) -> list[Exchange]:
        report = await self.do("exchanges")
        return [Exchange(it["method"], it["sessionId"], it["status"]) for it in report.result]

    async def _accepted(self, order: str) -> None:
        outcome = await self.do(order)
        assert outcome.error is None, outcome

    async def read_replies(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            reply = json.loads(line)
            error = reply.get("error", {})
            outcome = Outcome(
                reply.get("result"), error.get("type"), error.get("message", ""), error.get("data"), reply["ms"] / 1000
            )
            # Whoever gave the order may have stopped waiting.
            if not self._replies[reply["number"]].done():
                self._replies[reply["number"]].set_result(outcome)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(AssertionError("the process of the client ended"))


@asynccontextmanager
async def node_caller(kind: Kind, target: Target, scripts: Path) -> AsyncIterator[NodeCaller]:
    """Start a client that is not connected yet.

    Args:
        kind: Which.
        target: Where it connects to.
        scripts: The folder of the scripts, with what they need installed.
    """
    given = {
        "url": target.url,
        "headers": target.headers,
        "mode": kind.mode,
        "keepsSessionId": kind.keeps_session_id,
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "node", kind.sdk, json.dumps(given), cwd=scripts, stdin=pipe, stdout=pipe, limit=2**20
    )
    caller = NodeCaller(process)
    reader = asyncio.create_task(caller.read_replies())
    try:
        yield caller
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(LIMIT):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reader
