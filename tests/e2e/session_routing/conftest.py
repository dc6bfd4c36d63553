"""Real processes, shared as far as the tests allow: starting one costs most of a second."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.global_config import load_global_config
from tests.e2e.session_routing.processes import HERE, Folders, Servers, deployed, processes_of
from tests.fake_backend import FakeBackend, running_fake_backend

PERMISSION = "NEMO_GYM_MULTIWORKER_E2E"


@pytest.fixture(scope="session", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    if os.environ.get(PERMISSION) != "1":
        pytest.skip(f"starts some forty processes; set {PERMISSION}=1 to run it")
    base = tmp_path_factory.mktemp("session_routing")
    # Short, as the path of a socket has about 100 bytes.
    sockets = Path(tempfile.mkdtemp(prefix="routing-", dir="/tmp"))
    folders = Folders(base / "state", sockets, base / "work")
    folders.work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        folders.set_environment(patch)
        yield folders
    left = list(sockets.rglob("*"))
    shutil.rmtree(sockets)
    assert left == []
    assert processes_of(folders.state) == []


@pytest.fixture(autouse=True)
def environment(private_state: None, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test what the shared deployment was started with."""
    folders.set_environment(monkeypatch)


@pytest.fixture(scope="session")
def backend(folders: Folders) -> Iterator[FakeBackend]:
    with running_fake_backend() as fake:
        yield fake


@pytest.fixture(scope="session")
async def servers(folders: Folders, backend: FakeBackend) -> AsyncIterator[Servers]:
    """The deployment that most tests share."""
    config = load_global_config(
        [HERE / "servers.yaml"], [f"policy_base_url={backend.base_url}"], working_dir=folders.work
    )
    async with deployed(config, folders.work) as servers:
        for name in ("counter", "counter_on_eight", "agent_on_three", "notebook_agent"):
            await servers.all_workers(name)
        yield servers


@pytest.fixture(scope="session")
async def probes(folders: Folders) -> AsyncIterator[Servers]:
    """A small deployment, for tests that replace workers at most."""
    config = load_global_config([HERE / "probe.yaml", HERE / "impatient_probe.yaml"], working_dir=folders.work)
    async with deployed(config, folders.work) as servers:
        for name in ("probe", "impatient_probe"):
            await servers.all_workers(name)
        yield servers
