"""What a conformance check found, as typed values: the command line and programs read the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nemo_gym.conformance.replies import REWARD, STATUS, Difference, path_text
from nemo_gym.conformance.scripts import Script


class FindingKind(StrEnum):
    """What a finding is about."""

    NOT_RECORDED = "not_recorded"
    REFUSED = "refused"
    NO_SESSION = "no_session"
    NOT_DETERMINISTIC = "not_deterministic"
    SESSIONS_MIX = "sessions_mix"
    STATE_LOST = "state_lost"
    WORKER_LOST = "worker_lost"
    ONE_WORKER_ONLY = "one_worker_only"
    NOT_ROUTED = "not_routed"


HINTS: Final = {
    FindingKind.NOT_RECORDED: "The agent got no scored rollout of this row; `gym eval run` shows the same.",
    FindingKind.REFUSED: "The agent's rollout passed here and a replay of it did not: look at the server's log.",
    FindingKind.NO_SESSION: (
        "The reply to /seed_session sets no session cookie, so nothing can follow a session. Build the application on "
        "super().setup_webserver(), and don't replace its session middleware."
    ),
    FindingKind.NOT_DETERMINISTIC: (
        "Replays on one worker, a session at a time, differ here: something random, a time, or state that outlives its "
        "session. This says nothing about workers; the value was left out of the comparison."
    ),
    FindingKind.SESSIONS_MIX: (
        "On one worker alone, sessions change each other's state. Keep it in a dict of the server object under "
        "request.session[SESSION_ID_KEY], not in a module or class variable that all sessions share."
    ),
    FindingKind.STATE_LOST: (
        "State did not follow its session. Keep it under request.session[SESSION_ID_KEY] in the process, set it up in "
        "seed_session alone, and share nothing between sessions that workers would have to share."
    ),
    FindingKind.WORKER_LOST: "The worker that held the session ended in the middle of it: look at the server's log.",
    FindingKind.ONE_WORKER_ONLY: "All connections came to the same worker, so nothing was found out. Try again.",
    FindingKind.NOT_ROUTED: (
        "Sessions name no worker: routes_sessions is False, and each request goes to any worker. "
        "Right for a server without state per session only."
    ),
}
NOT_ROUTED_HINT: Final = (
    "Its sessions name no worker, so each request went to any of them. Leave routes_sessions at True, and keep the "
    "session middleware of super().setup_webserver()."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Args:
        kind: What it is about.
        is_fault: Whether the check has failed by it; else it is good to know.
        hint: What it means and what to do.
        task_index: The row's place in its file, from 0; None when it is about the server as a whole.
        row_id: The row's `id`, where it has one.
        request: Which request of the session.
        path: Where in its reply; "" for the reply as a whole.
        expected: What one worker answers there, a session at a time.
        answered: What was answered instead.
    """

    kind: FindingKind
    is_fault: bool
    hint: str
    task_index: int | None = None
    row_id: str | None = None
    request: str = ""
    path: str = ""
    expected: str = ""
    answered: str = ""


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The outcome of a check.

    Args:
        server: The resources server's instance name.
        num_workers: With how many workers.
        rows: How many rows there were.
        replayed: Sessions replayed on several workers; 0 when it did not come to that.
        workers_reached: How many workers the requests came to; None when that can't be told.
        findings: What was found.
        unexamined: Further rows that differed and were not looked at more closely.
        log_dirs: Where the servers' logs are.
    """

    server: str
    num_workers: int
    rows: int
    replayed: int
    workers_reached: int | None
    findings: Sequence[Finding]
    unexamined: int
    log_dirs: Sequence[str]

    @property
    def passed(self) -> bool:
        """Whether no fault was found."""
        return not any(finding.is_fault for finding in self.findings)


def difference_found(kind: FindingKind, script: Script, difference: Difference, hint: str | None = None) -> Finding:
    """Return the finding for a replay that differs."""
    if difference.reply.session_lost:
        kind, hint = FindingKind.WORKER_LOST, None
    return Finding(
        kind=kind,
        is_fault=True,
        hint=hint or HINTS[kind],
        task_index=script.task_index,
        row_id=script.row_id,
        request=script.requests[difference.position].name,
        path=path_text(difference.path),
        expected=difference.expected,
        answered=difference.answered,
    )


def unstable_found(script: Script, unstable: Sequence[tuple[int, tuple[str | int, ...], list[str]]]) -> Finding:
    """Return the finding for a script whose replies differ from one replay on one worker to the next.

    It is a fault where a status or the reward is among what differs: then the check could not be made.
    """
    undecided = [(place, path, values) for place, path, values in unstable if path in (STATUS, REWARD)]
    position, path, values = (undecided or unstable)[0]
    return Finding(
        kind=FindingKind.NOT_DETERMINISTIC,
        is_fault=bool(undecided),
        hint=HINTS[FindingKind.NOT_DETERMINISTIC],
        task_index=script.task_index,
        row_id=script.row_id,
        request=script.requests[position].name,
        path=path_text(path) or "status",
        expected=values[0],
        answered=values[1],
    )
