"""Judging a patch: applied with the row's tests in a fresh sandbox, run, and the log read.

A verdict is *completed* when it says something about the patch. It is not when the trouble may lie elsewhere: a sandbox
that did not start or was lost, an installation that failed, tests that were killed, a log without any test, one
whose middle is missing together with tests, or one in which no test failed but some are missing. Then

1. the patch is judged again, in another fresh sandbox;
2. if that ends the same way, the row's reference solution is judged. Where that is resolved, the environment works
   and the trouble comes from the patch (it does not compile, for example): the verdict is completed. For trouble that
   a machine may have for a while (a lack of memory, of time) this holds for some minutes, else for good;
3. otherwise it stays not completed, and says nothing about the patch.

A test command that runs out of time is judged by the second step alone, as another try would take as long.

The files of the tests are made before the patch is applied, kept aside, and put in their place after it, so that
nothing in the patch changes what they are.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel, Field

from nemo_gym.sandbox import SandboxError, SandboxExecResult, SandboxStoppedError
from resources_servers.swe_rebench.log_parsers import Status
from resources_servers.swe_rebench.patch_paths import patch_paths
from resources_servers.swe_rebench.patches import Repository, RepositoryError
from resources_servers.swe_rebench.rows import SweRebenchRow

MISSING: Final = "missing"
"""The status of a test that the log does not settle."""

_REPAIRED: Final = frozenset({Status.PASSED, Status.XPASSED})
"""How a test of FAIL_TO_PASS may end: one that is merely expected to fail is not repaired."""

_FAILURES: Final = frozenset({Status.FAILED, Status.ERROR})
_KILLED: Final = 128 + 9
_REMEMBERED_ROWS: Final = 100_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How patches are judged.

    Args:
        install_timeout_s: How long the installation may take.
        test_timeout_s: How long the tests may take.
        attempts: How many fresh sandboxes are tried.
        max_log_bytes: How much of the tests' output is read; beyond it the middle is missing.
        shown_chars: How much of the output a verdict carries.
        reference_memory_s: How long a reference solution that passed vouches for the machine.
    """

    install_timeout_s: float = 1800
    test_timeout_s: float = 1800
    attempts: int = 2
    max_log_bytes: int = 10_000_000
    shown_chars: int = 4_000
    reference_memory_s: float = 300


class Verdict(BaseModel):
    """What became of a patch.

    Attributes:
        resolved: Whether every test that has to pass does.
        patch_applied: Whether the patch applied; None when it did not come to that.
        evaluation_completed: Whether this says something about the patch.
        reason: What happened, for a person.
        fail_to_pass: The status of each test of FAIL_TO_PASS; "missing" for one that the log does not settle.
        pass_to_pass: The same for PASS_TO_PASS.
        tests_reported: How many tests the log reports.
        attempts: How many sandboxes were tried.
        timings: Seconds of the last attempt's steps.
        output: The output of the last command, shortened.
    """

    resolved: bool = False
    patch_applied: bool | None = None
    evaluation_completed: bool = False
    reason: str = ""
    fail_to_pass: dict[str, str] = Field(default_factory=dict)
    pass_to_pass: dict[str, str] = Field(default_factory=dict)
    tests_reported: int = 0
    attempts: int = 0
    timings: dict[str, float] = Field(default_factory=dict)
    output: str = ""


class _NotJudgedError(Exception):
    """Raised when an attempt says nothing about the patch for now.

    Args:
        reason: Why.
        again: Whether another sandbox may help.
        timed_out: Whether the tests ran out of time.
        patch_may_be_the_cause: Whether the reference solution should be asked.
        for_a_while: Whether it may be the machine's trouble of the moment, so that the reference has to pass now.
    """

    def __init__(
        self,
        reason: str,
        *,
        again: bool = True,
        timed_out: bool = False,
        patch_may_be_the_cause: bool = True,
        for_a_while: bool = True,
    ) -> None:
        self.for_a_while = for_a_while
        self.again = again
        self.timed_out = timed_out
        self.patch_may_be_the_cause = patch_may_be_the_cause
        super().__init__(reason)


