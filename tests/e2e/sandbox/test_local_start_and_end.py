"""How local sandboxes start, and that nothing outlives them, however they or their worker end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxCreateError,
    SandboxError,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
    SandboxStoppedError,
    create_provider,
)
from nemo_gym.sandbox.folders import create_folder, prepare_root, sweep
from nemo_gym.sandbox.local_sandbox import uninterrupted
from tests.e2e.sandbox.conftest import (
    Start,
    folders,
    guard_of,
    open_descriptors,
    processes_below,
    remember,
    tasks,
    until,
)


def settings(isolation: str, root: Path, **more: Any) -> dict[str, Any]:
    return {"type": "local", "isolation": isolation, "root_dir": str(root), **more}


async def test_an_image_is_copied_with_permissions_and_links(make: Start, tmp_path: Path) -> None:
    image = tmp_path / "images" / "team" / "tool:1"
    (image / "src").mkdir(parents=True)
    (image / "src" / "run").write_text("#!/bin/sh\necho from image\n")
    (image / "src" / "run").chmod(0o755)
    (image / "link").symlink_to("src/run")
    sandbox: AsyncSandbox = await make({"images_dir": str(tmp_path / "images")}, image="team/tool:1")
    assert (await sandbox.exec("./link; readlink link; echo x > src/new")).stdout == "from image\nsrc/run\n"
    assert sorted(path.name for path in image.rglob("*")) == ["link", "run", "src"]


@pytest.mark.parametrize(
    ("spec", "more", "problem"),
    [
        ({"image": "missing"}, {"images_dir": "/tmp"}, "no image 'missing'"),
        ({"image": "../etc"}, {"images_dir": "/tmp"}, "no name of a folder"),
        ({"image": "some"}, {}, "images_dir"),
        ({"files": {"/proc/none/x": "1"}}, {}, "/proc/none/x"),
        ({"start_timeout_s": 0.001}, {}, r"within 0\.001 s"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    isolation: str, root: Path, spec: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    before = open_descriptors()
    sandbox = AsyncSandbox(settings(isolation, root, **more), SandboxSpec(**spec))
    with pytest.raises(SandboxCreateError, match=problem):
        await sandbox.start()
    assert sandbox.status is SandboxStatus.FAILED
    with pytest.raises(SandboxStoppedError):
        await sandbox.exec("true")
    await sandbox.stop()
    assert (folders(root), tasks()) == ([], [])
    await until(lambda: open_descriptors() <= before)


async def test_a_root_that_cannot_be_made_is_named(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file" / "below", tmp_path / "file"):
        with pytest.raises(SandboxCreateError, match=str(root)):
            await AsyncSandbox(settings(isolation, root)).start()


async def test_stop_removes_what_a_program_made_hard_to_remove(make: Start) -> None:
    sandbox: AsyncSandbox = await make()
    deep = "import os\nfor _ in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)"  # longer than a path may be
    assert (await sandbox.exec(["python3", "-c", deep])).ok
    assert (
        await sandbox.exec("mkdir q; touch q/f; chmod 000 q; mkfifo p; ln -s / l; touch \"$(printf 'a\\xff\\nb')\"")
    ).ok


async def test_stop_while_it_starts(isolation: str, root: Path) -> None:
    sandbox = AsyncSandbox(settings(isolation, root))
    starting = asyncio.create_task(sandbox.start())
    await asyncio.sleep(0.02)
    await sandbox.stop()
    with pytest.raises((asyncio.CancelledError, SandboxStoppedError)):
        await starting
    assert (folders(root), tasks()) == ([], [])
    with pytest.raises(SandboxStoppedError):
        await sandbox.start()


async def test_a_cancelled_start_leaves_nothing(isolation: str, root: Path) -> None:
    sandbox = AsyncSandbox(settings(isolation, root))
    starting = asyncio.create_task(sandbox.start())
    await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (folders(root), tasks()) == ([], [])


async def test_a_cancellation_that_comes_with_the_end_of_the_work_is_not_lost() -> None:
    done = asyncio.Event()
    task = asyncio.create_task(uninterrupted(done.wait()))
    await asyncio.sleep(0.01)
    done.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_provider_that_is_closed_stops_all_it_started(isolation: str, root: Path) -> None:
    provider = create_provider(settings(isolation, root))
    sandboxes = [AsyncSandbox(provider) for _ in range(8)]
    handles = await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert len({handle.id for handle in handles}) == 8
    assert await sandboxes[0].start() == handles[0]
    await provider.close()
    assert folders(root) == []
    assert {sandbox.status for sandbox in sandboxes} == {SandboxStatus.STOPPED}


async def test_a_stop_that_fails_holds_up_no_other(isolation: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = create_provider(settings(isolation, root))
    sandboxes = [await provider.start(SandboxSpec()) for _ in range(3)]

    async def fail() -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sandboxes[0], "stop", fail)
        with pytest.raises(OSError, match="no"):
            await provider.close()
        assert [path.name for path in folders(root)] == [sandboxes[0].handle.id]
    await provider.close()
    assert folders(root) == []


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_worker_without_a_free_descriptor_says_so(make: Start, isolation: str, root: Path) -> None:
    sandbox: AsyncSandbox = await make()
    other = AsyncSandbox(settings(isolation, root))
    for call in (sandbox.exec("true"), sandbox.read("x"), sandbox.write("x", b"")):
        with no_descriptor_free(), pytest.raises(SandboxError, match="Too many open files"):
            await call
    with no_descriptor_free(), pytest.raises(SandboxCreateError, match="Too many open files"):
        await other.start()
    assert sandbox.status is SandboxStatus.RUNNING
    assert (await sandbox.exec("true")).ok


def test_no_room_to_try_bubblewrap_is_no_reason_to_go_without() -> None:
    from nemo_gym.sandbox import isolation as module

    before = module.find_bubblewrap()
    if isinstance(before, str):
        pytest.skip(before)
    module._probe.cache_clear()
    with no_descriptor_free(), pytest.raises(OSError, match="Too many open files"):
        module.find_bubblewrap()
    assert module.find_bubblewrap() == before


WORKER = """
import asyncio, sys
from nemo_gym.sandbox import AsyncSandbox

