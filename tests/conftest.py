"""Fixtures that every test shares."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import SERVER, WITH_APP, Process


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run more tests at once than there are cores: half of their time they wait, for graces and clients to end."""
    return 2 * (os.cpu_count() or 1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def heeded_ctrl_c() -> None:
    """Heed SIGINT, which a script's background job starts with ignored: tests send it and wait for what it ends."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own state, secrets and configuration out of every test, and the tests' out of theirs."""
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path / "state"))
    for name in ("NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH", "NEMO_GYM_SESSION_SECRET", "NEMO_GYM_EXTRA_ROOTS"):
        monkeypatch.delenv(name, raising=False)


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
        folder.mkdir(exist_ok=True)
        started.append(Process(folder, sockets, source, **settings))
        return started[-1]

    yield starter
    for process in started:
        process.close()
