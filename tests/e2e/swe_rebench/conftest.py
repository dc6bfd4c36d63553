"""One deployment for all tests here: eight workers with sandboxes, an agent and a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.global_config import load_global_config
from tests.e2e.session_routing.processes import Servers, deployed, processes_of
from tests.e2e.swe_rebench.ground import HERE, Ground

PERMISSION = "NEMO_GYM_MULTIWORKER_E2E"


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    if os.environ.get(PERMISSION) != "1":
        pytest.skip(f"starts some three hundred processes; set {PERMISSION}=1 to run it")
    base = tmp_path_factory.mktemp("swe_rebench")
    # Short, as the path of a socket has about 100 bytes.
    short = Path(tempfile.mkdtemp(prefix="swe-", dir="/tmp"))
    ground = Ground(base / "state", short / "sockets", short / "sandboxes", base / "work")
    for folder in (ground.sockets, ground.sandboxes, ground.work):
        folder.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        ground.set_environment(patch)
        yield ground
    left = [*ground.sockets.rglob("*"), *ground.sandboxes.iterdir()]
    shutil.rmtree(short)
    assert left == []
    assert processes_of(ground.state) == []


@pytest.fixture(autouse=True)
def environment(private_state: None, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test what the shared deployment was started with."""
    ground.set_environment(monkeypatch)


@pytest.fixture(scope="session")
async def servers(ground: Ground) -> AsyncIterator[Servers]:
    config = load_global_config([HERE / "servers.yaml"], ground.settings, working_dir=ground.work)
    async with deployed(config, ground.work) as servers:
        await servers.all_workers("swe_rebench")
        yield servers
