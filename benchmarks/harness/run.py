"""One run of the suite: its settings, its folder, and what it shows while it goes on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from benchmarks.harness.folders import locked_folder
from nemo_gym.paths import EXTRA_ROOTS_ENV, STATE_DIR_ENV
from nemo_gym.session_routing import SOCKET_DIR_ENV

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ROOT / "benchmarks" / "components"


@dataclass(slots=True)
class Run:
    """What every benchmark gets.

    Attributes:
        folder: For files; it is gone after the run.
        rounds: How often each alternative is measured.
        quick: Whether to do as little as shows that all works.
        console: Where progress is shown.
        notices: What the benchmark that is running has left out, and what failed.
    """

    folder: Path
    rounds: int
    quick: bool
    console: Console
    notices: list[str] = field(default_factory=list)

    def size(self, full: int, quick: int) -> int:
        """Return how much to do."""
        return quick if self.quick else full

    def with_rounds(self, most: int) -> Run:
        """Return this run with fewer rounds, for what is slow or varies little."""
        return replace(self, rounds=min(self.rounds, most))

    def step(self, text: str) -> None:
        """Show what is being done."""
        self.console.print(f"  [dim]{text}[/dim]", highlight=False)

    def notice(self, text: str) -> None:
        """Note, for the report too, what was left out or failed."""
        self.notices.append(text)
        # What programs say may look like markup: HAProxy puts paths in brackets.
        self.console.print("  [yellow]notice:[/yellow]", escape(text), highlight=False)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Give a folder for all that a run writes, and have servers keep their state in it; it is gone afterwards."""
    with locked_folder() as folder:
        changes = {
            STATE_DIR_ENV: str(folder / "state"),
            SOCKET_DIR_ENV: str(folder / "sockets"),
            EXTRA_ROOTS_ENV: str(COMPONENTS),
        }
        before = {name: os.environ.get(name) for name in changes}
        for name in ("state", "sockets", "work"):
            (folder / name).mkdir()
        os.environ.update(changes)
        try:
            yield folder
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def machine() -> dict[str, Any]:
    """Return the class of this machine, with nothing that names it."""
    return {
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_at_start": round(psutil.getloadavg()[0], 2),
    }