async def main() -> None:
    sandbox = AsyncSandbox({"type": "local", "isolation": sys.argv[1], "root_dir": sys.argv[2]})
    handle = await sandbox.start()
    await sandbox.exec("(setsid sh -c 'trap \\"\\" TERM INT HUP; sleep 600' > /dev/null 2>&1 &)")
    running = asyncio.create_task(sandbox.exec("trap '' TERM; touch begun; sleep 600", timeout_s=900))
    while not (await sandbox.exec("test -e begun")).ok:
        pass
    print(handle.id, flush=True)
    await running

asyncio.run(main())
"""


@pytest.fixture
def worker(isolation: str, root: Path) -> Any:
    argv = [sys.executable, "-c", textwrap.dedent(WORKER), isolation, str(root)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout
        try:
            remember(root, process.stdout.readline().strip())
            yield process
        finally:
            process.kill()


async def test_a_killed_worker_leaves_nothing(worker: subprocess.Popen[str], root: Path) -> None:
    assert len(processes_below(root)) >= 4
    worker.kill()
    await until(lambda: folders(root) == [] and processes_below(root) == [])


async def test_the_next_start_sweeps_what_a_killed_guard_left(
    worker: subprocess.Popen[str], isolation: str, root: Path
) -> None:
    (path,) = folders(root)
    assert sweep(root) == []  # what is in use stays
    worker.send_signal(signal.SIGSTOP)  # so that it can't clean up itself
    guard = guard_of(root)
    guard.kill()
    worker.kill()
    worker.wait()
    await until(lambda: not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE)
    async with AsyncSandbox(settings(isolation, root)) as sandbox:
        remember(root, sandbox.handle.id)
        assert not path.exists()
    await until(lambda: folders(root) == [] and processes_below(root) == [])


@pytest.mark.parametrize("stopped", [False, True])
async def test_what_cleared_its_environment_ends_with_its_guard(make: Start, root: Path, stopped: bool) -> None:
    sandbox: AsyncSandbox = await make()
    (path,) = folders(root)
    number = f"63.{os.getpid()}"  # seconds that no other process of this machine sleeps for
    await sandbox.exec(f"env -i setsid sleep {number} & sleep 0.1")
    running = asyncio.create_task(sandbox.exec(f"(env -i setsid sleep {number} &) & sleep 90"))
    await until(lambda: len(sleeping(number)) == 2)
    guard = guard_of(root)
    if stopped:
        guard.suspend()
    guard.kill()
    try:
        with pytest.raises(SandboxStoppedError, match="died"):
            await running
        await until(lambda: not path.exists() and not sleeping(number))
    finally:
        for process in sleeping(number):
            process.kill()


def sleeping(number: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", number]:
                found.append(process)
    return found


def test_a_sweep_leaves_folders_that_are_locked_or_not_its_own(root: Path) -> None:
    prepare_root(root)
    used, lock = create_folder(root)
    left, other = create_folder(root)
    os.close(other)
    (root / "mine").mkdir()
    assert sweep(root) == [left]
    assert sorted(root.iterdir()) == sorted([root / "mine", used])
    os.close(lock)
    assert root.stat().st_mode & 0o777 == 0o700


class TestBubblewrap:
    @pytest.fixture
    def isolation(self) -> str:
        from nemo_gym.sandbox.isolation import find_bubblewrap

        found = find_bubblewrap()
        if isinstance(found, str):
            pytest.skip(found)
        return "bubblewrap"

    async def test_the_host_is_out_of_sight_and_reach(self, make: Start, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        sandbox: AsyncSandbox = await make({"visible_paths": [str(Path(__file__).parent)]})
        assert sandbox.workdir == "/workspace"
        script = f"cat {tmp_path}/secret; cat /etc/shadow; ls /proc | grep -c '^[0-9]'; hostname; ls {Path(__file__)}"
        result = await sandbox.exec(script)
        assert result.stdout.splitlines()[1:] == ["sandbox", str(Path(__file__))]
        assert int(result.stdout.splitlines()[0]) < 12
        for place in ("/", "/dev", "/usr", "/etc", "/run"):
            assert not (await sandbox.exec(f"touch {place}/planted")).ok
        assert (await sandbox.exec("touch /tmp/a /dev/shm/b ~/c")).ok

    async def test_there_is_no_network_unless_asked_for(self, make: Start) -> None:
        names = "python3 -c 'import socket; print([name for _, name in socket.if_nameindex()])'"
        assert (await (await make()).exec(names)).stdout == "['lo']\n"
        host = [name for _, name in socket.if_nameindex()]
        assert (await (await make(network=True)).exec(names)).stdout == f"{host}\n"

    async def test_the_workdir_is_where_the_spec_wants_it(self, make: Start) -> None:
        sandbox: AsyncSandbox = await make(workdir="/testbed/project", files={"a": "1"})
        assert (await sandbox.exec("pwd; cat /testbed/project/a")).stdout == "/testbed/project\n1"

    async def test_a_workdir_in_a_system_folder_is_a_failed_start(self, root: Path, isolation: str) -> None:
        sandbox = AsyncSandbox(settings(isolation, root), SandboxSpec(workdir="/usr/no-such/place"))
        with pytest.raises(SandboxCreateError, match="bwrap: "):
            await sandbox.start()
        assert folders(root) == []

    async def test_shared_memory_is_limited(self, make: Start) -> None:
        sandbox: AsyncSandbox = await make(resources=SandboxResources(memory_mb=20))
        assert not (await sandbox.exec("head -c 30000000 /dev/zero > /dev/shm/x")).ok

    async def test_a_program_that_kills_everything_takes_the_sandbox_along(self, make: Start) -> None:
        sandbox: AsyncSandbox = await make()
        with pytest.raises(SandboxStoppedError, match="died"):
            await sandbox.exec("kill -9 -1")
        assert sandbox.status is SandboxStatus.FAILED


async def test_bubblewrap_that_is_missing_is_named_or_done_without(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_gym.sandbox import isolation as module

    module._probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(SandboxCreateError, match="not installed"):
            await AsyncSandbox(settings("bubblewrap", root)).start()
        async with AsyncSandbox(settings("auto", root)) as sandbox:
            assert sandbox.workdir.startswith(str(root))
    finally:
        module._probe.cache_clear()
