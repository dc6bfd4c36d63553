"""Which worker a new session goes to: the least loaded one, and not whichever won the race to accept its connection.

A worker's load is the number of sessions that it holds. It keeps a new session unless it holds clearly more than the
least loaded worker, so that with an even load nothing is forwarded. Among workers that hold as much, those are
preferred of which fewer sessions have ended lately: many short sessions are a load too. A worker that holds far less
than the others, as one does that has just started, is filled up by turns with them, for otherwise it alone would have
all the beginnings.

Where the loads can't be shared, new sessions stay where they arrive.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from nemo_gym.session_routing.body_field import BodyId
from nemo_gym.session_routing.held_sessions import NEW_KEY, Placement, SessionTally
from nemo_gym.session_routing.hop import STRAIGHT_KEY
from nemo_gym.session_routing.loads import BEAT_S, SharedLoads
from nemo_gym.session_routing.ownership import Claim, route_path

LOADS_FILE: Final = "loads"
"""Name of the file of the loads, in the directory of the workers' sockets."""

_SLACK: Final = 1  # more than the least loaded worker, and a thirty-second of its load
_SLACK_SHIFT: Final = 5
_CHOSEN_SLACK: Final = 32  # where a client has chosen, and a quarter: it may have sent what nobody has taken yet
_CHOSEN_SLACK_SHIFT: Final = 2
_ENDED_SLACK: Final = 8  # ends lately, and an eighth of the other's
_ENDED_SLACK_SHIFT: Final = 3
_LARGEST_LEAD: Final = 64  # and a quarter of the own load; beyond it the others take turns
_LARGEST_LEAD_SHIFT: Final = 2

_LARGEST_KEPT: Final = 65_536  # bytes; of larger bodies nothing is read before the worker is reached

logger = logging.getLogger(__name__)


def is_far_ahead(load: int, least: int) -> bool:
    """Tell whether a worker holds so much more than another one that this one is to be filled up by turns."""
    return load - least > _LARGEST_LEAD + (load >> _LARGEST_LEAD_SHIFT)


class Placer:
    """Places new sessions, and counts those that this worker holds.

    Args:
        placement: What the application says of its sessions.
        socket_dir: The directory of the workers' sockets, in which the file of the loads is.
        worker_id: This worker.

    Attributes:
        sessions: Those that this worker holds.
    """

    def __init__(self, placement: Placement, socket_dir: Path | str, worker_id: str) -> None:
        self._placement = placement
        self._path = Path(socket_dir) / LOADS_FILE
        self._worker_id = worker_id
        self._turn = 0
        self._loads: SharedLoads | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._unchain: Callable[[], None] | None = None
        self.sessions = SessionTally(placement)
        self.sessions.when_changed(self._publish)
        self.sessions.when_one_ends(self._publish_end)

    @property
    def loads(self) -> SharedLoads | None:
        """The loads of all workers; None where they are not shared."""
        return self._loads

    def start(self) -> None:
        """Take part, now that this worker can be reached; on the running event loop."""
        self.sessions.start_forgetting()
        try:
            self._loads = SharedLoads(self._path, self._worker_id)
        except OSError as error:
            logger.warning("New sessions stay where they arrive: %s: %s", self._path, error.strerror or error)
            return
        self._loads.hold(self.sessions.held)
        self._beat()
        self._unchain = _chain_to_sigterm(self.leave)

    def leave(self) -> None:
        """Take no more sessions: this worker is going to stop."""
        if self._loads is not None:
            self._loads.leave()

    def close(self) -> None:
        """Take part no longer. Calling it again is harmless."""
        if self._unchain is not None:
            self._unchain()
            self._unchain = None
        self.sessions.stop_forgetting()
        if self._beating is not None:
            self._beating.cancel()
        if self._loads is not None:
            self._loads.close()
            self._loads = None

    def begins_session(self, scope: Scope, claim: Claim) -> bool:
        """Tell whether a request may begin a session; what is counted then is decided by its reply."""
        if (
            claim.owner is not None
            or not claim.is_open
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or route_path(scope) in self._placement.ignored_paths
        ):
            return False
        scope[NEW_KEY] = True
        return True

    def choose(self, loads: SharedLoads, scope: Scope) -> int:
        """Return the slot of the worker that the new session of a request goes to.

        Where the request came straight to this worker, its client has chosen by the loads.
        """
        peers = loads.peers()
        if not peers:
            return loads.slot
        own = loads.slot
        others = [(loads.load(slot), slot) for slot in peers]
        load, least = min(others)
        if loads.has_left:
            return least
        mine = loads.load(own)
        lead = mine - load
        if STRAIGHT_KEY in scope and lead <= _CHOSEN_SLACK + (load >> _CHOSEN_SLACK_SHIFT):
            return own
        if is_far_ahead(mine, load):
            self._turn = (self._turn + 1) % len(others)
            load, least = others[self._turn]
            lead = mine - load
        if lead > _SLACK + (load >> _SLACK_SHIFT):
            return least
        if lead < 0:
            return own
        own_ended = loads.ended(own)
        if own_ended <= _ENDED_SLACK:
            return own
        ended, slot = min((loads.ended(slot), slot) for load, slot in others if load <= mine)
        return slot if own_ended > ended + _ENDED_SLACK + (ended >> _ENDED_SLACK_SHIFT) else own

    def _publish(self, held: int) -> None:
        if self._loads is not None:
            self._loads.hold(held)

    def _publish_end(self) -> None:
        if self._loads is not None:
            self._loads.note_end()

    def _beat(self) -> None:
        if self._loads is not None and not self._loads.has_left:
            self._loads.beat()
            self._beating = asyncio.get_running_loop().call_later(BEAT_S, self._beat)


class KeptBody:
    """A request's body, kept as it passes while it is small, so that it can be received once more.

    Args:
        receive: The request's ASGI receive; the one to use instead is this object's `receive`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._size = 0

    async def receive(self) -> Message:
        """Receive the next event, and keep it."""
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size <= _LARGEST_KEPT:
            self._messages.append(message)
        else:
            self._messages.clear()
        return message

    def again(self) -> Receive | None:
        """Return an ASGI receive that begins with what has passed; None where that was too much."""
        if self._size > _LARGEST_KEPT:
            return None

        async def replay() -> Message:
            return self._messages.popleft() if self._messages else await self._receive()

        return replay


class CountedReply:
    """The reply to a request that may begin a session: with its beginning, what it began is held.

    Args:
        loads: The loads of all workers, which count the request as taken.
        send: The request's ASGI send; the one to use instead is this object's `send`.
    """

    def __init__(self, loads: SharedLoads, send: Send) -> None:
        self._loads = loads
        self._send = send
        self._is_counted = False

    async def send(self, message: Message) -> None:
        """Send the next event."""
        self.end()
        await self._send(message)

    def end(self) -> None:
        """Count the request as replied to, unless it is already."""
        if not self._is_counted:
            self._is_counted = True
            self._loads.replied()


def names_no_session(found: BodyId | None) -> bool:
    """Tell whether a body leaves it open which session its request belongs to."""
    return found is None or (found.value is None and found.problem is None)


def _chain_to_sigterm(notice: Callable[[], None]) -> Callable[[], None] | None:
    """Have `notice` called when this process is told to stop, which the application hears of much later.

    Returns:
        What takes that back; None where signals are not handled here.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        return None
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(notice)
        handler(number, frame)

    def unchain() -> None:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, handler)

    signal.signal(signal.SIGTERM, stop)
    return unchain
