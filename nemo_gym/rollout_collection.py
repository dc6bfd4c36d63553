"""Many rollouts: input rows in, one line of output each, whatever happens in between.

A collector posts every row of a JSONL file `num_repeats` times to an agent's `/run`, so many at once, and appends
each reply to the output file as soon as it has it. It holds neither rows nor replies; its memory does not grow
with the length of the run.

Entering a collector reads the input and the output and refuses what can't be run; `collect` makes the rollouts. So
whoever has servers to start can do it in between, and `run` does both for those who have not.

What is done is what stands in the output. A failed rollout stands in the failures file and is no result: a
later run with `resume` makes it again, like every rollout that was under way when a run ended. A run ends
early, with `RolloutsStoppedError`, when it can't go on (an agent can't be reached, the disk is full, `stop`
was called), and on cancellation; what was finished is kept.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from nemo_gym import __version__
from nemo_gym.config_types import server_url
from nemo_gym.errors import DatasetError, NemoGymError, UsageError
from nemo_gym.global_config import get_global_config_dict
from nemo_gym.rollouts.attempts import (
    NG_FAILURE_CLASS_KEY as NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY as NG_NO_PERSIST_KEY,
    NG_TERMINAL_KEY as NG_TERMINAL_KEY,
    AgentUnreachableError,
    AttemptLimits,
    Rollout,
    RolloutFailure,
    is_terminal_failure as is_terminal_failure,
    run_rollout,
)
from nemo_gym.rollouts.events import CollectionStarted, EventHandler, RolloutEvent, RolloutStarted
from nemo_gym.rollouts.io import (
    FailuresFile,
    InputRow,
    ResultsFile,
    RolloutSet,
    index_input,
    read_rows,
)
from nemo_gym.rollouts.ledger import AgentChoice, CollectionSummary, Ledger, LedgerError
from nemo_gym.rollouts.record import RolloutFiles, RunRecord
from nemo_gym.rollouts.recorder import RunRecorder
from nemo_gym.rollouts.tally import RunTally
from nemo_gym.server.tracing import NO_TRACING
from nemo_gym.server_utils import ServerClient

_LINES_BETWEEN_BREATHS = 256


class RolloutCollectionConfig(BaseModel):
    """What to collect, from where and how.

    Args:
        input_path: The JSONL file of rows.
        output_path: The JSONL file of results; `RolloutFiles` names the files beside it.
        agent: The agent server's instance name. When None, a row's `agent_ref` chooses, else the only agent
            of the configuration.
        limit: Only the first so many rows.
        num_repeats: Rollouts per row.
        concurrency: Rollouts under way at once.
        responses_create_params: Put over every row's own `responses_create_params`, key by key.
        resume: Continue a non-empty output.
        overwrite: Replace a non-empty output.
        rollout_timeout_s: Seconds that one attempt at a rollout may take.
        max_attempts: Attempts that may end in passing trouble before a rollout has failed.
        max_session_attempts: Attempts that may end in a lost session before a rollout has failed.
        connect_patience_s: Seconds during which an agent that refuses connections is tried again.
        run_settings: Whatever else must be the same for results to belong together (a model's name, say);
            kept in the run's record and compared on resume.
    """

    model_config = ConfigDict(populate_by_name=True)

    input_path: Path = Field(validation_alias=AliasChoices("input_path", "input_jsonl_fpath"))
    output_path: Path = Field(validation_alias=AliasChoices("output_path", "output_jsonl_fpath"))
    agent: str | None = Field(default=None, validation_alias=AliasChoices("agent", "agent_name"))
    limit: PositiveInt | None = None
    num_repeats: PositiveInt = 1
    concurrency: PositiveInt = Field(
        default=64, validation_alias=AliasChoices("concurrency", "num_samples_in_parallel")
    )
    responses_create_params: dict[str, Any] = Field(default_factory=dict)
    resume: bool = Field(default=False, validation_alias=AliasChoices("resume", "resume_from_cache"))
    overwrite: bool = False
    rollout_timeout_s: PositiveFloat | None = None
    max_attempts: PositiveInt = 3
    max_session_attempts: PositiveInt = 5
    connect_patience_s: PositiveFloat = 60.0
    run_settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _resume_or_overwrite(self) -> RolloutCollectionConfig:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        return self

    @property
    def files(self) -> RolloutFiles:
        """The files that a run writes."""
        return RolloutFiles(self.output_path)


class RolloutsStoppedError(NemoGymError):
    """Raised when a run ended before its rollouts did; what was finished is kept.

    Args:
        reason: Why it could not go on.
        summary: How far it came.
    """

    def __init__(self, reason: str, summary: CollectionSummary) -> None:
        self.reason = reason
        self.summary = summary
        super().__init__(reason)


class RolloutCollector:
    """One run of a collection. Make a new one for the next.

    As a context manager it holds the output's lock: `async with collector: await collector.collect()`.

    Args:
        config: What to collect.
        client: Knows the agents; its connection pool belongs to the caller.
        on_event: Told of every step, on the event loop; what it raises ends the run.
        tally: Counts the run's events, each before `on_event` is told of it; one of its own when None.
    """

    def __init__(
        self,
        config: RolloutCollectionConfig,
        client: ServerClient,
        *,
        on_event: EventHandler | None = None,
        tally: RunTally | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.tally = tally or RunTally()
        self._on_event = on_event
        self._limits = AttemptLimits(
            max_attempts=config.max_attempts,
            max_session_attempts=config.max_session_attempts,
            timeout_s=config.rollout_timeout_s,
            connect_patience_s=config.connect_patience_s,
        )
        self._opened: _Opened | None = None
        self._ledger: Ledger | None = None
        self._recorder: RunRecorder | None = None
        self._stop_reason = ""
        self._stop_requested = asyncio.Event()

    def statistics(self) -> CollectionSummary:
        """Return how far the run is now."""
        return self._ledger.statistics() if self._ledger else CollectionSummary()

    def stop(self, reason: str) -> None:
        """End the run at once, keeping what is finished; `run` raises `RolloutsStoppedError` with `reason`.

        Call it on the event loop, for example when a server that the run needs has died.
        """
        self._stop_reason = reason
        self._stop_requested.set()

    async def run(self) -> CollectionSummary:
        """Make every rollout that the output does not hold yet: enter, `collect`, leave."""
        async with self:
            return await self.collect()

    async def __aenter__(self) -> Self:
        """Read the input, lock and read the output. Nothing is written, apart from an output that did not exist.

        Raises:
            DatasetError: The input can't be read or has no rows, or the output holds what is not of this run.
            UsageError: The output exists and neither `resume` nor `overwrite` is set, it was made with other
                settings, another process is writing it, or there is no such agent.
        """
        config = self.config
        self._check_input_is_no_output()
        agents = AgentChoice(config.agent, self.client.global_config_dict)
        digests = array("Q")
        await _exhaust(index_input(config.input_path, digests, config.limit))
        rollouts = RolloutSet(digests, config.num_repeats)
        results = ResultsFile.open(config.output_path)
        try:
            record = await self._read_output(results, rollouts)
        except BaseException:
            results.close()
            raise
        self._opened = _Opened(agents, rollouts, results, record)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None
        if self._ledger is None:
            self._opened.results.remove_if_new()
        self._opened.results.close()
        if self._recorder is not None:
            self._recorder.finish(exc)

    async def collect(self) -> CollectionSummary:
        """Make every rollout that the output does not hold yet.

        Returns:
            How it went. A failed rollout raises nothing here: it is counted, and stands in the failures file.

        Raises:
            DatasetError: The failures file is none.
            NemoGymError: The run's record can't be written, or a file of an earlier run not removed.
            RolloutsStoppedError: The run could not go on.
        """
        assert self._opened is not None, "enter the collector first"
        opened, files = self._opened, self.config.files
        if not self.config.resume:
            opened.results.clear()
            files.remove_outcomes()
        opened.record.save(files.run_record)
        failures = FailuresFile(files.failures)
        self._ledger = ledger = Ledger(opened.results, failures, opened.rollouts, self._tell)
        try:
            ledger.tidy_failures()
            self._tell(CollectionStarted(opened.rollouts.total, len(opened.rollouts)))
            self._start_recording(opened.agents)
            await self._make_all(ledger, opened.agents)
            ledger.tidy_failures()
        except (_StopError, LedgerError) as stop:
            raise RolloutsStoppedError(str(stop), ledger.statistics()) from stop.__cause__
        finally:
            failures.close()
        return ledger.statistics()

    def _tell(self, event: RolloutEvent) -> None:
        self.tally(event)
        if self._on_event is not None:
            self._on_event(event)

    def _start_recording(self, agents: AgentChoice) -> None:
        head = self.client.head_server_config
        self._recorder = RunRecorder(
            self.tally,
            agent=agents.name,
            output=self.config.output_path,
            head_url=server_url(head.host, head.port) if head.port else None,
        )
        self._recorder.start()

    def _check_input_is_no_output(self) -> None:
        files = self.config.files
        for path in (files.output, files.failures, files.run_record, files.metrics):
            with suppress(OSError):  # one of them is missing
                if path.samefile(self.config.input_path):
                    raise UsageError(
                        f"{self.config.input_path} is the input and would be written too; choose another output"
                    )

    async def _read_output(self, results: ResultsFile, rollouts: RolloutSet) -> RunRecord:
        """Add the rollouts that the output holds to `rollouts`, or refuse it; return the record of this run."""
        config, files = self.config, self.config.files
        if results.size and not (config.resume or config.overwrite):
            raise UsageError(
                f"{files.output} holds results already; "
                "continue it with --resume, replace it with --overwrite, or choose another output"
            )
        record = RunRecord(
            input=str(config.input_path.resolve()),
            agent=config.agent,
            responses_create_params=config.responses_create_params,
            settings=config.run_settings,
            num_repeats=config.num_repeats,
            limit=config.limit,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            nemo_gym_version=__version__,
        )
        if not (results.size and config.resume):
            return record
        before = RunRecord.load(files.run_record)
        if before is not None:
            before.check_same_run(record, files.output)
            record = replace(record, started_at=before.started_at)
        await _exhaust(results.scan(rollouts))
        return record

    async def _make_all(self, ledger: Ledger, agents: AgentChoice) -> None:
        jobs = self._jobs(ledger.rollouts)
        size = min(self.config.concurrency, ledger.rollouts.total - len(ledger.rollouts))
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch_for_stop())
                workers = [group.create_task(self._work(jobs, ledger, agents)) for _ in range(size)]
                if workers:
                    await asyncio.wait(workers)
                watcher.cancel()
        except ExceptionGroup as failed:
            # The first to fail ended the others; what they say of that is not news.
            first = failed.exceptions[0]
            raise first from first.__cause__

    def _jobs(self, rollouts: RolloutSet) -> Iterator[tuple[InputRow, int]]:
        """Yield the rollouts to be made, of exactly the rows that were read when the run began."""
        digests = rollouts.row_digests
        rows_read = 0
        for row in read_rows(self.config.input_path, len(digests)):
            if row.digest != digests[row.task_index]:
                break
            rows_read += 1
            for rollout_index in range(self.config.num_repeats):
                if (row.task_index, rollout_index) not in rollouts:
                    yield row, rollout_index
        if rows_read < len(digests):
            raise _StopError(f"{self.config.input_path}: row {rows_read} has changed since the run began")

    async def _watch_for_stop(self) -> None:
        await self._stop_requested.wait()
        raise _StopError(self._stop_reason)

    async def _work(self, jobs: Iterator[tuple[InputRow, int]], ledger: Ledger, agents: AgentChoice) -> None:
        for row, rollout_index in jobs:
            self._tell(RolloutStarted(row.task_index, rollout_index))
            await self._make(row, rollout_index, ledger, agents)

    async def _make(self, row: InputRow, rollout_index: int, ledger: Ledger, agents: AgentChoice) -> None:
        try:
            content = row.parse()
        except DatasetError as error:
            reason = f"line {row.line_number} of the input: {error}"
            ledger.add_failure(row, rollout_index, None, RolloutFailure("bad_row", reason, attempts=0))
            await asyncio.sleep(0)  # a file of bad rows must not block the loop
            return
        try:
            agent = agents.choose(content)
        except UsageError as error:
            ledger.add_failure(row, rollout_index, content, RolloutFailure("no_agent", str(error), attempts=0))
            await asyncio.sleep(0)
            return
        rollout = Rollout(row.task_index, rollout_index, agent, self._with_overrides(content))

        run_again = partial(ledger.add_run_again, row, rollout_index)
        try:
            with (self.client.tracing or NO_TRACING).rollout(rollout.name, agent) as traced:
                outcome = await run_rollout(self.client, rollout, self._limits, run_again)
                if isinstance(outcome, RolloutFailure):
                    traced.failed(outcome.failure_class)
        except AgentUnreachableError as error:
            raise _StopError(str(error)) from error
        if isinstance(outcome, RolloutFailure):
            ledger.add_failure(row, rollout_index, content, outcome)
        else:
            ledger.add_result(row, rollout_index, agent, content, outcome)

    def _with_overrides(self, content: dict[str, Any]) -> dict[str, Any]:
        overrides = self.config.responses_create_params
        own = content.get("responses_create_params", {})
        if not overrides or not isinstance(own, dict):
            return content
        return {**content, "responses_create_params": {**own, **overrides}}


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a collector that was entered holds: who makes rollouts, which are made, and where results go."""

    agents: AgentChoice
    rollouts: RolloutSet
    results: ResultsFile
    record: RunRecord


class RolloutCollectionHelper:
    """The name under which environments know the collector: servers and configuration are those of this process."""

    async def run_from_config(self, config: RolloutCollectionConfig) -> CollectionSummary:
        """Collect rollouts; see `RolloutCollector.run`. The caller closes the client (`close_client`)."""
        client = ServerClient.from_config(get_global_config_dict())
        return await RolloutCollector(config, client).run()


class _StopError(Exception):
    """Raised inside a run when it can't go on."""


async def _exhaust(steps: Iterator[None]) -> None:
    """Run through an iterator, letting the event loop breathe in between."""
    for number, _ in enumerate(steps):
        if number % _LINES_BETWEEN_BREATHS == 0:
            await asyncio.sleep(0)
