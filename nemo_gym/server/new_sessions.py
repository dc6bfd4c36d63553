"""Where a client lets new sessions begin: at the worker with the fewest, as far as it can see from outside.

It sees the loads that the workers share, a moment late, and knows what it has sent itself and what is not answered
yet; so a burst spreads before the workers have taken any of it. The choice is a suggestion: the worker places the
session again, though it overrules a client only where that was far off.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.loads_file import SLOTS
from nemo_gym.session_routing.loads_view import LoadsView
from nemo_gym.session_routing.placement import LOADS_FILE, is_far_ahead

SESSIONLESS_PATHS: Final = frozenset(
    {"/health", "/aggregate_metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
)
"""The framework's own paths that are the same in every session, and in none."""


class NewSessions:
    """Chooses the workers of one server's new sessions.

    Args:
        loads: The loads of its workers.
    """

    def __init__(self, loads: LoadsView) -> None:
        self._loads = loads
        self._under_way: dict[str, int] = {}
        # Clients that start together are not to begin with the same worker.
        self._turn = random.randrange(SLOTS)  # noqa: S311

    @classmethod
    def at(cls, socket_dir: Path) -> NewSessions | None:
        """Return what chooses among the workers with sockets in a directory; None where they don't place sessions."""
        try:
            return cls(LoadsView(socket_dir / LOADS_FILE))
        except OSError:
            return None

    def choose(self) -> str | None:
        """Return the worker that a new session is to begin at; None where there is none to choose."""
        workers = self._loads.workers()
        if not workers:
            return None
        load, under_way = self._loads.load, self._under_way
        each = [load(slot) + under_way.get(worker, 0) for slot, worker in workers]
        least, turn = min(each), self._turn % len(each)
        if not is_far_ahead(max(each), least):
            turn = each.index(least, turn) if least in each[turn:] else each.index(least)
        self._turn = turn + 1
        return workers[turn][1]

    def sent(self, worker: str) -> None:
        """Count a session as about to begin at a worker."""
        self._under_way[worker] = self._under_way.get(worker, 0) + 1

    def answered(self, worker: str) -> None:
        """Count it no longer: the worker does by now, if it has begun."""
        left = self._under_way.pop(worker) - 1
        if left:
            self._under_way[worker] = left

    def leave_out(self, worker: str) -> None:
        """Choose a worker that could not be reached no more, for the moment."""
        self._loads.leave_out(worker)
