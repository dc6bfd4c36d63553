"""Commands in a local sandbox: what they are given, what comes of them, and what they can't do to the worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

from nemo_gym.sandbox import SandboxResources, SandboxStatus, SandboxStoppedError, local_sandbox
from tests.e2e.sandbox.conftest import Start, guard_of, until, until_output
from tests.support import command_of

OURS = f"61.{os.getpid()}"
"""Seconds that no other process of this machine sleeps for."""
LEFT = f"ps -eo args | grep -x 'sleep {OURS}'"


async def test_a_command_line_and_an_argument_list_run_in_the_workdir(make: Start) -> None:
    sandbox = await make(files={"notes/a.txt": "hello"})
    assert sandbox.status is SandboxStatus.RUNNING
    result = await sandbox.exec("pwd && cat notes/a.txt && echo oops >&2; exit 3")
    assert (result.return_code, result.stdout, result.stderr) == (3, f"{sandbox.workdir}\nhello", "oops\n")
    assert not result.ok
    listed = await sandbox.exec(["printf", "%s|", "a b", "$HOME"], cwd="notes")
    assert listed.ok
    assert listed.stdout == "a b|$HOME|"


async def test_a_command_sees_no_variable_of_the_worker(make: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    sandbox = await make(env={"FROM_SPEC": "1"}, resources=SandboxResources(cpu=1.5))
    result = await sandbox.exec("env", env={"FROM_CALL": "2"})
    names = {line.split("=")[0] for line in result.stdout.splitlines()}
    given = {"PATH", "HOME", "LANG", "TMPDIR", "NEMO_GYM_SANDBOX", "FROM_SPEC", "FROM_CALL"}
    assert given <= names
    assert "SECRET_TOKEN" not in names
    assert "OMP_NUM_THREADS=2\n" in result.stdout
    writable = await sandbox.exec('touch "$HOME/x" "$TMPDIR/y" z && stat -c %U "$HOME/x"')
    assert writable.ok


async def test_standard_input_is_the_given_bytes_or_nothing(make: Start) -> None:
    sandbox = await make()
    data = os.urandom(3_000_000)
    assert (await sandbox.exec("wc -c", stdin=data)).stdout.strip() == str(len(data))
    assert (await sandbox.exec("cat; echo end")).stdout == "end\n"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("no-such-program", 127, "no-such-program"),
        (["no-such-program"], 127, "no-such-program"),
        (["/etc/passwd"], 126, "Permission denied"),
        ("kill -SEGV $$", 139, ""),
    ],
)
async def test_a_command_that_cannot_run_is_a_result(make: Start, command: str, code: int, says: str) -> None:
    result = await (await make()).exec(command)
    assert result.return_code in (code, 127 if code == 126 else code)
    assert says in result.stderr


async def test_a_missing_cwd_is_a_result(make: Start) -> None:
    result = await (await make()).exec("true", cwd="missing")
    assert result.return_code == 126
    assert "missing" in result.stderr


async def test_a_flood_is_drained_and_cut_in_the_middle(make: Start) -> None:
    sandbox = await make()
    result = await sandbox.exec("echo first; head -c 300000000 /dev/zero; echo; echo last", max_output_bytes=1000)
    assert result.ok
    assert result.truncated
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("\nlast\n")
    assert "bytes left out" in result.stdout
    assert len(result.stdout) < 1100
    endless = await sandbox.exec("yes >&2", timeout_s=0.3, max_output_bytes=0)
    assert endless.timed_out
    assert endless.truncated


async def test_output_at_the_limit_is_whole(make: Start) -> None:
    result = await (await make()).exec("head -c 1001 /dev/zero | tr '\\0' x", max_output_bytes=1001)
    assert (result.truncated, result.stdout) == (False, "x" * 1001)


async def test_bytes_that_are_no_text_are_replaced(make: Start) -> None:
    result = await (await make()).exec(r"printf 'a\xff\xfeb'")
    assert result.stdout == "a\ufffd\ufffdb"


async def test_a_timeout_kills_what_ignores_sigterm_and_keeps_the_output(make: Start) -> None:
    sandbox = await make()
    result = await sandbox.exec(
        f"trap '' TERM; echo begun; sleep {OURS} & (setsid sleep {OURS} &); sleep {OURS}", timeout_s=0.3
    )
    assert result.timed_out
    assert result.return_code is None
    assert result.stdout == "begun\n"
    assert 1 < result.duration_s < 5
    assert (await sandbox.exec(LEFT)).stdout == ""


async def test_a_timeout_lets_a_command_end_itself(make: Start) -> None:
    result = await (await make()).exec("trap 'echo bye; exit' TERM; sleep 60 & wait", timeout_s=0.3)
    assert result.timed_out
    assert result.stdout == "bye\n"
    assert result.duration_s < 1


async def test_a_background_process_lives_on_and_does_not_hold_up_the_result(make: Start) -> None:
    sandbox = await make()
    began = time.monotonic()
    result = await sandbox.exec("(setsid sh -c 'while sleep 0.02; do echo tick; date > beat; done' &); echo started")
    assert result.ok
    assert result.stdout.startswith("started\n")
    assert time.monotonic() - began < 3
    assert (await sandbox.exec("rm -f beat; sleep 0.3; cat beat")).ok


async def test_commands_run_side_by_side(make: Start) -> None:
    sandbox = await make()
    gate = "touch here-{0}; while [ $(ls here-* | wc -l) -lt 5 ]; do sleep 0.01; done; echo {0}"
    results = await asyncio.gather(*(sandbox.exec(gate.format(number), timeout_s=20) for number in range(5)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(5)]


async def test_a_cancelled_command_is_killed_with_its_children(make: Start) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec(f"trap '' TERM; (setsid sleep {OURS} &); touch begun; sleep {OURS}"))
    await until_output(sandbox, "ls", "begun\n")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_output(sandbox, LEFT, "")
    assert sandbox.status is SandboxStatus.RUNNING


async def test_a_command_that_kills_its_supervisor_ends_alone(make: Start) -> None:
    sandbox = await make()
    result = await sandbox.exec(f"(setsid sleep {OURS} &); kill -9 $PPID; sleep {OURS}")
    assert (result.return_code, result.timed_out) == (None, False)
    assert "killed its own supervisor" in result.stderr
    assert (await sandbox.exec(LEFT)).stdout == ""


async def test_too_many_processes_are_killed_and_the_sandbox_goes_on(make: Start) -> None:
    sandbox = await make(resources=SandboxResources(processes=40))
    # Doubles seven times and no more, so that a failing limit does not take the machine down.
    bomb = "import os, time\nfor _ in range(7): os.fork()\ntime.sleep(20)"
    result = await sandbox.exec(["python3", "-c", bomb], timeout_s=15)
    assert result.return_code is None
    assert not result.timed_out
    assert "more processes than its limit" in result.stderr
    assert (await sandbox.exec("for i in $(seq 20); do sleep 0.05 & done; wait; echo fine")).stdout == "fine\n"


async def test_memory_is_limited_for_one_process_and_for_all(make: Start) -> None:
    sandbox = await make(resources=SandboxResources(memory_mb=200))
    alone = await sandbox.exec(["python3", "-c", "bytearray(400 << 20)"])
    assert alone.return_code == 1
    assert "MemoryError" in alone.stderr
    share = "import time; data = b'x' * (80 << 20); time.sleep(20)"
    together = await sandbox.exec(f'for i in 1 2 3 4; do python3 -c "{share}" & done; wait', timeout_s=15)
    assert "more memory than its limit" in together.stderr
    assert not together.timed_out


async def test_file_size_and_processor_time_are_limited(make: Start) -> None:
    sandbox = await make(resources=SandboxResources(file_size_mb=1, cpu_time_s=1))
    big = await sandbox.exec("head -c 3000000 /dev/zero > big; echo $?; stat -c %s big")
    assert big.stdout.splitlines()[1] == str(1 << 20)
    assert big.stdout.splitlines()[0] != "0"
    spinning = await sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=15)
    assert spinning.return_code == 128 + 24


async def test_the_loop_runs_on_while_a_command_floods(make: Start) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec("yes", timeout_s=0.5))
    worst = 0.0
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        worst = max(worst, time.monotonic() - before)
    assert (await task).truncated
    assert worst < 0.5


async def test_stop_ends_a_running_command_with_an_error(make: Start) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec("touch begun; sleep 90"))
    await until_output(sandbox, "ls", "begun\n")
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    with pytest.raises(SandboxStoppedError, match="has been stopped"):
        await task
    with pytest.raises(SandboxStoppedError, match="stopped"):
        await sandbox.exec("true")
    assert sandbox.status is SandboxStatus.STOPPED


async def test_a_command_killed_by_stop_has_no_result_even_when_its_end_is_told_first(make: Start, root: Path) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec(["sleep", "90.5"]))
    guard = guard_of(root)

    def commands() -> list[psutil.Process]:
        return [process for process in guard.children(recursive=True) if command_of(process) == ["sleep", "90.5"]]

    await until(commands)
    running = commands()
    guard.suspend()
    stopping = asyncio.create_task(sandbox.stop())
    try:
        await until(lambda: sandbox.status is SandboxStatus.STOPPED)
        for command in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                command.kill()
        with pytest.raises(SandboxStoppedError, match="has been stopped"):
            await task
    finally:
        guard.resume()
        await stopping


async def test_a_sandbox_whose_supervisor_is_killed_has_failed_and_leaves_nothing(make: Start, root: Path) -> None:
    sandbox = await make()
    await sandbox.exec("(setsid sleep 91 &)")
    guard_of(root).kill()
    await until(lambda: sandbox.status is SandboxStatus.FAILED)
    with pytest.raises(SandboxStoppedError, match="died"):
        await sandbox.exec("true")


async def test_a_sandbox_that_hangs_has_failed_and_leaves_nothing(
    make: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sandbox, "REPLY_TIMEOUT_S", 0.3)
    sandbox = await make()
    for process in guard_of(root).children(recursive=True):
        process.suspend()
    with pytest.raises(SandboxStoppedError, match="did not answer"):
        await sandbox.exec("true")
    assert sandbox.status is SandboxStatus.FAILED


async def test_a_request_of_which_no_process_can_be_made_says_so(make: Start, root: Path) -> None:
    sandbox = await make()
    server = guard_of(root).children(recursive=True)[-1]
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    server.rlimit(psutil.RLIMIT_NOFILE, (10, before[1]))
    result = await sandbox.exec("true")
    assert result.return_code is None
    assert "Too many open files" in result.stderr
    server.rlimit(psutil.RLIMIT_NOFILE, before)
    assert (await sandbox.exec("true")).ok


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"command": ""}, "not empty"),
        ({"command": ["a", 1]}, "sequence of strings"),
        ({"command": "true", "timeout_s": 0}, "timeout_s"),
        ({"command": "true", "env": {"A B": "1"}}, "environment variable"),
    ],
)
async def test_calls_that_make_no_sense_are_refused(make: Start, call: dict[str, object], problem: str) -> None:
    sandbox = await make()
    with pytest.raises(ValueError, match=problem):
        await sandbox.exec(**call)
