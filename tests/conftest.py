"""Fixtures that every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own state, secrets and configuration out of every test, and the tests' out of theirs."""
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(tmp_path / "state"))
    for name in ("NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH", "NEMO_GYM_SESSION_SECRET", "NEMO_GYM_EXTRA_ROOTS"):
        monkeypatch.delenv(name, raising=False)