@dataclass(slots=True)
class Judge:
    """Judges patches.

    Args:
        fresh: Starts a sandbox for a row, with its repository prepared, and stops it at the end.
        settings: How.
    """

    fresh: Callable[[SweRebenchRow], AbstractAsyncContextManager[Repository]]
    settings: JudgeSettings = field(default_factory=JudgeSettings)
    _working_rows: dict[str, float] = field(default_factory=dict)

    async def judge_reference(self, row: SweRebenchRow) -> Verdict:
        """Return the verdict on the row's own solution. Nothing can vouch for it, so running out of time counts."""
        verdict, trouble = await self._judge(row, _encoded(row.patch), None)
        if trouble is not None:
            verdict.evaluation_completed = trouble.timed_out
        return verdict

    async def judge(self, row: SweRebenchRow, patch: bytes, *, baseline: str | None = None) -> Verdict:
        """Return the verdict on a patch.

        Args:
            row: The task.
            patch: A patch of the repository at the base commit.
            baseline: The tree of the files that the patch was made from, where it is known.
        """
        verdict, trouble = await self._judge(row, patch, baseline)
        if trouble is not None and trouble.patch_may_be_the_cause:
            await self._ask_reference(row, patch, verdict, trouble)
        return verdict

    async def _judge(
        self, row: SweRebenchRow, patch: bytes, baseline: str | None
    ) -> tuple[Verdict, _NotJudgedError | None]:
        verdict = Verdict()
        trouble: _NotJudgedError | None = None
        for attempt in range(1, self.settings.attempts + 1):
            verdict = Verdict(attempts=attempt)
            trouble = await self._try(row, patch, baseline, verdict)
            if trouble is None:
                verdict.evaluation_completed = True
                return verdict, None
            logger.warning("%s: not judged in attempt %d: %s", row.instance_id, attempt, trouble)
            verdict.reason = str(trouble)
            if trouble.timed_out or not trouble.again:
                break
        return verdict, trouble

    async def _ask_reference(
        self, row: SweRebenchRow, patch: bytes, verdict: Verdict, trouble: _NotJudgedError
    ) -> None:
        reference = _encoded(row.patch)
        if patch.strip() == reference.strip() or not reference.strip():
            return
        # Only a success is remembered; a failure may be the machine's of the moment.
        passed = self._working_rows.get(row.digest)
        memory_s = self.settings.reference_memory_s if trouble.for_a_while else math.inf
        if passed is None or time.monotonic() - passed >= memory_s:
            other = Verdict()
            others_trouble = await self._try(row, reference, None, other)
            if others_trouble is not None or not other.resolved:
                why = str(others_trouble) if others_trouble else other.reason
                verdict.reason += f"; the reference solution did not pass either ({why})"
                return
            while len(self._working_rows) >= _REMEMBERED_ROWS:
                self._working_rows.pop(next(iter(self._working_rows)))
            self._working_rows[row.digest] = time.monotonic()
        verdict.evaluation_completed = True
        verdict.reason += "; with the reference solution the tests pass, so this is the patch's doing"

    async def _try(
        self, row: SweRebenchRow, patch: bytes, baseline: str | None, verdict: Verdict
    ) -> _NotJudgedError | None:
        """Judge in one fresh sandbox, filling in the verdict; return what keeps it from being one."""
        started = time.monotonic()
        try:
            async with self.fresh(row) as repository:
                verdict.timings["start_s"] = round(time.monotonic() - started, 3)
                await self._judge_in(repository, row, patch, baseline, verdict)
        except _NotJudgedError as error:
            return error
        except SandboxStoppedError as error:
            return _NotJudgedError(f"the sandbox was lost: {error}", patch_may_be_the_cause="test_s" in verdict.timings)
        except (SandboxError, RepositoryError) as error:
            return _NotJudgedError(str(error), patch_may_be_the_cause=False)
        return None

    async def _judge_in(
        self, repository: Repository, row: SweRebenchRow, patch: bytes, baseline: str | None, verdict: Verdict
    ) -> None:
        with _timed(verdict, "apply_s"):
            if not await _apply(repository, row, patch, baseline, verdict):
                return
        config = row.install_config
        installed = None
        if config.install:
            with _timed(verdict, "install_s"):
                installed = await self._run(
                    repository, ["set -e", *config.install], self.settings.install_timeout_s, verdict
                )
        limit = self.settings.test_timeout_s
        with _timed(verdict, "test_s"):
            done = await self._run(repository, config.test_cmd, min(limit, config.test_timeout_s or limit), verdict)
        # Long logs take seconds to read.
        results = await asyncio.to_thread(config.parser.parse, done.stdout)
        verdict.tests_reported = len(results)
        verdict.fail_to_pass = _statuses(row, row.FAIL_TO_PASS, results)
        verdict.pass_to_pass = _statuses(row, row.PASS_TO_PASS, results)
        _decide(verdict, installed, done)

    async def _run(
        self, repository: Repository, commands: list[str], timeout_s: float, verdict: Verdict
    ) -> SandboxExecResult:
        done = await repository.sandbox.exec(
            "\n".join(["exec 2>&1", *commands]),
            cwd=repository.directory,
            timeout_s=timeout_s,
            max_output_bytes=self.settings.max_log_bytes,
        )
        verdict.output = _shortened(done.stdout + done.stderr, self.settings.shown_chars)
        return done


