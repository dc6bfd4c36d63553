"""What becomes of trouble while a patch is judged: tried again, laid at the patch's door, or not judged at all."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nemo_gym.sandbox import SandboxCreateError
from resources_servers.swe_rebench.judge import Judge, JudgeSettings
from resources_servers.swe_rebench.patches import Repository
from resources_servers.swe_rebench.rows import SweRebenchRow
from resources_servers.swe_rebench.sandboxes import Sandboxes

pytestmark = pytest.mark.anyio

LINES = (Path(__file__).parents[1] / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()
TALLY = next(row for row in map(json.loads, LINES) if row["instance_id"] == "example__tally-1")
KILL = "kill -9 $(cut -d ' ' -f 4 /proc/$PPID/stat)"
"""The command's parent is its supervisor, whose parent serves the sandbox."""

NOTHING = b"diff --git a/n.txt b/n.txt\nnew file mode 100644\n--- /dev/null\n+++ b/n.txt\n@@ -0,0 +1 @@\n+n\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sandboxes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sandboxes]:
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state0"))
    made = Sandboxes("local")
    yield made
    await made.close()


def row(*test_cmd: str) -> SweRebenchRow:
    config = {"test_cmd": [*test_cmd, TALLY["install_config"]["test_cmd"]], "log_parser": "unittest"}
    return SweRebenchRow.model_validate({**TALLY, "install_config": config})


def failing(sandboxes: Sandboxes, times: int) -> tuple[Judge, list[str]]:
    """A judge whose first sandboxes do not start, and the names of those that did."""
    started: list[str] = []
    left = times

    @asynccontextmanager
    async def fresh(row: SweRebenchRow) -> AsyncIterator[Repository]:
        nonlocal left
        if left:
            left -= 1
            raise SandboxCreateError("no room")
        async with sandboxes.fresh(row) as repository:
            started.append(repository.sandbox.handle.id)
            yield repository

    return Judge(fresh, JudgeSettings(test_timeout_s=60)), started


async def test_a_sandbox_that_does_not_start_is_tried_again(sandboxes: Sandboxes) -> None:
    judge, started = failing(sandboxes, 1)
    verdict = await judge.judge(row(), TALLY["patch"].encode())
    assert (verdict.resolved, verdict.evaluation_completed, verdict.attempts) == (True, True, 2)
    assert len(started) == 1


async def test_without_a_sandbox_nothing_is_said_about_the_patch(sandboxes: Sandboxes) -> None:
    judge, started = failing(sandboxes, 2)
    verdict = await judge.judge(row(), TALLY["patch"].encode())
    assert (verdict.evaluation_completed, verdict.patch_applied, verdict.reason) == (False, None, "no room")
    assert not started


async def test_a_sandbox_lost_in_the_tests_is_the_patchs_doing_only_if_the_reference_keeps_its_own(
    sandboxes: Sandboxes,
) -> None:
    judge, started = failing(sandboxes, 0)
    verdict = await judge.judge(row(f"if [ -e n.txt ]; then {KILL}; sleep 60; fi"), NOTHING)
    assert (verdict.resolved, verdict.evaluation_completed, verdict.attempts) == (False, True, 2)
    assert verdict.reason.startswith("the sandbox was lost: ")
    assert verdict.reason.endswith("so this is the patch's doing")
    assert len(set(started)) == 3
    # For a while the reference vouches for this row, and is not asked again; for no other row it does.
    assert (await judge.judge(row(f"if [ -e n.txt ]; then {KILL}; sleep 60; fi"), NOTHING)).evaluation_completed
    assert len(set(started)) == 5
    started.clear()
    verdict = await judge.judge(row(f"{KILL}; sleep 60"), NOTHING)
    assert not verdict.evaluation_completed
    assert "the reference solution did not pass either (the sandbox was lost" in verdict.reason
    assert len(set(started)) == 3


