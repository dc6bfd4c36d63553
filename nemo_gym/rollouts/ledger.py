"""The bookkeeping of a running collection: which agent a row goes to, and what became of every rollout.

An outcome goes to its file first, then into the counts, then to whoever shows progress: what is told as
finished is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson
from omegaconf import DictConfig

from nemo_gym.errors import UsageError, did_you_mean
from nemo_gym.global_config import (
    AGENT_REF_KEY_NAME,
    ATTEMPT_INDEX_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    ROLLOUT_SECONDS_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.rollouts.attempts import NG_FAILURE_CLASS_KEY, SESSION_LOST, RolloutFailure, RolloutResult
from nemo_gym.rollouts.events import EventHandler, RolloutFailed, RolloutFinished, RolloutRunAgain
from nemo_gym.rollouts.io import (
    DURATION_KEY,
    ROW_DIGEST_KEY,
    FailuresFile,
    InputRow,
    ResultsFile,
    RolloutSet,
    format_digest,
)


@dataclass(frozen=True, slots=True)
class CollectionSummary:
    """How far a collection is.

    Args:
        total: Rollouts that it has.
        already_done: How many of them an earlier run finished.
        finished: How many this run finished.
        failed: How many failed in this run.
        run_again: Attempts that this run made anew.
        lost_sessions: How many of these because their session was lost.
        duration_s: How long this run has lasted, in seconds.
    """

    total: int = 0
    already_done: int = 0
    finished: int = 0
    failed: int = 0
    run_again: int = 0
    lost_sessions: int = 0
    duration_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every rollout has its result."""
        return self.already_done + self.finished == self.total


class LedgerError(Exception):
    """Raised when an outcome can't be written."""


class Ledger:
    """Writes outcomes, counts them and tells of them.

    Args:
        results: The output file.
        failures: The failures file.
        rollouts: The collection's rollouts that have their result; results are added.
        on_event: Told of every outcome.
    """

    def __init__(
        self, results: ResultsFile, failures: FailuresFile, rollouts: RolloutSet, on_event: EventHandler
    ) -> None:
        self.rollouts = rollouts
        self._results = results
        self._failures = failures
        self._on_event = on_event
        self._already_done = len(rollouts)
        self._failed = 0
        self._run_again = self._lost_sessions = 0
        self._began = time.monotonic()

    def statistics(self) -> CollectionSummary:
        """Return the counts as they are now."""
        return CollectionSummary(
            total=self.rollouts.total,
            already_done=self._already_done,
            finished=len(self.rollouts) - self._already_done,
            failed=self._failed,
            run_again=self._run_again,
            lost_sessions=self._lost_sessions,
            duration_s=time.monotonic() - self._began,
        )

    def add_result(
        self, row: InputRow, rollout_index: int, agent: str, content: dict[str, Any], result: RolloutResult
    ) -> None:
        """Keep the result of a rollout; one that can't be written as JSON is a failure.

        Args:
            row: Its row.
            rollout_index: Which of the row's rollouts.
            agent: The agent that made it.
            content: The row's JSON object.
            result: What the agent answered.

        Raises:
            LedgerError: It could not be written.
        """
        line = {
            **result.reply,
            AGENT_REF_KEY_NAME: {"type": "responses_api_agents", "name": agent},
            TASK_INDEX_KEY_NAME: row.task_index,
            ROLLOUT_INDEX_KEY_NAME: rollout_index,
            ATTEMPT_INDEX_KEY_NAME: result.attempt_index,
            DURATION_KEY: round(result.duration_s, 4),
            ROLLOUT_SECONDS_KEY_NAME: _seconds_by_part(result),
            ROW_DIGEST_KEY: format_digest(row.digest),
        }
        try:
            self._results.append(line)
        except orjson.JSONEncodeError as error:
            reason = f"the reply of agent '{agent}' can't be written as JSON: {error}"
            failure = RolloutFailure("bad_reply", reason, attempts=result.attempt_index + 1)
            self.add_failure(row, rollout_index, content, failure)
            return
        except OSError as error:
            raise LedgerError(f"can't write {self._results.path}: {error.strerror}") from error
        self.rollouts.add(row.task_index, rollout_index)
        self._on_event(RolloutFinished(row.task_index, rollout_index, result.reward, result.duration_s))

    def add_failure(
        self, row: InputRow, rollout_index: int, content: dict[str, Any] | None, failure: RolloutFailure
    ) -> None:
        """Keep the failure of a rollout.

        Args:
            row: Its row.
            rollout_index: Which of the row's rollouts.
            content: The row's JSON object, or None where the row is bad.
            failure: What went wrong.

        Raises:
            LedgerError: It could not be written.
        """
        line = {
            TASK_INDEX_KEY_NAME: row.task_index,
            ROLLOUT_INDEX_KEY_NAME: rollout_index,
            NG_FAILURE_CLASS_KEY: failure.failure_class,
            "reason": failure.reason,
            "status": failure.status,
            "attempts": failure.attempts,
            DURATION_KEY: round(failure.duration_s, 4),
            "line": row.line_number,
            "row": _writable(content),
            "reply": _writable(failure.reply),
        }
        try:
            self._failures.append(line)
        except OSError as error:
            raise LedgerError(f"can't write {self._failures.path}: {error.strerror}") from error
        self._failed += 1
        self._on_event(RolloutFailed(row.task_index, rollout_index, failure.failure_class, failure.reason))

    def tidy_failures(self) -> None:
        """Leave in the failures file one line for each rollout that has failed and has no result since.

        Raises:
            LedgerError: It could not be written.
        """
        try:
            self._failures.tidy(self.rollouts)
        except OSError as error:
            raise LedgerError(f"can't write {self._failures.path}: {error.strerror}") from error

    def add_run_again(
        self, row: InputRow, rollout_index: int, attempt_index: int, failure_class: str, reason: str
    ) -> None:
        """Count an attempt that is made anew."""
        self._run_again += 1
        self._lost_sessions += failure_class == SESSION_LOST
        self._on_event(RolloutRunAgain(row.task_index, rollout_index, attempt_index, reason, failure_class))