async def _apply(
    repository: Repository, row: SweRebenchRow, patch: bytes, baseline: str | None, verdict: Verdict
) -> bool:
    """Apply the patch and the row's tests; return False when that settles the verdict."""
    tests = _encoded(row.test_patch)
    owned = patch_paths(tests)
    if problem := await repository.apply(tests):
        raise _NotJudgedError(
            f"the row's own tests don't apply to its base commit: {problem}", again=False, patch_may_be_the_cause=False
        )
    kept = await repository.keep_files(owned)
    if problem := await repository.apply(tests, backwards=True):
        raise RepositoryError(f"the row's own tests can't be taken back: {problem}")
    problem = await repository.apply(patch, exactly=baseline is not None)
    if problem and baseline not in (None, repository.baseline):
        raise _NotJudgedError(
            f"the image differs from the one that the agent worked in, and the patch does not apply: {problem}",
            patch_may_be_the_cause=False,
        )
    verdict.patch_applied = not problem
    if problem:
        verdict.reason = f"the patch does not apply: {problem}"
        return False
    await repository.put_files(owned, kept)
    return True


def _decide(verdict: Verdict, installed: SandboxExecResult | None, done: SandboxExecResult) -> None:
    statuses = {**verdict.fail_to_pass, **verdict.pass_to_pass}
    not_passed = [f"{name} ({status})" for name, status in verdict.fail_to_pass.items() if status not in _REPAIRED]
    not_passed += [f"{name} ({status})" for name, status in verdict.pass_to_pass.items() if not _is_pass(status)]
    if done.timed_out:
        raise _NotJudgedError(f"tests timed out after {done.duration_s:.0f} s", timed_out=True)
    if not not_passed:
        verdict.resolved = True
        verdict.reason = f"all {len(statuses)} tests passed"
        return
    if installed is not None and not installed.ok:
        ended = _was_ended(installed) or installed.timed_out
        raise _NotJudgedError(f"the installation {_how_it_ended(installed)}", for_a_while=ended)
    if _was_ended(done):
        raise _NotJudgedError(f"the test command {_how_it_ended(done)}")
    if verdict.tests_reported == 0:
        raise _NotJudgedError(f"the log reports no test; the test command {_how_it_ended(done)}", for_a_while=False)
    if done.truncated and MISSING in statuses.values():
        raise _NotJudgedError("the log is too long: its middle is missing, and with it tests")
    missing = [name for name, status in statuses.items() if status == MISSING]
    if missing and not _FAILURES.intersection(statuses.values()):
        # An earlier command may have been killed, or the one in front of a pipe, which no exit status tells.
        raise _NotJudgedError(
            f"no test failed, but {len(missing)} of {len(statuses)} are missing: {_listed(missing)}; "
            f"the test command {_how_it_ended(done)}"
        )
    verdict.reason = f"{len(not_passed)} of {len(statuses)} tests did not pass: {_listed(not_passed)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _was_ended(done: SandboxExecResult) -> bool:
    return done.return_code in (None, _KILLED)


def _encoded(patch: str) -> bytes:
    return patch.encode("utf-8", "surrogatepass")


def _is_pass(status: str) -> bool:
    return status != MISSING and Status(status).is_pass


def _how_it_ended(done: SandboxExecResult) -> str:
    if done.timed_out:
        return f"timed out after {done.duration_s:.0f} s"
    if done.return_code is None:
        return f"was ended for exceeding a limit: {done.stderr.strip()[-200:]}"
    return f"ended with {done.return_code}"


def _statuses(row: SweRebenchRow, names: list[str], results: Mapping[str, Status]) -> dict[str, str]:
    parser = row.install_config.parser
    return {name: parser.look_up(results, name) or MISSING for name in names}


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


@contextmanager
def _timed(verdict: Verdict, name: str) -> Iterator[None]:
    verdict.timings[name] = 0.0
    started = time.monotonic()
    try:
        yield
    finally:
        verdict.timings[name] = round(time.monotonic() - started, 3)
