"""A stand-in of the Docker daemon for tests, sandboxes in it, and the proof that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.folders import marked
from tests.e2e.sandbox.conftest import open_descriptors, tasks, until
from tests.e2e.sandbox.docker.engine_stand_in import StandIn, own_numbers

Make = Callable[..., Any]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[StandIn]:
    if not own_numbers():
        pytest.skip("a container of the stand-in needs process numbers of its own (unshare, nsenter)")
    async with StandIn(tmp_path / "d.sock") as stand_in:
        yield stand_in


@pytest.fixture
def settings(daemon: StandIn) -> dict[str, Any]:
    return {"type": "docker", "host": f"unix://{daemon.socket}", "timeout_s": 5}


@pytest.fixture
async def make(daemon: StandIn, settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[Make]:
    """Starts sandboxes; afterwards no process, container, connection or task of them may be left."""
    before = open_descriptors()
    started: list[AsyncSandbox] = []

    async def start(more: dict[str, Any] | None = None, **spec: Any) -> AsyncSandbox:
        spec = {"image": "box:1", "workdir": str(tmp_path / "work")} | spec
        sandbox = AsyncSandbox(settings | (more or {}), SandboxSpec(**spec))
        started.append(sandbox)
        await sandbox.start()
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()
    await asyncio.sleep(0)
    assert tasks() == []
    assert daemon.containers == {}
    assert [
        marked(sandbox.handle.id) for sandbox in started if sandbox._running is not None and marked(sandbox.handle.id)
    ] == []
    await until(lambda: open_descriptors() <= before)
