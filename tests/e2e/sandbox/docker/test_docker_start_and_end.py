"""How containers start, what they are created with, and that nothing outlives them or their worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from typing import Any

import pytest

from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxCreateError,
    SandboxSpec,
    SandboxStatus,
    SandboxStoppedError,
    create_provider,
    get_provider_class,
)
from nemo_gym.sandbox.docker import owners
from nemo_gym.sandbox.folders import marked
from nemo_gym.sandbox.providers.docker import DockerProvider
from tests.e2e.sandbox.conftest import tasks, until
from tests.e2e.sandbox.docker.conftest import Make
from tests.e2e.sandbox.docker.engine_stand_in import Call, Container, StandIn
from tests.e2e.sandbox.docker.faults import hang, refuse


async def test_a_container_is_created_closed_and_limited(make: Make, daemon: StandIn) -> None:
    assert get_provider_class("docker") is DockerProvider
    limits = {"memory_mb": 300, "cpu": 1.5, "processes": 40, "file_size_mb": 2, "cpu_time_s": 3}
    await make({"user": "0:0", "runtime": "runsc"}, resources=limits, metadata={"team": "a"}, env={"A": "b"})
    created = daemon.descriptions[-1]
    host = created["HostConfig"]
    assert (host["NetworkMode"], host["AutoRemove"], host["SecurityOpt"]) == ("none", True, ["no-new-privileges"])
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (300 << 20, 300 << 20, 1_500_000_000)
    assert host["PidsLimit"] == 48
    assert {"Name": "fsize", "Soft": 2 << 20, "Hard": 2 << 20} in host["Ulimits"]
    assert {"Name": "cpu", "Soft": 3, "Hard": 5} in host["Ulimits"]
    assert (created["User"], host["Runtime"]) == ("0:0", "runsc")
    assert (created["OpenStdin"], created["StdinOnce"], created["Tty"]) == (True, True, False)
    assert created["Labels"]["team"] == "a"
    assert created["Labels"]["nemo_gym.sandbox.pid"] == str(os.getpid())
    assert "A=b" in created["Env"]


async def test_network_is_there_when_the_spec_asks_for_it(make: Make, daemon: StandIn) -> None:
    await make({"network": "inner"}, network=True)
    host = daemon.descriptions[-1]["HostConfig"]
    assert (host["NetworkMode"], host["PidsLimit"], host["Memory"]) == ("inner", 520, 0)


async def test_the_workdir_is_the_specs_the_images_or_a_default(daemon: StandIn, settings: dict[str, Any]) -> None:
    daemon.images |= {"with:1": {"Config": {"WorkingDir": "/srv"}}, "root:1": {"Config": {"WorkingDir": "/"}}}
    daemon.faults["POST .*/start"] = refuse(400, "enough")
    for image, workdir in (("with:1", "/srv"), ("root:1", "/workspace"), ("box:1", "/workspace")):
        with pytest.raises(SandboxCreateError, match="enough"):
            await AsyncSandbox(settings, SandboxSpec(image=image)).start()
        assert daemon.descriptions[-1]["WorkingDir"] == workdir
    assert daemon.containers == {}


async def test_an_image_that_is_missing_is_pulled_where_that_is_wanted(make: Make, daemon: StandIn) -> None:
    with pytest.raises(SandboxCreateError, match=r"no image 'far:2'(.|\n)*pull"):
        await make(image="far:2")
    with pytest.raises(SandboxCreateError, match="'far:2' can't be pulled: manifest for far:2 not found"):
        await make({"pull": "missing"}, image="far:2")
    daemon.pullable = {"far:2": {"Config": None}, "mirror:5000/a/far:latest": {}}
    assert (await (await make({"pull": "missing"}, image="far:2")).exec("true")).ok
    pulls = daemon.calls.count("POST /v1.44/images/create")
    await make({"pull": "missing"}, image="far:2")
    assert daemon.calls.count("POST /v1.44/images/create") == pulls
    daemon.images["mirror:5000/a/far"] = {}
    await make({"pull": "always", "image_rewrites": {"hub/": "mirror:5000/"}, "image": "hub/a/far"}, image=None)
    assert daemon.descriptions[-1]["Image"] == "mirror:5000/a/far"
    assert daemon.calls.count("POST /v1.44/images/create") == pulls + 1


@pytest.mark.parametrize(
    ("spec", "fault", "problem"),
    [
        ({"image": "../containers/x"}, None, "no name of an image"),
        ({"image": None}, None, "no image is named"),
        ({}, ("POST /containers/create", refuse(400, "minimum memory limit")), "minimum memory limit"),
        ({}, ("POST .*/attach", refuse(500, "no attach")), "no attach"),
        ({}, ("POST .*/start", refuse(400, 'exec: "/bin/sh": no such file')), "/bin/sh"),
        ({"start_timeout_s": 0.2}, ("POST .*/start", hang), r"within 0\.2 s"),
        ({"files": {"/proc/none/x": "1"}}, None, "/proc/none"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    daemon: StandIn, settings: dict[str, Any], spec: dict[str, Any], fault: Any, problem: str, tmp_path: Any
) -> None:
    daemon.faults = dict([fault]) if fault else {}
    sandbox = AsyncSandbox(settings, SandboxSpec(**{"image": "box:1", "workdir": str(tmp_path / "w")} | spec))
    with pytest.raises(SandboxCreateError, match=problem):
        await sandbox.start()
    assert sandbox.status is SandboxStatus.FAILED
    await sandbox.stop()
    assert (daemon.containers, tasks()) == ({}, [])


async def test_a_main_process_that_ends_at_once_is_quoted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.sandbox.providers.docker.MAIN", "echo no such user >&2; exit 3")
    with pytest.raises(SandboxCreateError, match="ended at its start: no such user"):
        await make()


async def test_stop_and_cancellation_while_it_starts_leave_nothing(
    daemon: StandIn, settings: dict[str, Any], tmp_path: Any
) -> None:
    for pattern in ("POST /containers/create", "POST .*/attach", "POST .*/start"):
        for end in ("stop", "cancel"):
            reached = asyncio.Event()

            async def pause(_: Call, reached: asyncio.Event = reached) -> bool:
                reached.set()
                await asyncio.sleep(0.05)
                return False

            daemon.faults = {pattern: pause}
            sandbox = AsyncSandbox(settings, SandboxSpec(image="box:1", workdir=str(tmp_path / "w")))
            starting = asyncio.create_task(sandbox.start())
            await reached.wait()
            if end == "stop":
                await sandbox.stop()
            else:
                starting.cancel()
            with pytest.raises((asyncio.CancelledError, SandboxStoppedError)):
                await starting
            await until(lambda: (daemon.containers, tasks()) == ({}, []))


async def test_a_container_that_ends_by_itself_has_failed(make: Make, daemon: StandIn) -> None:
    sandbox = await make()
    task = asyncio.create_task(sandbox.exec("sleep 60"))
    await until(lambda: len(marked(sandbox.handle.id)) > 3)
    await daemon._remove(next(iter(daemon.containers.values())))
    with pytest.raises(SandboxStoppedError, match="died"):
        await task
    assert sandbox.status is SandboxStatus.FAILED
    with pytest.raises(SandboxStoppedError, match="died"):
        await sandbox.exec("true")


@pytest.mark.parametrize("status", [404, 409])
async def test_a_container_that_is_already_gone_is_stopped(make: Make, daemon: StandIn, status: int) -> None:
    sandbox = await make()
    daemon.faults["DELETE .*"] = refuse(status, "removal of container is already in progress")
    await sandbox.stop()
    await sandbox.stop()
    assert sandbox.status is SandboxStatus.STOPPED
    daemon.faults.clear()
    await until(lambda: not daemon.containers)  # the end of its input ends it all the same


async def test_close_stops_all_of_a_provider(daemon: StandIn, settings: dict[str, Any], tmp_path: Any) -> None:
    provider = create_provider(settings)
    spec = SandboxSpec(image="box:1", workdir=str(tmp_path / "w"))
    sandboxes = [AsyncSandbox(provider, spec) for _ in range(3)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert len(daemon.containers) == 3
    await provider.close()
    await provider.close()
    assert daemon.containers == {}
    assert {sandbox.status for sandbox in sandboxes} == {SandboxStatus.STOPPED}


async def test_a_killed_worker_leaves_nothing(daemon: StandIn, settings: dict[str, Any], tmp_path: Any) -> None:
    worker = f"""
        import asyncio
        from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

        async def main():
            sandbox = AsyncSandbox({settings!r}, SandboxSpec(image="box:1", workdir={str(tmp_path / "w")!r}))
            await sandbox.start()
            await sandbox.exec("(setsid sleep 64 &)")
            await sandbox.exec("touch begun; sleep 64")

        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(worker))
    await until((tmp_path / "w" / "begun").exists)
    name = next(iter(daemon.containers.values())).name
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not daemon.containers)
    assert marked(name) == []


async def test_what_dead_workers_left_is_removed_at_the_next_start(make: Make, daemon: StandIn) -> None:
    def container(name: str, **labels: str) -> None:
        description = {"Labels": owners.labels() | {f"nemo_gym.sandbox.{key}": value for key, value in labels.items()}}
        daemon.containers[name] = Container(name, name, description)

    container("dead", pid="4194999")
    container("recycled", started="1")
    container("mine")
    container("elsewhere", machine="another", pid="4194999")
    await make()
    names = {found.name for found in daemon.containers.values()}
    assert {"mine", "elsewhere"} <= names
    assert not {"dead", "recycled"} & names
    del daemon.containers["mine"], daemon.containers["elsewhere"]


async def test_a_sweep_that_fails_does_not_keep_a_sandbox_from_starting(
    make: Make, daemon: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.faults["GET /containers/json"] = refuse(500, "busy")
    assert (await (await make()).exec("true")).ok
    assert "busy" in caplog.text
