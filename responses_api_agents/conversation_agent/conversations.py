"""The conversations that one worker holds, by session id.

A conversation lives here, in memory, from its first request until it is released: when its session ends, or when it
is the one untouched for longest and room is needed. One that has a request in hand is never dropped for room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from responses_api_agents.simple_agent.app import RolloutCookies


class NoRoomError(Exception):
    """Raised when no conversation can begin, as every one that is held has a request in hand."""


class ReleasedError(Exception):
    """Raised when a conversation was released while a request waited for its turn."""


@dataclass(kw_only=True)
class State(RolloutCookies):
    """All that a conversation is. A turn works on a fork, which becomes the state only if the turn succeeds.

    Attributes:
        params: What requests have set beside their input, such as tools and instructions; it holds until changed.
        items: Everything said so far, of both sides, tool calls and their results included.
        notes: What is to be remembered beside that.
        steps: How many times the model has answered.
        tokens: How many tokens it has read and written, as far as it says.
    """

    params: NeMoGymResponseCreateParamsNonStreaming = field(
        default_factory=lambda: NeMoGymResponseCreateParamsNonStreaming(input=[])
    )
    items: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0

    def fork(self) -> State:
        """Return a copy that may be changed while this one stays as it is."""
        return State(
            resources=dict(self.resources),
            model=dict(self.model),
            params=self.params,
            items=list(self.items),
            notes=list(self.notes),
            steps=self.steps,
            tokens=self.tokens,
        )


class Conversation:
    """One conversation.

    Attributes:
        state: What it has come to, after its last turn.
        seeded: Its session at the resources server has begun.
    """

    def __init__(self) -> None:
        self.state = State()
        self.seeded = False
        self._lock = asyncio.Lock()
        self._requests = 0
        self._released = False

    @property
    def in_use(self) -> bool:
        """Whether a request of it is being answered or waits for that."""
        return self._requests > 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the requests that came before are answered, and keep later ones waiting.

        Raises:
            ReleasedError: It was released in the meantime.
        """
        self._requests += 1
        try:
            async with self._lock:
                if self._released:
                    raise ReleasedError
                yield
        finally:
            self._requests -= 1

    def release(self) -> None:
        """Refuse every turn that has not begun."""
        self._released = True


class Conversations:
    """The conversations of a worker, at most as many as there is room for.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def find(self, session_id: str) -> Conversation | None:
        """Return a session's conversation, which counts as touched by that; None where there is none."""
        if session_id in self._held:
            self._held.move_to_end(session_id)
        return self._held.get(session_id)

    def begin(self, session_id: str) -> Conversation:
        """Return a new conversation for a session.

        Raises:
            NoRoomError: There is no room, and none can be made.
        """
        if len(self._held) >= self._limit:
            idle = next((key for key, one in self._held.items() if not one.in_use), None)
            if idle is None:
                raise NoRoomError
            self.release(idle)
        self._held[session_id] = Conversation()
        return self._held[session_id]

    def release(self, session_id: str) -> None:
        """Forget a session's conversation; a turn under way is still answered. Twice is fine."""
        conversation = self._held.pop(session_id, None)
        if conversation is not None:
            conversation.release()
