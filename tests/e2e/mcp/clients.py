"""Which client a test is about, and how it comes by it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.mcp.callers import Caller, Kind
from tests.e2e.mcp.episodes import Target
from tests.e2e.mcp.node_caller import node_caller
from tests.e2e.mcp.python_caller import PythonCaller


@asynccontextmanager
async def calling(kind: Kind, target: Target, scripts: Path | None = None) -> AsyncIterator[Caller]:
    """Yield a client that is not connected yet.

    Args:
        kind: Which.
        target: Where it connects to.
        scripts: The folder with the scripts of the TypeScript clients.
    """
    if kind.sdk == "python":
        python = PythonCaller(kind, target)
        try:
            yield python
        finally:
            await python.close()
    else:
        assert scripts is not None
        async with node_caller(kind, target, scripts) as node:
            yield node
