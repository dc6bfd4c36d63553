"""One rollout: attempts at an agent's `/run` until there is a result or a reason why there is none.

A reply is a result only when it is a JSON object with a finite number as `reward`. Two kinds of trouble begin
the rollout anew, from its seed and with nothing kept of the attempt before: a lost session (410), and trouble
that passes by itself (429, 502, 503, 504, a broken connection). Everything else is a failure at once. An
agent that can't be reached at all is no rollout's failure: it raises, for the run can't go on.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import aiohttp
import orjson

from nemo_gym.global_config import (
    ATTEMPT_INDEX_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    ROLLOUT_SECONDS_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.logs import rollout_id
from nemo_gym.server.tracing import NO_TRACING
from nemo_gym.server_utils import ServerClient

NG_FAILURE_CLASS_KEY: Final = "_ng_failure_class"
"""In a reply of `/run`: the rollout failed, and this word says how. In a failures file: the kind of failure."""

NG_TERMINAL_KEY: Final = "_ng_terminal"
"""In a reply of `/run` that tells a failure: true when another attempt would fail as well."""

NG_NO_PERSIST_KEY: Final = "_ng_no_persist"
"""In a reply of `/run`: true when it must not stand among the results."""

_KEYS_OF_REPLIES: Final = (ROLLOUT_SECONDS_KEY_NAME, NG_FAILURE_CLASS_KEY, NG_TERMINAL_KEY, NG_NO_PERSIST_KEY)

SESSION_LOST: Final = "session_lost"
"""The class of the failure of a rollout whose session is gone."""

RunAgainHandler: TypeAlias = Callable[[int, str, str], None]

TRANSIENT_STATUSES: Final = frozenset({429, 502, 503, 504})
SESSION_LOST_STATUS: Final = 410

_DETAIL_LIMIT: Final = 2_000
_FIRST_BACKOFF_S: Final = 0.25
_LONGEST_BACKOFF_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout to be made.

    Args:
        task_index: The row.
        rollout_index: Which of the row's rollouts.
        agent: The agent server's instance name.
        row: What is posted to it, without the framework's indices.
    """

    task_index: int
    rollout_index: int
    agent: str
    row: dict[str, Any]

    @property
    def name(self) -> str:
        """How logs and traces name it."""
        return f"{self.task_index}-{self.rollout_index}"


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A rollout that has its reward.

    Args:
        reply: The agent's reply.
        reward: Its reward, a finite number.
        attempt_index: The attempt that made it, from 0.
        duration_s: How long that attempt took, in seconds.
    """

    reply: dict[str, Any]
    reward: float
    attempt_index: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout that has no reward.

    Args:
        failure_class: One word for the kind: `bad_row`, `no_agent`, `http_error`, `session_lost`,
            `connection_lost`, `timeout`, `bad_reply`, or what the agent's reply says.
        reason: A sentence for people.
        attempts: How many attempts were made.
        status: The last reply's HTTP status, or None where there was no reply.
        duration_s: How long all attempts took together, in seconds.
        reply: The last reply, where it was a JSON object.
    """

    failure_class: str
    reason: str
    attempts: int
    status: int | None = None
    duration_s: float = 0.0
    reply: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """How long and how often a rollout is tried.

    Args:
        max_attempts: Attempts that may end in passing trouble before the rollout has failed.
        max_session_attempts: Attempts that may end in a lost session before the rollout has failed.
        timeout_s: Seconds that one attempt may take; no limit when None.
        connect_patience_s: Seconds during which an agent that refuses connections is tried again.
    """

    max_attempts: int = 3
    max_session_attempts: int = 5
    timeout_s: float | None = None
    connect_patience_s: float = 60.0


class AgentUnreachableError(Exception):
    """Raised when no connection to an agent could be made, however patiently."""


async def run_rollout(
    client: ServerClient,
    rollout: Rollout,
    limits: AttemptLimits,
    on_run_again: RunAgainHandler,
) -> RolloutResult | RolloutFailure:
    """Make one rollout.

    Args:
        client: Knows the agent.
        rollout: What to run.
        limits: How long and how often it is tried.
        on_run_again: Called with the index of the attempt that is about to begin, the class of the trouble that ended
            the last, and the reason in a sentence.

    Raises:
        AgentUnreachableError: No connection to the agent could be made.
        ServerNotFoundError: The configuration has no such agent.
    """
    allowed = {_Again.NEVER: 1, _Again.SESSION: limits.max_session_attempts, _Again.TRANSIENT: limits.max_attempts}
    troubles: Counter[_Again] = Counter()
    attempt_index = 0
    tracing = client.tracing or NO_TRACING
    first_began = time.monotonic()
    while True:
        began = time.monotonic()
        named = rollout_id.set(rollout.name)  # for the servers' logs
        try:
            with tracing.attempt(attempt_index) as traced:
                outcome = await _attempt(client, rollout, attempt_index, limits)
                if isinstance(outcome, _Trouble):
                    traced.failed(outcome.failure_class)
        finally:
            rollout_id.reset(named)
        now = time.monotonic()
        if not isinstance(outcome, _Trouble):
            return RolloutResult(outcome, float(outcome["reward"]), attempt_index, now - began)
        attempt_index += 1
        troubles[outcome.again] += 1
        if troubles[outcome.again] >= allowed[outcome.again]:
            return RolloutFailure(
                failure_class=outcome.failure_class,
                reason=outcome.reason,
                attempts=attempt_index,
                status=outcome.status,
                duration_s=now - first_began,
                reply=outcome.reply,
            )
        on_run_again(attempt_index, outcome.failure_class, outcome.reason)
        await asyncio.sleep(_backoff_s(troubles[outcome.again]))


