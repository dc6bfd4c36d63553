"""What a log line says of the request that is being served, kept in context variables: one value per task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

ROLLOUT_HEADER: Final = "nemo-gym-rollout"
"""The header in which a rollout's id travels along its calls, from the collector to every server."""

rollout_id: Final[ContextVar[str | None]] = ContextVar("nemo_gym_rollout_id", default=None)
"""The rollout, as `<task index>-<rollout index>`."""

session_id: Final[ContextVar[str | None]] = ContextVar("nemo_gym_session_id", default=None)
"""The session, whole."""

trace_id: Final[ContextVar[str | None]] = ContextVar("nemo_gym_trace_id", default=None)
"""The trace of the request, where traces are recorded, as 32 hex digits."""
