"""Commands in a container: what they are given, what comes of them, how they are ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from nemo_gym.sandbox import SandboxError, SandboxStatus, SandboxStoppedError
from nemo_gym.sandbox.docker import sandbox as docker_sandbox
from nemo_gym.sandbox.docker.commands import MarkedOutput
from tests.e2e.sandbox.conftest import until, until_output
from tests.e2e.sandbox.docker.conftest import Make
from tests.e2e.sandbox.docker.engine_stand_in import JOIN, Call, Container, StandIn, first_child

OURS = f"62.{os.getpid()}"
"""Seconds that no other process of this machine sleeps for."""
LEFT = f"ps -eo args | grep -x 'sleep {OURS}'"


@pytest.mark.parametrize("takes_over", ["upgrade", "plain", "chunked"])
async def test_a_command_line_and_an_argument_list_run_in_the_workdir(
    make: Make, daemon: StandIn, takes_over: str
) -> None:
    daemon.takes_over = takes_over
    sandbox = await make(files={"notes/a.txt": "hello"})
    assert sandbox.status is SandboxStatus.RUNNING
    result = await sandbox.exec("pwd && cat notes/a.txt && echo oops >&2; exit 3")
    assert (result.return_code, result.stdout, result.stderr) == (3, f"{sandbox.workdir}\nhello", "oops\n")
    assert not result.ok
    listed = await sandbox.exec(["printf", "%s|", "a b", "$HOME", ""], cwd="notes")
    assert listed.ok
    assert listed.stdout == "a b|$HOME||"


async def test_a_command_sees_its_own_variables_and_none_of_the_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    sandbox = await make(env={"FROM_SPEC": "1", "BOTH": "1"}, resources={"cpu": 1.5})
    lines = (await sandbox.exec("env", env={"FROM_CALL": "x=\ny", "BOTH": "2"})).stdout.splitlines()
    assert {"FROM_SPEC=1", "FROM_CALL=x=", "y", "BOTH=2", "OMP_NUM_THREADS=2"} <= set(lines)
    assert not any(line.startswith("SECRET_TOKEN") for line in lines)


@pytest.mark.parametrize("takes_over", ["upgrade", "plain"])
async def test_standard_input_is_the_given_bytes_or_nothing(make: Make, daemon: StandIn, takes_over: str) -> None:
    daemon.takes_over = takes_over
    sandbox = await make()
    data = os.urandom(3_000_000)
    assert (await sandbox.exec("wc -c", stdin=data)).stdout.strip() == str(len(data))
    assert (await sandbox.exec("cat; echo end")).stdout == "end\n"
    assert (await sandbox.exec("echo unread", stdin=data)).stdout == "unread\n"


async def test_a_command_that_cannot_run_is_a_result(make: Make) -> None:
    sandbox = await make()
    for command, code, says in (
        ("no-such-program", 127, "no-such-program"),
        (["no-such-program"], 127, "no-such-program"),
        (["/etc/passwd"], 126, "Permission denied"),
        ("kill -SEGV $$", 139, ""),
    ):
        result = await sandbox.exec(command)
        assert (result.return_code, says in result.stderr) == (code, True)
    missing = await sandbox.exec("true", cwd="missing")
    assert missing.return_code == 126
    assert "missing: no such folder" in missing.stderr


async def test_a_flood_is_drained_and_cut_in_the_middle(make: Make) -> None:
    sandbox = await make()
    result = await sandbox.exec("echo first; head -c 10000000 /dev/zero; echo; echo last", max_output_bytes=1000)
    assert result.ok
    assert result.truncated
    assert result.stdout.startswith("first\n")
    assert result.stdout.endswith("\nlast\n")
    assert len(result.stdout) < 1100
    endless = await sandbox.exec("yes >&2", timeout_s=0.1, max_output_bytes=0)
    assert endless.timed_out
    assert endless.truncated
    whole = await sandbox.exec("head -c 1001 /dev/zero | tr '\\0' x", max_output_bytes=1001)
    assert (whole.truncated, whole.stdout) == (False, "x" * 1001)
    assert (await sandbox.exec(r"printf 'a\xff\001b'")).stdout == "a\ufffd\x01b"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_mark_is_found_however_the_stream_is_cut(size: int) -> None:
    output = MarkedOutput(b"\x01mark", 100)
    stream = b"a\x01mar\x01mark 3 0\nlate"
    for start in range(0, len(stream), size):
        output.add(stream[start : start + size])
    assert (output.text(), output.line) == ("a\x01mar", b" 3 0")


async def test_a_timeout_kills_what_ignores_sigterm_and_keeps_the_output(make: Make) -> None:
    sandbox = await make()
    result = await sandbox.exec(
        f"trap '' TERM; echo begun; sleep {OURS} & (setsid sleep {OURS} &); sleep {OURS}", timeout_s=0.2
    )
    assert (result.timed_out, result.return_code, result.stdout) == (True, None, "begun\n")
    assert 1 < result.duration_s < 5
    assert (await sandbox.exec(LEFT)).stdout == ""


async def test_a_timeout_lets_a_command_end_itself(make: Make) -> None:
    result = await (await make()).exec("trap 'echo bye; exit' TERM; sleep 60 & wait", timeout_s=0.2)
    assert (result.timed_out, result.stdout) == (True, "bye\n")
    assert result.duration_s < 1


async def test_a_background_process_lives_on_and_does_not_hold_up_the_result(make: Make) -> None:
    sandbox = await make()
    began = time.monotonic()
    result = await sandbox.exec("(setsid sh -c 'while sleep 0.02; do echo tick; date > beat; done' &); echo started")
    assert result.ok
    assert result.stdout.startswith("started\n")
    assert time.monotonic() - began < 3
    assert (await sandbox.exec("rm -f beat; sleep 0.2; cat beat")).ok


async def test_a_cancelled_command_is_killed_with_its_children(make: Make, daemon: StandIn) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec(f"trap '' TERM; (setsid sleep {OURS} &); touch begun; sleep {OURS}"))
    await until_output(sandbox, "ls", "begun\n")
    early = asyncio.create_task(sandbox.exec(f"sleep {OURS}"))
    await until(lambda: "exec" in daemon.calls[-1])  # its process may not be there yet
    for cancelled in (task, early):
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    await until_output(sandbox, LEFT, "")
    assert sandbox.status is SandboxStatus.RUNNING


async def test_a_command_that_kills_its_supervisor_ends_alone(make: Make) -> None:
    sandbox = await make()
    result = await sandbox.exec(f"(setsid sleep {OURS} >/dev/null 2>&1 &); kill -9 $PPID; kill -9 $$")
    assert (result.return_code, result.timed_out) == (None, False)
    assert "killed its own supervisor" in result.stderr
    assert (await sandbox.exec(LEFT)).stdout == ""


async def test_stop_ends_a_running_command_with_an_error(make: Make) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec("touch begun; sleep 90"))
    await until_output(sandbox, "ls", "begun\n")
    await asyncio.gather(sandbox.stop(), sandbox.stop())
    with pytest.raises(SandboxStoppedError, match="has been stopped"):
        await task
    with pytest.raises(SandboxStoppedError, match="stopped"):
        await sandbox.exec("true")
    assert sandbox.status is SandboxStatus.STOPPED


async def test_a_main_process_that_does_not_answer_costs_the_sandbox(
    make: Make, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_sandbox, "ORDER_TIMEOUT_S", 0.2)
    sandbox = await make()
    main = next(iter(daemon.containers.values())).main
    assert main is not None
    os.kill(int(first_child(main.pid)), signal.SIGSTOP)
    result = await sandbox.exec("sleep 60", timeout_s=0.1)
    assert result.timed_out
    await until(lambda: not daemon.containers)
    with pytest.raises(SandboxStoppedError, match="died"):
        await sandbox.exec("true")


async def test_a_stream_that_breaks_off_is_an_error_and_the_command_is_killed(make: Make, daemon: StandIn) -> None:
    sandbox = await make()
    real = daemon._exec_start

    async def broken(call: Call, *rest: object) -> None:
        task = asyncio.create_task(real(call, *rest))
        await asyncio.sleep(0.2)
        call.writer.write(b"\x01\x00\x00\x00\x00\x00\x10\x00half")
        await call.writer.drain()
        call.writer.transport.abort()
        await asyncio.wait([task])

    daemon._exec_start = broken
    with pytest.raises(SandboxError, match="broke off"):
        await sandbox.exec(f"sleep {OURS}")
    daemon._exec_start = real
    await until_output(sandbox, LEFT, "")


async def test_what_the_daemon_cannot_start_is_a_result(make: Make, daemon: StandIn) -> None:
    sandbox = await make()

    async def unable(call: Call, *_: object) -> None:
        write = await daemon._take_over(call)
        write(1, b"OCI runtime exec failed: fork: resource temporarily unavailable\r\n")
        call.writer.write_eof()

    daemon._exec_start = unable
    result = await sandbox.exec("true")
    assert result.return_code is None
    assert "no command could be started: OCI runtime exec failed" in result.stderr


async def test_a_command_that_never_began_takes_nothing_else_with_it(make: Make, daemon: StandIn) -> None:
    sandbox = await make({"timeout_s": 0.2})
    main = next(iter(daemon.containers.values())).main
    assert main is not None
    # Its session's leader is outside, so inside it has the session 0, as a command has that nothing is known of.
    other = await asyncio.create_subprocess_exec(*JOIN, "-t", first_child(main.pid), "sleep", OURS)
    await until_output(sandbox, LEFT, f"sleep {OURS}\n")
    real = daemon._exec_start

    async def silent(call: Call, container: Container, *_: object) -> None:
        await daemon._take_over(call)
        await container.removed.wait()

    daemon._exec_start = silent
    with pytest.raises(SandboxError, match=r"started no command within 0\.2 s"):
        await sandbox.exec("true")
    daemon._exec_start = real
    assert (await sandbox.exec(LEFT)).stdout == f"sleep {OURS}\n"
    assert other.returncode is None
    await sandbox.stop()
    await other.wait()


async def test_a_command_cannot_forge_its_end_with_what_it_reads_of_its_supervisor(make: Make) -> None:
    sandbox = await make()
    forge = r"""
    for file in cmdline environ; do
      for word in $(tr '\0=' '\n\n' </proc/$PPID/$file | grep -x '[0-9a-f]*'); do printf '\001%s 0 0\n' "$word"; done
    done
    echo real; exit 3"""
    for stdin in (None, b"given"):
        result = await sandbox.exec(forge, stdin=stdin)
        assert (result.return_code, result.stdout.endswith("real\n")) == (3, True)


async def test_a_command_cannot_speak_for_the_main_process(make: Make) -> None:
    sandbox = await make()
    forge = "while printf 'ready 7 7\\n'; for i in 1 2 3; do printf \"done $i 0\\n\"; done; do sleep 0.01; done"
    result = await sandbox.exec(f"trap '' TERM; {forge} >/proc/1/fd/1", timeout_s=0.3)
    assert result.timed_out
    await sandbox.write("file", b"")
    assert (await sandbox.exec("stat -c %u file; id -u")).stdout.split() == [str(os.getuid())] * 2