def is_terminal_failure(result: dict[str, Any]) -> bool:
    """Return whether a reply of `/run` tells a failure that another attempt would meet as well."""
    return bool(result.get(NG_FAILURE_CLASS_KEY)) and bool(result.get(NG_TERMINAL_KEY))


class _Again(Enum):
    NEVER = "never"
    SESSION = "session"
    TRANSIENT = "transient"


@dataclass(frozen=True, slots=True)
class _Trouble:
    failure_class: str
    reason: str
    again: _Again = _Again.NEVER
    status: int | None = None
    reply: dict[str, Any] | None = None


async def _attempt(
    client: ServerClient, rollout: Rollout, attempt_index: int, limits: AttemptLimits
) -> dict[str, Any] | _Trouble:
    request = {
        **rollout.row,
        TASK_INDEX_KEY_NAME: rollout.task_index,
        ROLLOUT_INDEX_KEY_NAME: rollout.rollout_index,
        ATTEMPT_INDEX_KEY_NAME: attempt_index,
    }
    for key in _KEYS_OF_REPLIES:
        request.pop(key, None)  # of a row that was a result or a failure; an agent that echoes rows would tell it
    agent = f"agent '{rollout.agent}'"
    try:
        body = orjson.dumps(request)
    except orjson.JSONEncodeError as error:
        return _Trouble("bad_row", f"the row can't be written as JSON: {error}")
    try:
        async with asyncio.timeout(limits.timeout_s):
            response = await client.post(
                server_name=rollout.agent,
                url_path="/run",
                data=body,
                headers={"Content-Type": "application/json"},
                connect_patience=limits.connect_patience_s,
            )
            async with response:
                answer = await response.read()
    except aiohttp.ServerTimeoutError as error:
        return _Trouble("connection_lost", f"{agent} did not take the connection: {error}", _Again.TRANSIENT)
    except TimeoutError:
        return _Trouble("timeout", f"{agent} did not answer within {limits.timeout_s} s")
    except aiohttp.ClientConnectorError as error:
        raise AgentUnreachableError(f"can't connect to {agent}: {error}") from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
        reason = f"the connection to {agent} broke before it had answered: {error}"
        return _Trouble("connection_lost", reason, _Again.TRANSIENT)
    except aiohttp.ClientError as error:
        return _Trouble("bad_reply", f"{agent} did not answer in HTTP: {error}")
    return _judge(response.status, answer, agent)


def _judge(status: int, body: bytes, agent: str) -> dict[str, Any] | _Trouble:
    if status == SESSION_LOST_STATUS:
        return _Trouble(SESSION_LOST, f"{agent} lost its session: {_detail(body)}", _Again.SESSION, status)
    if not 200 <= status < 300:
        again = _Again.TRANSIENT if status in TRANSIENT_STATUSES else _Again.NEVER
        return _Trouble("http_error", f"{agent} answered {status}: {_detail(body)}", again, status)
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _Trouble("bad_reply", f"{agent} answered with invalid JSON: {error}", status=status)
    if not isinstance(reply, dict):
        return _Trouble("bad_reply", f"{agent} answered with JSON that is no object", status=status)
    if reply.get(NG_FAILURE_CLASS_KEY):
        again = _Again.NEVER if is_terminal_failure(reply) else _Again.TRANSIENT
        failure_class = str(reply[NG_FAILURE_CLASS_KEY])
        return _Trouble(failure_class, f"{agent} reports the failure {failure_class}", again, status, reply)
    if reply.get(NG_NO_PERSIST_KEY):
        return _Trouble("not_persisted", f"{agent} asks not to keep its reply", status=status, reply=reply)
    reward = reply.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
        found = "no reward" if "reward" not in reply else f"the reward {orjson.dumps(reward).decode()[:80]}"
        return _Trouble("bad_reply", f"{agent} answered with {found}, not a finite number", status=status, reply=reply)
    return reply


def _detail(body: bytes) -> str:
    """Return what an error reply says: its `detail`, or its text."""
    try:
        detail = orjson.loads(body)["detail"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        text = body.decode("utf-8", "replace").strip()
    else:
        text = detail if isinstance(detail, str) else orjson.dumps(detail).decode()
    if len(text) > _DETAIL_LIMIT:
        return text[:_DETAIL_LIMIT] + "..."
    return text or "(an empty body)"


def _backoff_s(troubles: int) -> float:
    longest = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (troubles - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311
