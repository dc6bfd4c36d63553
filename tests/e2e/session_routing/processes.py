"""A running deployment as the system sees it: which process is which worker, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_gym.config_types import ServerInstance
from nemo_gym.deployment import Deployment
from nemo_gym.errors import ServerStoppedError
from nemo_gym.global_config import GlobalConfig, load_global_config
from nemo_gym.paths import EXTRA_ROOTS_ENV, STATE_DIR_ENV
from nemo_gym.session_routing import SOCKET_DIR_ENV

HERE = Path(__file__).parent
WORKER_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Folders:
    """Where these tests keep what they must not leave behind."""

    state: Path
    sockets: Path
    work: Path

    def set_environment(self, patch: pytest.MonkeyPatch) -> None:
        patch.setenv(STATE_DIR_ENV, str(self.state))
        patch.setenv(SOCKET_DIR_ENV, str(self.sockets))
        patch.setenv(EXTRA_ROOTS_ENV, str(HERE / "components"))


class Servers:
    """The servers of a deployment, by their names."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._processes = {server.instance.name: server for server in deployment.servers}

    def instance(self, name: str) -> ServerInstance:
        return self._processes[name].instance

    def url(self, name: str) -> str:
        return self.instance(name).url

    def main(self, name: str) -> psutil.Process:
        pid = self._processes[name].pid
        assert pid is not None
        return psutil.Process(pid)

    def workers(self, name: str) -> dict[str, psutil.Process]:
        """Return the worker processes whose private socket is open, by worker id."""
        found = {}
        for child in self.main(name).children(recursive=True):
            for worker_id in worker_ids_of(child):
                found[worker_id] = child
        return found

    async def all_workers(self, name: str) -> dict[str, psutil.Process]:
        """Wait until as many workers serve as the configuration says, and return them."""
        count = self.instance(name).num_workers
        await until(lambda: len(self.workers(name)) == count)
        return self.workers(name)


def worker_ids_of(process: psutil.Process) -> set[str]:
    """Return the names of the Unix sockets that look like a worker's."""
    try:
        names = {Path(one.laddr).name for one in process.net_connections(kind="unix") if isinstance(one.laddr, str)}
    except psutil.NoSuchProcess:
        return set()
    return {name for name in names if WORKER_ID.fullmatch(name)}


def client_connections(worker: psutil.Process) -> int:
    """Return how many TCP connections of clients a worker holds."""
    connections = worker.net_connections(kind="tcp")
    ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports for one in connections)


def private_connections(worker: psutil.Process, worker_id: str) -> int:
    """Return how many connections to its private socket a worker holds."""
    ends = [one for one in worker.net_connections(kind="unix") if str(one.laddr).endswith(worker_id)]
    return len(ends) - 1  # one is the listening socket


def is_over(process: psutil.Process) -> bool:
    try:
        # Its id may be another's by now.
        return bool(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_frozen(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def deployed(config: GlobalConfig, folder: Path, *, end: str | None = None) -> AsyncIterator[Servers]:
    """Run a deployment; one of which a server ends is left as it is until the block is over.

    Args:
        config: What to run.
        folder: The user's folder.
        end: What the deployment has to say of a server that the block ends, a regular expression.
    """
    started: asyncio.Future[Servers] = asyncio.get_running_loop().create_future()
    ended, over = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with Deployment(config, working_dir=folder) as deployment:
            started.set_result(Servers(deployment))
            try:
                await over.wait()
            except asyncio.CancelledError:
                ended.set()
                await over.wait()
                raise

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: started.cancel())
    await asyncio.wait({started})
    if started.cancelled():
        task.result()
    try:
        yield started.result()
        if end is not None:
            async with asyncio.timeout(20):
                await ended.wait()
    finally:
        over.set()
        await asyncio.wait({task})
    with nullcontext() if end is None else pytest.raises(ServerStoppedError, match=end):
        task.result()


@asynccontextmanager
async def probe_deployed(folders: Folders, *, end: str | None = None) -> AsyncIterator[Servers]:
    """Run the probe alone, for a test that ends its main process; `end` as for `deployed`."""
    config = load_global_config([HERE / "probe.yaml"], working_dir=folders.work)
    async with deployed(config, folders.work, end=end) as servers:
        await servers.all_workers("probe")
        yield servers


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another process tells nobody
            await asyncio.sleep(0.02)


def processes_of(state_dir: Path) -> list[psutil.Process]:
    """Return every process that was started with this state directory, other than this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(STATE_DIR_ENV) == str(state_dir):
                found.append(process)
        except psutil.Error:
            continue
    return found