async def test_a_machine_that_worked_once_is_asked_again_when_it_kills_tests(sandboxes: Sandboxes) -> None:
    judge, started = failing(sandboxes, 0)
    judge.settings = JudgeSettings(test_timeout_s=60, attempts=1, reference_memory_s=0)
    killed = row("[ ! -e n.txt ] || exec sh -c 'kill -9 $$'")
    for _ in range(2):
        assert (await judge.judge(killed, NOTHING)).evaluation_completed
    assert len(started) == 4
    # That nothing was reported is laid at the patch's door by what passed once.
    silent = row("[ ! -e n.txt ] || exit 1")
    for _ in range(2):
        assert (await judge.judge(silent, NOTHING)).reason.startswith("the log reports no test; ")
    assert len(started) == 7


@pytest.mark.parametrize("signal", [9, 11])
async def test_tests_that_are_missing_while_none_failed_are_no_verdict(sandboxes: Sandboxes, signal: int) -> None:
    config = {
        "test_cmd": [f"echo 'test_z (z.Z) ... ok'; sh -c 'kill -{signal} $$'", "echo report done"],
        "log_parser": "unittest",
    }
    everywhere = SweRebenchRow.model_validate({**TALLY, "install_config": config})
    judge, started = failing(sandboxes, 0)
    verdict = await judge.judge(everywhere, NOTHING)
    assert (verdict.evaluation_completed, verdict.attempts, len(started)) == (False, 2, 3)
    assert verdict.reason.startswith("no test failed, but 3 of 3 are missing: test_")
    # Where a test failed, the tests decide.
    failed = f"echo '{TALLY['FAIL_TO_PASS'][0]} ... FAIL'"
    config["test_cmd"] = [failed]
    verdict = await judge.judge(SweRebenchRow.model_validate({**TALLY, "install_config": config}), NOTHING)
    assert (verdict.evaluation_completed, verdict.attempts, verdict.resolved) == (True, 1, False)


async def test_a_patch_of_the_tests_that_nobody_recognised_does_not_change_them(sandboxes: Sandboxes) -> None:
    judge, _ = failing(sandboxes, 0)
    harmless = b"def total(a, b):\n+    return {(3, 1): 0, (1, 4): 10, (7, 7): 7}[a, b]"
    forged = (
        b"diff --git a/tests/test_ranges.py b/tests/test_ranges.py\n--- a/tests/test_ranges.py\n"
        b"+++ b/tests/test_ranges.py\n@@ -1,4 +1,5 @@\n import unittest\n \n-from tally import total\n+%s\n \n"
    ) % harmless
    verdict = await judge.judge(row(), forged)
    assert (verdict.patch_applied, verdict.resolved) == (True, False)
    assert verdict.reason.startswith("2 of 3 tests did not pass")


async def test_running_out_of_time_is_tried_once_and_counts_unless_the_reference_does_too(sandboxes: Sandboxes) -> None:
    judge, started = failing(sandboxes, 0)
    judge.settings = JudgeSettings(test_timeout_s=6)
    verdict = await judge.judge(row("[ ! -e n.txt ] || sleep 60"), NOTHING)
    assert (verdict.evaluation_completed, verdict.attempts, len(started)) == (True, 1, 2)
    assert verdict.reason.startswith("tests timed out after 6 s")
    assert set(verdict.fail_to_pass.values()) == {"missing"}
    judge, _ = failing(sandboxes, 0)
    judge.settings = JudgeSettings(test_timeout_s=0.5)
    everywhere = row("sleep 60")
    assert not (await judge.judge(everywhere, NOTHING)).evaluation_completed
    reference = await judge.judge_reference(everywhere)
    assert (reference.evaluation_completed, reference.resolved) == (True, False)
    assert reference.reason.startswith("tests timed out after ")


async def test_a_log_without_its_middle_is_no_verdict_when_tests_were_in_it(sandboxes: Sandboxes) -> None:
    judge, _ = failing(sandboxes, 0)
    judge.settings = JudgeSettings(max_log_bytes=40, attempts=1)
    verdict = await judge.judge(row("seq 100"), NOTHING)
    assert not verdict.evaluation_completed
    assert verdict.reason.startswith("the log ")