def _seconds_by_part(result: RolloutResult) -> dict[str, Any]:
    """Return where the time of an attempt went, as far as the agent tells, and the whole of it."""
    told = result.reply.get(ROLLOUT_SECONDS_KEY_NAME)
    parts = told.items() if isinstance(told, dict) else ()
    seconds = {name: value for name, value in parts if type(value) in (float, int)}
    return {**seconds, "total": round(result.duration_s, 4)}


def _writable(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `value`, or None where it is too deep to stand in a line of JSON: more can be read than written."""
    try:
        orjson.dumps({"value": value})
    except orjson.JSONEncodeError:
        return None
    return value


class AgentChoice:
    """Tells which agent makes a row's rollouts: the one asked for, else the row's own, else the only one.

    Args:
        asked: The agent that was asked for, or None.
        config: The resolved configuration.

    Raises:
        UsageError: There is no agent, or not the one asked for.
    """

    def __init__(self, asked: str | None, config: DictConfig) -> None:
        self._agents = [
            str(name)
            for name, settings in config.items()
            if isinstance(settings, DictConfig) and "responses_api_agents" in settings
        ]
        if not self._agents:
            raise UsageError("the configuration has no agent to make rollouts")
        if asked is not None:
            self._check(asked, self._agents)
        self._asked = asked
        self._only = self._agents[0] if len(self._agents) == 1 else None

    def choose(self, content: dict[str, Any]) -> str:
        """Return the agent of a row.

        Raises:
            UsageError: The row names none where it has to, or one that the configuration does not have.
        """
        if self._asked is not None:
            return self._asked
        reference = content.get(AGENT_REF_KEY_NAME)
        if reference is None:
            if self._only is None:
                raise UsageError(
                    f"the row has no {AGENT_REF_KEY_NAME}, and the configuration has several agents: "
                    + ", ".join(self._agents)
                )
            return self._only
        name = reference.get("name") if isinstance(reference, dict) else None
        if not isinstance(name, str):
            raise UsageError(f"the row's {AGENT_REF_KEY_NAME} has no name")
        self._check(name, self._agents)
        return name

    @property
    def name(self) -> str:
        """The agent of every row; empty where each row has to name its own."""
        return self._asked or self._only or ""

    @staticmethod
    def _check(name: str, agents: list[str]) -> None:
        if name not in agents:
            hint = did_you_mean(name, agents) or f"It has: {', '.join(agents)}."
            raise UsageError(f"the configuration has no agent '{name}'. {hint}")
