"""What these tests see of the machine: the folders and processes of sandboxes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_gym.paths import EXTRA_ROOTS_ENV, STATE_DIR_ENV
from nemo_gym.sandbox.folders import MARKER
from nemo_gym.session_routing import SOCKET_DIR_ENV

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ground:
    """Where these tests keep what they must not leave behind."""

    state: Path
    sockets: Path
    sandboxes: Path
    work: Path

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        patch.setenv(STATE_DIR_ENV, str(self.state))
        patch.setenv(SOCKET_DIR_ENV, str(self.sockets))
        patch.setenv(EXTRA_ROOTS_ENV, str(HERE / "components"))

    @property
    def settings(self) -> list[str]:
        """What servers.yaml leaves open."""
        return [f"sandboxes_dir={self.sandboxes}", f"gate={self.gate}"]

    @property
    def gate(self) -> Path:
        return self.work / "gate"

    @contextmanager
    def gate_closed(self) -> Iterator[None]:
        """Keep every conversation in which a tool was called waiting for the model."""
        self.gate.mkdir()
        try:
            yield
        finally:
            self.open_gate()

    def open_gate(self) -> None:
        while self.gate.exists():
            shutil.rmtree(self.gate, ignore_errors=True)  # someone may just be coming in

    def waiting(self) -> int:
        """Return how many conversations wait at the gate."""
        return len(list(self.gate.iterdir()))

    def sandbox_ids(self) -> set[str]:
        """Return the sandboxes that have a folder: each from its start to its end."""
        return {path.name for path in self.sandboxes.glob("sb-*")}


def are_over(processes: Iterable[psutil.Process]) -> bool:
    """Tell whether all have ended. Their ids may be others' by now: sandboxes use up many."""
    return not any(map(_is_alive, processes))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def guards_of(worker: psutil.Process) -> list[psutil.Process]:
    """Return the guards of a worker's sandboxes: one each."""
    guards: list[psutil.Process] = worker.children()
    return guards


def below(workers: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the guards of the workers' sandboxes and all that runs in these."""
    return [process for worker in workers for process in worker.children(recursive=True)]


def processes_in(sandbox_ids: set[str]) -> list[psutil.Process]:
    """Return every process of this machine that was started in one of the sandboxes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) in sandbox_ids:
                found.append(process)
        except psutil.Error:
            continue
    return found
