"""What a caller is told when its session is lost: why, and what to do, in fields, words and a header."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from starlette.responses import JSONResponse

SESSION_LOST_HEADER: Final = "x-nemo-gym-session-lost"
"""The header of the reply that repeats the reason, so that a caller need not read the body."""


class LostReason(StrEnum):
    """Why a session is lost."""

    WORKER_GONE = "worker_gone"
    SESSION_EXPIRED = "session_expired"
    SESSION_ENDED = "session_ended"


def lost_session_reply(reason: LostReason, *, may_have_run: bool = False, had_begun: bool = True) -> JSONResponse:
    """Return the 410 that says that a session is lost, why, and what to do.

    Args:
        reason: Why.
        may_have_run: The request had reached its handler, or may have.
        had_begun: The request was one of a session, not the one that was to begin it.
    """
    if reason is LostReason.SESSION_EXPIRED:
        detail = "The session has expired (its cookie or token is too old, or dated in the future)."
    elif reason is LostReason.SESSION_ENDED:
        detail = "The session has ended, or was never begun here."
    elif not had_begun:
        detail = "The worker on which this session was to begin is no longer running."
    else:
        detail = "The worker that held this session is no longer running; its state is lost."
    detail += " Start a new session."
    if may_have_run:
        detail += " This request may have run before the worker was lost."
    body = {"detail": detail, "reason": reason, "new_session_may_be_seeded": True, "may_have_run": may_have_run}
    return JSONResponse(body, status_code=410, headers={SESSION_LOST_HEADER: reason})


def no_reply() -> JSONResponse:
    """Return the 502 that says that a session's worker runs but closed the connection without a reply."""
    detail = "The session's worker closed the connection without a reply; the request may have run."
    return JSONResponse({"detail": detail}, status_code=502)


def no_descriptors_reply() -> JSONResponse:
    """Return the 503 that says that this worker can open no connection to a session's worker just then."""
    detail = "This worker has no file descriptors left to reach the session's worker; try again."
    return JSONResponse({"detail": detail}, status_code=503, headers={"retry-after": "1"})


def not_the_owner_reply() -> JSONResponse:
    """Return the 500 that refuses a request which another worker has sent here as this one's, and which is not."""
    detail = "The worker that got this request for its session does not find that session named in it; nothing was run."
    return JSONResponse({"detail": detail}, status_code=500)
