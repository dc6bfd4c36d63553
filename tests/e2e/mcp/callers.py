"""The official clients, all asked in the same way: what does their caller see?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

SESSION_ID_HEADER = "mcp-session-id"
LEGACY, MODERN = "2025-11-25", "2026-07-28"
LIMIT = 60.0
"""Seconds that anything may take, here."""


@dataclass(frozen=True)
class Outcome:
    """What the caller of a client gets for one order.

    Attributes:
        result: The result, as JSON; None when there was an error.
        error: The name of the exception's type.
        message: The exception's text.
        data: What else a JSON-RPC error brought.
        seconds: How long it took.
    """

    result: Any = None
    error: str | None = None
    message: str = ""
    data: Any = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The text of a tool's good result."""
        assert self.error is None, self
        assert not self.result["isError"], self
        return str(self.result["content"][0]["text"])

    @property
    def tool_error(self) -> str:
        """The text of a tool's error."""
        assert self.error is None, self
        assert self.result["isError"], self
        return str(self.result["content"][0]["text"])


@dataclass(frozen=True)
class Kind:
    """A client, and how it is set up.

    Attributes:
        sdk: "python", or the script of the TypeScript one.
        mode: How it chooses the protocol version.
        version: The version it is to arrive at.
        keeps_session_id: Whether it sends back the `Mcp-Session-Id` it is given, as the older versions do.
    """

    sdk: str
    mode: Any
    version: str
    keeps_session_id: bool = True

    @property
    def is_stateful(self) -> bool:
        return self.version == LEGACY and self.keeps_session_id


KINDS = {
    "python-legacy": Kind("python", "legacy", LEGACY),
    "python-legacy-stateless": Kind("python", "legacy", LEGACY, keeps_session_id=False),
    "python-auto": Kind("python", "auto", MODERN),
    "python-modern": Kind("python", MODERN, MODERN),
    "typescript-1": Kind("sdk1.mjs", None, LEGACY),
    "typescript-1-stateless": Kind("sdk1.mjs", None, LEGACY, keeps_session_id=False),
    "typescript-2-legacy": Kind("sdk2.mjs", "legacy", LEGACY),
    "typescript-2-auto": Kind("sdk2.mjs", "auto", MODERN),
    "typescript-2-modern": Kind("sdk2.mjs", {"pin": MODERN}, MODERN),
}


@dataclass
class Exchange:
    """An HTTP request of a client.

    Attributes:
        method: Its method.
        session_id: The `Mcp-Session-Id` that it carried.
        status: The reply's status; None where there was no reply.
    """

    method: str
    session_id: str | None
    status: int | None = None


class Caller(Protocol):
    """A client, first to be connected."""

    async def connect(self) -> Outcome:
        """Connect; the result has `sessionId` and `version`."""
        ...

    async def do(self, order: str, **details: Any) -> Outcome:
        """Carry out "list", "ping", or "call" with `name`, `given` and a `timeout` in milliseconds."""
        ...

    async def abort(self) -> None:
        """Give up the call in flight."""
        ...

    async def terminate(self) -> None:
        """End the MCP session, whatever is still in flight."""
        ...

    async def exchanges(self) -> list[Exchange]:
        """Return every HTTP request so far."""
        ...


async def call(caller: Caller, name: str, /, **given: Any) -> Outcome:
    return await caller.do("call", name=name, given=given)


async def within_limit(awaited: asyncio.Future[T]) -> T:
    async with asyncio.timeout(LIMIT):
        return await awaited
