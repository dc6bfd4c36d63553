"""Fixtures of the server tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.server.client import close_client
from tests.server_process import SERVER, WITH_APP, Process


@pytest.fixture
async def closed_client() -> AsyncIterator[None]:
    yield
    await close_client()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path for the workers' sockets; pytest's own are too long for some systems."""
    with tempfile.TemporaryDirectory(prefix="ng-") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, sockets: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def starter(source: str = SERVER + WITH_APP, **settings: Any) -> Process:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        started.append(Process(folder, sockets, source, **settings))
        return started[-1]

    yield starter
    for process in started:
        process.close()
