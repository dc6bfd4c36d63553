"""The hop out: this worker as a client of the other workers' private sockets.

There are two ways for HTTP requests, chosen by name: `frames` and, to compare it with, `aiohttp`. WebSockets always
go by aiohttp. The owner's private socket takes all of them. How an owner is connected to, and when it counts as gone,
is told in `owner_socket`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from starlette.types import Receive, Scope, Send

from nemo_gym.lazy_module import LazyModule
from nemo_gym.session_routing.durations import Durations
from nemo_gym.session_routing.frame_hop import FrameHop
from nemo_gym.session_routing.owner_socket import OwnerGoneError
from nemo_gym.session_routing.private_socket import is_listening, is_own_socket, worker_socket_path

_IMPORTED_LATE: Final = "nemo_gym.session_routing.aiohttp_ways"

if TYPE_CHECKING:
    from nemo_gym.session_routing import aiohttp_ways
    from nemo_gym.session_routing.owner_pool import OwnerPool
else:
    aiohttp_ways = LazyModule(_IMPORTED_LATE)

HopName = Literal["frames", "aiohttp"]
HopObserver = Callable[[str, Scope], AbstractContextManager[object]]


class Hop(Protocol):
    """One way in which HTTP requests reach one owner. The errors are those of `owner_socket`."""

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and send its reply; return early when the client goes away."""

    async def retire(self) -> None:
        """Close the connections, each when the request on it has ended."""

    async def close(self) -> None:
        """Close all connections at once."""


def _aiohttp_hop(path: Path) -> Hop:
    return aiohttp_ways.AiohttpHop(path)


_HOPS: Final[dict[HopName, Callable[[Path], Hop]]] = {"frames": FrameHop, "aiohttp": _aiohttp_hop}


class Forwarder:
    """Forwards requests to the workers whose sockets are in one directory.

    Args:
        socket_dir: The directory.
        hop: The way in which HTTP requests reach their owner.
        durations: Counts how long each forwarded HTTP request took, where that is wanted.

    Attributes:
        observer: Gives the context in which an HTTP request is forwarded, from its owner and its scope, which it may
            change; None for none.
    """

    def __init__(self, socket_dir: Path | str, hop: HopName = "frames", *, durations: Durations | None = None) -> None:
        if hop not in _HOPS:
            raise ValueError(f"hop must be one of {', '.join(_HOPS)}, not {hop!r}")
        self._socket_dir = Path(socket_dir)
        self._make_hop = _HOPS[hop]
        self._durations = durations
        self._owners: dict[str, _Owner] = {}
        self.observer: HopObserver | None = None

    @property
    def open_pools(self) -> int:
        """How many owners there are connections kept for."""
        return len(self._owners)

    def prepare(self) -> None:
        """Import what is imported late, before there are requests that would wait for it."""
        import_module(_IMPORTED_LATE)

    async def forward(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and send its reply, or one WebSocket until it ends.

        It returns early, having told the owner by closing the connection, when the client goes away.

        Args:
            owner: A worker id that has passed `is_worker_id`.
            scope: The request's HTTP or WebSocket scope.
            receive: Its ASGI receive.
            send: Its ASGI send.

        Raises:
            OwnerGoneError: Before anything was sent to the client.
            NoReplyError: Before anything was sent to the client.
            OutOfDescriptorsError: Before anything was sent to the client.
            ReplyBrokenOffError: After the reply had begun.
        """
        durations = self._durations
        began = 0.0 if durations is None else time.perf_counter()
        # No await between the look-up and the use, or another request could retire it in between.
        reached = self._owners.get(owner) or await self._reach(owner)
        try:
            if scope["type"] == "websocket":
                await reached.forward_websocket(scope, receive, send)
                return
            if self.observer is None:
                await reached.hop.forward(scope, receive, send)
            else:
                with self.observer(owner, scope):
                    await reached.hop.forward(scope, receive, send)
            if durations is not None:
                durations.add(time.perf_counter() - began)
        except OwnerGoneError:
            if self._owners.get(owner) is reached:
                del self._owners[owner]
            await reached.retire()
            raise

    async def close(self) -> None:
        """Close all connections."""
        while self._owners:
            _, reached = self._owners.popitem()
            await reached.close()

    async def _reach(self, owner: str) -> _Owner:
        path = worker_socket_path(self._socket_dir, owner)
        if not is_own_socket(path):
            raise OwnerGoneError(may_have_run=False)
        # A new owner is a rare event, and the one at which an old owner was perhaps replaced.
        for other, old in list(self._owners.items()):
            if not is_listening(old.path) and self._owners.get(other) is old:
                del self._owners[other]
                await old.retire()
        if owner not in self._owners:
            self._owners[owner] = _Owner(path, self._make_hop(path))
        return self._owners[owner]


class _Owner:
    """One owner, and the connections to it."""

    def __init__(self, path: Path, hop: Hop) -> None:
        self.path = path
        self.hop = hop
        self._websockets: OwnerPool | None = None

    async def forward_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._websockets is None:
            self._websockets = aiohttp_ways.OwnerPool(self.path)
        async with self._websockets.in_use():
            await aiohttp_ways.forward_websocket(self._websockets, scope, receive, send)

    async def retire(self) -> None:
        await self.hop.retire()
        if self._websockets is not None:
            await self._websockets.retire()

    async def close(self) -> None:
        await self.hop.close()
        if self._websockets is not None:
            await self._websockets.session.close()
