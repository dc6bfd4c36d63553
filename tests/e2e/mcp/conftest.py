"""One deployment for all real clients, and the installed TypeScript ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.global_config import load_global_config
from nemo_gym.paths import EXTRA_ROOTS_ENV, STATE_DIR_ENV
from nemo_gym.session_routing import SOCKET_DIR_ENV
from tests.e2e.mcp.callers import Kind
from tests.e2e.session_routing.processes import Folders, Servers, deployed, processes_of

HERE = Path(__file__).parent
COMPONENTS = HERE / "components"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    base = tmp_path_factory.mktemp("mcp")
    # Short, as the path of a socket has about 100 bytes.
    sockets = Path(tempfile.mkdtemp(prefix="mcp-", dir="/tmp"))
    folders = Folders(base / "state", sockets, base / "work")
    folders.work.mkdir()
    yield folders
    left = list(sockets.rglob("*"))
    shutil.rmtree(sockets)
    assert left == []
    assert processes_of(folders.state) == []


@pytest.fixture(autouse=True)
def environment(private_state: None, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test what the shared deployment was started with."""
    set_environment(folders, monkeypatch)


def set_environment(folders: Folders, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(STATE_DIR_ENV, str(folders.state))
    patch.setenv(SOCKET_DIR_ENV, str(folders.sockets))
    patch.setenv(EXTRA_ROOTS_ENV, str(COMPONENTS))


@pytest.fixture(scope="session")
async def servers(folders: Folders) -> AsyncIterator[Servers]:
    """The probe on four workers, and on two where a lost session is told as a JSON-RPC error."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(folders, patch)
        config = load_global_config([HERE / "servers.yaml"], working_dir=folders.work)
        async with deployed(config, folders.work) as servers:
            for name in ("probe", "jsonrpc_probe"):
                await servers.all_workers(name)
            yield servers


@pytest.fixture(scope="session")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scripts, outside the repository, with the clients installed; one for all of a run's processes."""
    if missing := [program for program in ("node", "npm") if shutil.which(program) is None]:
        text = f"the official TypeScript clients need {' and '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "typescript"
    folder.mkdir(exist_ok=True)
    installed = folder / "installed"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists():
            shutil.copytree(HERE / "typescript", folder, dirs_exist_ok=True)
            install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
            done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, f"{' '.join(install)} failed:\n{done.stdout}\n{done.stderr}"
            installed.touch()
    return folder


@pytest.fixture
def scripts(kind: Kind, request: pytest.FixtureRequest) -> Path | None:
    """What the TypeScript clients need, and the Python ones don't."""
    if kind.sdk == "python":
        return None
    folder: Path = request.getfixturevalue("typescript")
    return folder
