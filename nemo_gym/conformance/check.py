"""The check itself: which servers are started, what is replayed on them, and what follows from the replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from nemo_gym.config_types import SERVER_KINDS
from nemo_gym.conformance.replay import Connections, replay, replay_interleaved, session_of
from nemo_gym.conformance.replies import Difference, Expectation, Reply, shortened
from nemo_gym.conformance.report import (
    HINTS,
    NOT_ROUTED_HINT,
    ConformanceReport,
    Finding,
    FindingKind,
    difference_found,
    unstable_found,
)
from nemo_gym.conformance.scripts import Script, row_id_of, script_of
from nemo_gym.deployment import Deployment
from nemo_gym.errors import DatasetError, UsageError
from nemo_gym.global_config import GlobalConfig
from nemo_gym.rollouts.attempts import AttemptLimits, Rollout, RolloutFailure, run_rollout
from nemo_gym.rollouts.io import read_rows
from nemo_gym.server_utils import ServerClient, close_client

# A value that differed may be one that changes by itself and happened not to. A coin falls the same way so often
# once in a million.
_CONFIRMATIONS: Final = 20
_REPORTED_ROWS: Final = 5


@dataclass(frozen=True, slots=True)
class ConformanceJob:
    """What to check.

    Args:
        config: A resolved configuration with the server, an agent for it and the agent's model.
        server: The resources server's instance name.
        agent: The agent's.
        input_path: The dataset of example rows.
        num_workers: With how many workers, at least 2.
        limit: Only the first so many rows.
    """

    config: GlobalConfig
    server: str
    agent: str
    input_path: Path
    num_workers: int
    limit: int | None = None


async def check_conformance(
    job: ConformanceJob,
    *,
    deploy: Callable[[GlobalConfig], Deployment] = Deployment,
    on_progress: Callable[[str], None] = lambda text: None,
) -> ConformanceReport:
    """Find out whether a resources server answers the same with several workers as with one.

    Args:
        job: What to check.
        deploy: Makes the deployment of a configuration.
        on_progress: Told what is being done.

    Raises:
        DatasetError: A row can't be read.
        UsageError: There are no rows.
        NemoGymError: The servers could not be started, or have stopped.
    """
    return await _Check(job, deploy, on_progress).run()


@dataclass(slots=True)
class _Case:
    """One row: what is replayed, what one worker answers to it, and the replay that differed, if one did."""

    script: Script
    expectation: Expectation
    odd_replies: Sequence[Reply] = ()

    def difference(self) -> Difference | None:
        return self.expectation.difference(self.odd_replies) if self.odd_replies else None


class _Check:
    def __init__(
        self,
        job: ConformanceJob,
        deploy: Callable[[GlobalConfig], Deployment],
        on_progress: Callable[[str], None],
    ) -> None:
        self._job = job
        self._deploy = deploy
        self._on_progress = on_progress
        self._cases: list[_Case] = []
        self._findings: list[Finding] = []
        self._log_dirs: list[str] = []
        self._unexamined = 0
        self._replayed = 0
        self._workers_reached: int | None = None

    async def run(self) -> ConformanceReport:
        rows = _read(self._job.input_path, self._job.limit)
        async with self._serving(self._job.agent, num_workers=1) as connections:
            await self._record(rows)
            await self._learn(connections)
            await self._look_for_mixing(connections)
        mixed = any(finding.kind is FindingKind.SESSIONS_MIX for finding in self._findings)
        if self._cases and not mixed:
            await self._look_for_lost_state()
        if not mixed:
            for case in self._cases:
                if unstable := case.expectation.unstable():
                    self._findings.append(unstable_found(case.script, unstable))
        return ConformanceReport(
            server=self._job.server,
            num_workers=self._job.num_workers,
            rows=len(rows),
            replayed=self._replayed,
            workers_reached=self._workers_reached,
            findings=sorted(self._findings, key=lambda finding: not finding.is_fault),
            unexamined=self._unexamined,
            log_dirs=self._log_dirs,
        )

    @asynccontextmanager
    async def _serving(self, instance: str, num_workers: int) -> AsyncIterator[Connections]:
        """Run `instance` and all that it refers to, and connect to the resources server."""
        config = _with_workers(_part(self._job.config, instance), self._job.server, num_workers)
        async with self._deploy(config) as deployment:
            self._log_dirs.append(str(deployment.log_dir))
            (pid,) = (server.pid for server in deployment.servers if server.instance.name == self._job.server)
            async with Connections(config.instances[self._job.server].url, num_workers, pid) as connections:
                yield connections

    async def _record(self, rows: Sequence[dict[str, Any]]) -> None:
        """Have the agent make a rollout of each row, one at a time, and keep what it asked of the server."""
        self._on_progress(f"Recording {len(rows)} rollouts by {self._job.agent}")
        client = ServerClient.from_config(self._job.config.config_dict)
        limits = AttemptLimits(max_attempts=1, max_session_attempts=1)
        try:
            for index, row in enumerate(rows):
                rollout = Rollout(index, 0, self._job.agent, row)
                outcome = await run_rollout(client, rollout, limits, lambda *_: None)
                if isinstance(outcome, RolloutFailure):
                    self._add(FindingKind.NOT_RECORDED, index, row_id_of(row), answered=shortened(outcome.reason))
                else:
                    script = script_of(index, row, outcome.reply)
                    self._cases.append(_Case(script, Expectation(len(script.requests))))
        finally:
            await close_client()

    async def _learn(self, connections: Connections) -> None:
        """Replay each script twice, alone; what is refused now can't be compared later."""
        self._on_progress(f"Replaying {len(self._cases)} sessions on one worker, one at a time")
        for _ in range(2):
            for case in self._cases:
                case.expectation.learn(await replay(case.script, connections))
        usable = []
        for case in self._cases:
            seeded, verified = case.expectation.replies[0], case.expectation.replies[-1]
            name, refused = ("seed_session", seeded) if not _is_fine(seeded) else ("verify", verified)
            if _is_fine(refused):
                usable.append(case)
                continue
            script = case.script
            self._add(FindingKind.REFUSED, script.task_index, script.row_id, request=name, answered=str(refused))
        self._cases = usable
        if usable and not session_of(usable[0].expectation.replies[0].cookies):
            self._add(FindingKind.NO_SESSION)

    async def _look_for_mixing(self, connections: Connections) -> None:
        self._on_progress("Replaying them woven together on one worker")
        await self._replay_together(connections, num_workers=1)
        for case, difference in await self._confirmed(connections):
            self._findings.append(difference_found(FindingKind.SESSIONS_MIX, case.script, difference))

    async def _look_for_lost_state(self) -> None:
        workers = self._job.num_workers
        self._on_progress(f"Replaying them woven together on {workers} workers, each request on another one")
        async with self._serving(self._job.server, num_workers=workers) as connections:
            self._replayed = await self._replay_together(connections, num_workers=workers)
            self._workers_reached, routed = connections.workers_reached, connections.routed
        if not any(case.difference() for case in self._cases):
            if self._workers_reached == 1:
                self._add(FindingKind.ONE_WORKER_ONLY)
            if not routed:
                self._findings.append(
                    Finding(FindingKind.NOT_ROUTED, is_fault=False, hint=HINTS[FindingKind.NOT_ROUTED])
                )
            return
        self._on_progress("Replaying on one worker again what differed")
        hint = None if routed else NOT_ROUTED_HINT
        async with self._serving(self._job.server, num_workers=1) as connections:
            for case, difference in await self._confirmed(connections):
                self._findings.append(difference_found(FindingKind.STATE_LOST, case.script, difference, hint))

    async def _replay_together(self, connections: Connections, num_workers: int) -> int:
        """Replay all scripts woven together, few ones several times, and keep for each a replay that differed."""
        if not self._cases:
            return 0
        rounds = -(-2 * num_workers // len(self._cases))
        cases = self._cases * rounds
        for case, replies in zip(
            cases, await replay_interleaved([case.script for case in cases], connections), strict=True
        ):
            if not case.difference():
                case.odd_replies = replies
        return len(cases)

    async def _confirmed(self, connections: Connections) -> list[tuple[_Case, Difference]]:
        """Return the rows that still differ after many more replays alone, the first few of them."""
        suspects = [case for case in self._cases if case.difference()]
        confirmed: list[tuple[_Case, Difference]] = []
        for number, case in enumerate(suspects):
            if len(confirmed) == _REPORTED_ROWS:
                self._unexamined = len(suspects) - number
                break
            difference = case.difference()
            for _ in range(_CONFIRMATIONS):
                if difference is None:
                    break
                case.expectation.learn(await replay(case.script, connections))
                difference = case.difference()
            if difference is not None:
                confirmed.append((case, difference))
        return confirmed

    def _add(
        self,
        kind: FindingKind,
        task_index: int | None = None,
        row_id: str | None = None,
        *,
        request: str = "",
        answered: str = "",
    ) -> None:
        self._findings.append(Finding(kind, True, HINTS[kind], task_index, row_id, request=request, answered=answered))


def _is_fine(reply: Reply) -> bool:
    return 200 <= reply.status < 300


def _read(path: Path, limit: int | None) -> list[dict[str, Any]]:
    rows = []
    for row in read_rows(path, limit):
        try:
            rows.append(row.parse())
        except DatasetError as error:
            raise DatasetError(f"{path}, line {row.line_number}: {error}") from error
    if not rows:
        raise UsageError(f"{path} has no rows to replay")
    return rows


def _part(config: GlobalConfig, name: str) -> GlobalConfig:
    """Return the part of a configuration that an instance needs: itself and all that it refers to."""
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in needed:
            needed.add(current)
            waiting += [found for found in _references(config.instances[current].settings) if found in config.instances]
    kept = {key: value for key, value in config.config_dict.items() if key in needed or key not in config.instances}
    config_dict = OmegaConf.create(kept)
    assert isinstance(config_dict, DictConfig)
    return replace(
        config,
        config_dict=config_dict,
        instances={key: instance for key, instance in config.instances.items() if key in needed},
    )


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if value.get("type") in SERVER_KINDS and isinstance(value.get("name"), str):
            yield value["name"]
        for child in value.values():
            yield from _references(child)
    elif isinstance(value, list):
        for child in value:
            yield from _references(child)


def _with_workers(config: GlobalConfig, name: str, num_workers: int) -> GlobalConfig:
    instance = config.instances[name]
    config_dict = OmegaConf.create(OmegaConf.to_container(config.config_dict, resolve=False))
    assert isinstance(config_dict, DictConfig)
    config_dict[name][instance.kind][instance.implementation]["num_workers"] = num_workers
    changed = replace(instance, num_workers=num_workers, settings={**instance.settings, "num_workers": num_workers})
    return replace(config, config_dict=config_dict, instances={**config.instances, name: changed})
