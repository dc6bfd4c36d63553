"""Sandboxes for tests, and the proof that nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.isolation import find_bubblewrap
from tests.support import command_of

Start = Callable[..., Any]


def processes_below(root: Path) -> list[psutil.Process]:
    """The processes that were started in, for, or with a folder of the sandboxes below `root`."""
    names = [name.encode() for name in seen_names(root)]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, psutil.NoSuchProcess):  # it has ended since
                mentions = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if any(name in mentions for name in names):
                    found.append(psutil.Process(int(entry.name)))
    return found


def guard_of(root: Path) -> psutil.Process:
    """The guard of the one sandbox that is below `root`; in mode none its server, a child, has its command line."""
    guards = {found.pid: found for found in processes_below(root) if "guard" in command_of(found)}
    (guard,) = (found for found in guards.values() if found.ppid() not in guards)
    return guard


def seen_names(root: Path) -> set[str]:
    """The sandboxes that are, or in this test were, below `root`."""
    log = root.with_suffix(".names")
    names = {path.name for path in root.iterdir()} if root.exists() else set()
    if log.exists():
        names |= set(log.read_text().split())
    return names


def remember(root: Path, name: str) -> None:
    with root.with_suffix(".names").open("a") as file:
        file.write(f"{name}\n")


@pytest.fixture(params=["none", "bubblewrap"])
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap":
        found = find_bubblewrap()
        if isinstance(found, str):
            pytest.skip(found)
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
async def make(isolation: str, root: Path) -> AsyncIterator[Start]:
    """Starts sandboxes; afterwards no process, folder, descriptor, child or task of them may be left."""
    before, children_before = open_descriptors(), children()
    started: list[AsyncSandbox] = []

    async def start(settings: dict[str, Any] | None = None, **spec: Any) -> AsyncSandbox:
        config = {"type": "local", "isolation": isolation, "root_dir": str(root), **(settings or {})}
        sandbox = AsyncSandbox(config, SandboxSpec(**spec))
        started.append(sandbox)
        remember(root, (await sandbox.start()).id)
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()
    await asyncio.sleep(0)  # transports close in the next turn of the loop
    assert (open_descriptors() - before, tasks(), children() - children_before) == (set(), [], set())
    assert folders(root) == []
    assert processes_below(root) == []


def folders(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.exists() else []


def open_descriptors() -> set[str]:
    """The descriptors that are open, without the one that looking needs."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


def tasks() -> list[str]:
    """What the package's own tasks are doing."""
    return [repr(task) for task in asyncio.all_tasks() if "nemo_gym/sandbox" in repr(task)]


def children() -> set[int]:
    """This process's own children; what other tests' servers and browsers start meanwhile is theirs."""
    return {process.pid for process in psutil.Process().children()}


async def until(condition: Callable[[], Any], limit_s: float = 10) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def until_output(sandbox: AsyncSandbox, command: str, output: str, limit_s: float = 10) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if (await sandbox.exec(command)).stdout == output:
                return
            await asyncio.sleep(0.01)
