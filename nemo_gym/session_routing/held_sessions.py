"""Which sessions a worker holds, as their requests and replies tell: counted in a table of fixed size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Scope

from nemo_gym.session_routing.ownership import route_path

NEW_KEY: Final = "nemo_gym.session_routing.new_session"
"""The scope key that marks a request which may begin a session."""

FORGET_S: Final = 1800.0
"""How often sessions are to be forgotten that have no end."""

_MARKS: Final = 1 << 22  # of 4,000 sessions held at once about two share a byte


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What an application has to say of its sessions, so that they can be placed and counted.

    Attributes:
        session_key: The key in the session under which its id stands; None where there is none. Then an end is never
            noticed, and a session counts for half an hour to an hour.
        first_path: A route of which every good reply begins the request's session, unless it is held already.
        last_path: The route whose good reply ends the request's session. A session that has no such end is forgotten
            after half an hour to an hour.
        ignored_paths: Routes outside of sessions.
        when_ended: Takes a callback that is to be given each ended session's id, where the application counts the
            ends itself: then `last_path` means nothing, and no session is forgotten before its end.
    """

    session_key: str | None = None
    first_path: str | None = None
    last_path: str | None = None
    ignored_paths: Collection[str] = field(default_factory=frozenset)
    when_ended: Callable[[Callable[[str], None]], None] | None = None


class HeldSessions:
    """Which sessions a worker holds, marked in a table of fixed size: one session, one byte.

    A session that begins or ends twice counts once. Of sessions that share a byte one is counted, which in a table
    this large is rare.
    """

    def __init__(self) -> None:
        self._marks = bytearray(_MARKS)
        self._generation = 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def begin(self, session: object) -> bool:
        """Mark a session as held; False where it is marked already."""
        place = hash(session) % _MARKS
        is_new = not self._marks[place]
        self._count += is_new
        self._marks[place] = self._generation
        return is_new

    def end(self, session: object) -> bool:
        """Take the mark away; False where there was none."""
        place = hash(session) % _MARKS
        if not self._marks[place]:
            return False
        self._marks[place] = 0
        self._count -= 1
        return True

    def forget(self) -> None:
        """Forget the sessions that were begun before the last call of this method."""
        older = 3 - self._generation
        forgotten = self._marks.count(older)
        if forgotten:
            self._marks = self._marks.replace(bytes([older]), b"\0")
            self._count -= forgotten
        self._generation = older


class SessionTally:
    """Counts the sessions that this worker holds, and those that have begun and ended here.

    Args:
        placement: What the application says of its sessions.

    Attributes:
        begun: Sessions that have begun here.
        ended: Sessions whose end was noticed.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.begun = self.ended = 0
        self._held = HeldSessions()
        self._unnamed = 0
        self._forgetting: asyncio.TimerHandle | None = None
        self._when_changed: list[Callable[[int], None]] = []
        self._when_ended: list[Callable[[], None]] = []
        if placement.when_ended is not None:
            placement.when_ended(self.end)

    @property
    def held(self) -> int:
        """How many sessions this worker holds."""
        return len(self._held)

    def when_changed(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with the number of sessions held: now, and each time that it changes."""
        self._when_changed.append(callback)
        callback(len(self._held))

    def when_one_ends(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time that a session has ended."""
        self._when_ended.append(callback)

    def note_reply(self, scope: Scope, status: int, *, is_stamped: bool) -> None:
        """Count the session that a reply begins.

        Args:
            scope: The request's scope.
            status: The reply's.
            is_stamped: The session gets its owner with this reply.
        """
        if status >= 400 or scope["method"] != "POST":
            return
        first_path = self.placement.first_path
        if (is_stamped and NEW_KEY in scope) or (first_path is not None and route_path(scope) == first_path):
            self.begin(self._name(scope["session"]))

    def begin(self, session: object) -> None:
        """Count a session that begins, unless it is held already."""
        if self._held.begin(session):
            self.begun += 1
            for callback in self._when_changed:
                callback(len(self._held))

    def end(self, session: object) -> None:
        """Count the end of a session, if it is held."""
        if self._held.end(session):
            self.ended += 1
            self._publish()
            for callback in self._when_ended:
                callback()

    def ends_session(self, scope: Scope) -> bool:
        """Tell whether a good reply to a request ends its session."""
        last = self.placement.last_path
        return (
            last is not None
            and self.placement.when_ended is None
            and scope["method"] == "POST"
            and route_path(scope) == last
        )

    def note_end(self, scope: Scope) -> None:
        """Count the end of a request's session."""
        key = self.placement.session_key
        if key is not None:
            self.end(str(scope["session"].get(key)))

    def start_forgetting(self) -> None:
        """Call `forget` each `FORGET_S` seconds, on the running event loop; nothing where no session is forgotten."""
        if self.placement.when_ended is None:
            self._forgetting = asyncio.get_running_loop().call_later(FORGET_S, self._forget_and_go_on)

    def stop_forgetting(self) -> None:
        """Call it no more. Calling this again is harmless."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None

    def forget(self) -> None:
        """Forget the sessions that were begun before the last call of this method and have no end."""
        if self.placement.when_ended is None:
            self._held.forget()
            self._publish()

    def _forget_and_go_on(self) -> None:
        self.forget()
        self.start_forgetting()

    def _name(self, session: Mapping[str, Any]) -> object:
        key = self.placement.session_key
        if key is not None and session.get(key) is not None:
            return str(session[key])
        self._unnamed += 1
        return self._unnamed

    def _publish(self) -> None:
        for callback in self._when_changed:
            callback(len(self._held))
