"""A daemon that can't be reached, hangs, dies, or speaks nonsense: clear errors, in time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxError, SandboxSpec, SandboxStatus, create_provider
from nemo_gym.sandbox.docker import sandbox as docker_sandbox
from nemo_gym.sandbox.docker.engine import Engine, EngineError, Stream, daemon_host
from nemo_gym.sandbox.providers.docker import DockerCreateConfig
from tests.e2e.sandbox.conftest import until
from tests.e2e.sandbox.docker.conftest import Make
from tests.e2e.sandbox.docker.engine_stand_in import StandIn
from tests.e2e.sandbox.docker.faults import hang, hang_up, mumble, refuse


def test_the_address_is_configured_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert daemon_host(None) == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "tcp://box:2375")
    assert daemon_host(None) == "tcp://box:2375"
    assert daemon_host("unix:///x") == "unix:///x"
    for host in ("ssh://box", "unix://", "npipe:////./pipe/docker", "/var/run/docker.sock"):
        with pytest.raises(ConfigError, match="not supported"):
            create_provider({"type": "docker", "host": host})
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    with pytest.raises(ConfigError, match="TLS"):
        daemon_host(None)


@pytest.mark.parametrize(("setting", "value"), [("pul", "never"), ("pull", "sometimes"), ("timeout_s", 0)])
def test_a_wrong_setting_is_answered_with_the_known_ones(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}(.|\n)*image_rewrites"):
        create_provider({"type": "docker", setting: value})
    assert DockerCreateConfig().pull == "never"


@pytest.mark.parametrize("host", ["unix:///no/such.sock", "tcp://127.0.0.1:9"])
async def test_a_daemon_that_cannot_be_reached_is_named(host: str) -> None:
    with pytest.raises(SandboxCreateError, match=f"{host} can't be reached: .*DOCKER_HOST"):
        await AsyncSandbox({"type": "docker", "host": host}, SandboxSpec(image="box:1")).start()
    with pytest.raises(EngineError, match=f"{host} can't be reached"):
        await Engine(host, 1).stream("/containers/x/attach")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (hang, r"did not answer within 0\.2 s"),
        (hang_up, "broke off"),
        (mumble, "makes no sense"),
        (refuse(503, "starting up"), r"starting up \(HTTP 503\)"),
    ],
)
async def test_a_daemon_that_gives_no_proper_answer_is_an_error(daemon: StandIn, fault: Any, problem: str) -> None:
    daemon.faults["GET /version"] = fault
    settings = {"type": "docker", "host": f"unix://{daemon.socket}", "timeout_s": 0.2}
    with pytest.raises(SandboxCreateError, match=problem):
        await AsyncSandbox(settings, SandboxSpec(image="box:1")).start()


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ({"ApiVersion": "1.41", "MinAPIVersion": "1.12"}, "/v1.41/"),
        ({"ApiVersion": "1.52", "MinAPIVersion": "1.44"}, "/v1.44/"),
        ({"ApiVersion": "1.60", "MinAPIVersion": "1.50"}, "/v1.50/"),
    ],
)
async def test_a_version_both_understand_is_spoken(daemon: StandIn, said: dict[str, str], spoken: str) -> None:
    daemon.version = said
    engine = Engine(f"unix://{daemon.socket}", 2)
    await engine.negotiate()
    with pytest.raises(EngineError, match="No such image"):
        await engine.call("GET", "/images/none/json")
    assert spoken in daemon.calls[-1]
    await engine.close()


@pytest.mark.parametrize(
    "said",
    [{"ApiVersion": "1.24", "Os": "linux"}, {"ApiVersion": "1.44", "Os": "windows"}, {}, {"ApiVersion": "x"}, []],
)
async def test_a_daemon_that_will_not_do_is_refused(daemon: StandIn, said: Any) -> None:
    daemon.version = said
    engine = Engine(f"unix://{daemon.socket}", 2)
    with pytest.raises(EngineError, match="speaks"):
        await engine.negotiate()
    await engine.close()


async def test_a_daemon_is_spoken_to_over_tcp(daemon: StandIn, tmp_path: Path) -> None:
    server = await asyncio.start_server(daemon._connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = {"type": "docker", "host": f"tcp://127.0.0.1:{port}"}
    spec = SandboxSpec(image="box:1", workdir=str(tmp_path / "w"))
    async with AsyncSandbox(settings, spec) as sandbox:
        assert (await sandbox.exec("wc -c", stdin=b"123")).stdout.strip() == "3"
    server.close()


async def test_a_hanging_daemon_holds_up_a_command_and_a_file_no_longer_than_its_limit(
    make: Make, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_sandbox, "LOST_WAIT_S", 0.05)
    sandbox = await make({"timeout_s": 0.2}, files={"file": "old"})
    daemon.faults = {"POST .*/exec": hang, ".*archive": hang}
    for call in (sandbox.exec("true"), sandbox.read("file"), sandbox.write("file", b"new")):
        with pytest.raises(SandboxError, match=r"did not answer within 0\.2 s"):
            await call
    daemon.faults = {"POST /exec/.*": refuse(500, "out of order")}
    with pytest.raises(SandboxError, match="out of order"):
        await sandbox.exec("true")
    daemon.faults.clear()
    assert (await sandbox.exec("cat file")).stdout == "old"
    assert sandbox.status is SandboxStatus.RUNNING


async def test_a_daemon_that_stops_reading_a_file_is_noticed(daemon: StandIn) -> None:
    async def endless() -> Any:
        while True:
            yield bytes(1 << 16)

    async def deaf(_: Any) -> bool:
        await asyncio.sleep(30)
        return True

    daemon.faults = {"PUT .*": deaf}
    engine = Engine(f"unix://{daemon.socket}", 0.3)
    with pytest.raises(EngineError, match="did not answer"):
        async with engine.opened("PUT", "/containers/x/archive", {"path": "/"}, endless()):
            pass
    await engine.close()


async def test_a_daemon_that_is_gone_does_not_hold_up_a_stop(
    make: Make, daemon: StandIn, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sandbox = await make()
    daemon.socket.rename(tmp_path / "away")
    await sandbox.stop()
    assert sandbox.status is SandboxStatus.STOPPED
    assert "may be left" not in caplog.text or "can't be reached" in caplog.text
    (tmp_path / "away").rename(daemon.socket)
    await until(lambda: not daemon.containers)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"OCI runtime error\r\n", "no frame"),
        (b"\x01\x00\x00", "broke off"),
        (b"\x01\x00\x00\x00\x00\x00\x00\x09half", "broke off"),
        (b"\x09\x00\x00\x00\x00\x00\x00\x01x", "no frame"),
    ],
)
async def test_what_is_no_stream_of_frames_is_an_error(body: bytes, problem: str) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\x02\x00\x00\x00\x00\x00\x00\x03abc" + body)
    reader.feed_eof()
    stream = Stream(reader, None, chunked=False, where="it")  # type: ignore[arg-type]
    frames = stream.frames()
    assert await anext(frames) == (2, b"abc")
    with pytest.raises(EngineError, match=problem):
        _ = [frame async for frame in frames]
