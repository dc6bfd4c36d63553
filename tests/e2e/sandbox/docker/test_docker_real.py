"""The same against a real daemon with an image; skipped where none answers.

`NEMO_GYM_TEST_DOCKER_IMAGE` names the image (with /bin/sh); it must be there already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxSpec
from nemo_gym.sandbox.docker.engine import Engine, EngineError, daemon_host
from tests.e2e.sandbox.conftest import until_output

IMAGE = os.environ.get("NEMO_GYM_TEST_DOCKER_IMAGE", "debian:stable-slim")
OURS = "sleep 6789"
LEFT = f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '^{OURS}\\|{OURS} ' | head -1"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    try:
        engine = Engine(daemon_host(None), 5)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        await engine.negotiate()
        await engine.call("GET", f"/images/{IMAGE}/json")
        yield engine
    except EngineError as error:
        pytest.skip(str(error))
    finally:
        await engine.close()


async def test_commands_and_files_in_a_real_container(engine: Engine) -> None:
    async with AsyncSandbox("docker", SandboxSpec(image=IMAGE, files={"a/b": "hello"}, env={"X": "1"})) as sandbox:
        result = await sandbox.exec('pwd; cat a/b; echo "$X" >&2; exit 3')
        assert (result.return_code, result.stdout, result.stderr) == (3, f"{sandbox.workdir}\nhello", "1\n")
        assert (await sandbox.exec("wc -c", stdin=bytes(300_000))).stdout.strip() == "300000"
        await sandbox.write("new/file", "x", mode=0o755)
        await sandbox.exec("ln -s new/file link")
        await sandbox.write("link", "y")
        assert await sandbox.read("new/file") == b"y"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        assert (await sandbox.exec("cat /proc/net/route | wc -l")).stdout.strip() in ("0", "1")


async def test_a_timeout_and_a_flood_in_a_real_container(engine: Engine) -> None:
    async with AsyncSandbox("docker", SandboxSpec(image=IMAGE)) as sandbox:
        result = await sandbox.exec(f"trap '' TERM; echo begun; {OURS} & (setsid {OURS} &); {OURS}", timeout_s=0.5)
        assert (result.timed_out, result.stdout) == (True, "begun\n")
        await until_output(sandbox, LEFT, "")
        assert (await sandbox.exec("yes", timeout_s=0.5, max_output_bytes=100)).truncated
        assert (await sandbox.exec("sleep 30 & echo started", timeout_s=10)).stdout == "started\n"


async def test_a_killed_worker_leaves_no_real_container(engine: Engine) -> None:
    worker = f"""
        import asyncio
        from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

        async def main():
            sandbox = AsyncSandbox("docker", SandboxSpec(image={IMAGE!r}))
            print((await sandbox.start()).id, flush=True)
            await sandbox.exec("sleep 60")

        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(worker), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    name = (await process.stdout.readline()).decode().strip()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(20):
        while await is_there(engine, name):  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.1)


async def is_there(engine: Engine, name: str) -> bool:
    try:
        await engine.call("GET", f"/containers/{name}/json")
    except EngineError as error:
        if error.status != 404:
            raise
        return False
    return True


async def test_a_missing_image_is_named_by_the_real_daemon(engine: Engine) -> None:
    with pytest.raises(SandboxCreateError, match="no image 'nemo-gym/none:1'"):
        await AsyncSandbox("docker", SandboxSpec(image="nemo-gym/none:1")).start()
