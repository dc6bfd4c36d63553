"""Keeping a slow JSON reply alive.

A reply of one JSON value is what every client reads, of any size and at once. But while a tool takes minutes nothing
is sent, and clients and proxies give up (Node's `fetch` after 300 seconds without headers). JSON may begin with white
space (RFC 8259 section 2), so once a reply is slow its head goes out, and a space now and then.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Final

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

KEEP_ALIVE_S: Final = 15.0
"""Seconds without a sign of life, at most."""

_HEAD: Final[Message] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"cache-control", b"no-cache, no-transform")],
}
_SIGN: Final[Message] = {"type": "http.response.body", "body": b" ", "more_body": True}

logger = logging.getLogger(__name__)


class BrokenOffReplyError(Exception):
    """Raised when a reply whose head has gone out as a success turns out to be none; the server then breaks it off."""


class KeptAlive:
    """One JSON reply, whose client is kept waiting for it within the context: send it with `send`.

    Args:
        send: ASGI.
        interval: Seconds without a sign of life.
    """

    def __init__(self, send: Send, interval: float) -> None:
        self._send = send
        self._interval = interval
        # What is being sent must be through before a sign of life, and the other way round.
        self._lock = asyncio.Lock()
        self._head_sent = False
        self._started = False
        self._signs: asyncio.Task[None] | None = None
        # Most replies are quick and pay for a timer only.
        self._timer = asyncio.get_running_loop().call_later(interval, self._begin)

    async def __aenter__(self) -> KeptAlive:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._signs is None:
            return
        self._signs.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self._signs})
        if not self._signs.cancelled() and (failure := self._signs.exception()) is not None:
            logger.debug("a sign of life could not be sent: %r", failure)

    async def send(self, message: Message) -> None:
        """Send a part of the reply.

        Raises:
            BrokenOffReplyError: If it is the head of an error, and a success has been announced.
        """
        async with self._lock:
            self._started = True
            if message["type"] == "http.response.start" and self._head_sent:
                if message["status"] != _HEAD["status"]:
                    raise BrokenOffReplyError(f"the reply came late and has status {message['status']}")
                return
            await self._send(message)

    async def end(self, refusal: Response, late_refusal: Response, scope: Scope, receive: Receive) -> None:
        """Say instead of the reply that there will be none, as far as that can still be said.

        Args:
            refusal: What to answer if nothing has been sent.
            late_refusal: The same as a JSON value under status 200, for after a sign of life.
            scope: ASGI.
            receive: ASGI.
        """
        if self._started:
            return
        self._started = True
        if not self._head_sent:
            await refusal(scope, receive, self._send)
        elif late_refusal.status_code == _HEAD["status"]:
            await self._send({"type": "http.response.body", "body": late_refusal.body})

    def _begin(self) -> None:
        self._signs = asyncio.get_running_loop().create_task(self._give_signs())

    async def _give_signs(self) -> None:
        while True:
            async with self._lock:
                if self._started:
                    return
                if not self._head_sent:
                    await self._send({**_HEAD, "headers": list(_HEAD["headers"])})
                    self._head_sent = True
                await self._send(dict(_SIGN))
            await asyncio.sleep(self._interval)
