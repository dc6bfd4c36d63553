"""Start-up: until all workers serve, one worker and four, and importing the base of resources servers.

Target 8.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.harness.processes import cpu_seconds, tree
from benchmarks.harness.results import BenchmarkResult, Check, Column, Table
from benchmarks.harness.rounds import Measure, interleave
from benchmarks.harness.run import Run
from benchmarks.harness.servers import COUNTER, deployed, gym_config
from nemo_gym.deployment import Deployment, ServerEvent

MODULE: Final = "nemo_gym.base_resources_server"
READY: Final = Column("ready_s", "all workers ready, s")
CPU: Final = Column("cpu_s", "CPU, s")
IMPORT: Final = Column("import_s", "import, s", 3)
ONE, FOUR = "1 worker", "4 workers"

_POLL_S: Final = 0.01
_PATIENCE_S: Final = 60.0
_IMPORT: Final = f"""\
import time
began, used = time.perf_counter(), time.process_time()
import {MODULE}
print(time.perf_counter() - began, time.process_time() - used)
"""


async def run(run: Run) -> BenchmarkResult:
    """Measure starts and imports."""
    starts = Table("From the start of the server's process", (READY, CPU))
    await interleave(run, starts, {ONE: _start(run, 1), FOUR: _start(run, 4)})
    imports = Table("Warm import", (IMPORT, CPU))
    await _import()  # the first one may write byte code
    await interleave(run, imports, {MODULE: _measured_import})
    checks = [
        Check(8, "time to all workers ready: 4 workers / 1", starts.ratio(FOUR, ONE, READY.key), 1.5),
        Check(8, f"warm import of {MODULE}", imports.spread(MODULE, IMPORT.key), 0.5, unit="s"),
    ]
    return BenchmarkResult("startup", [starts, imports], checks)


def _start(run: Run, workers: int) -> Measure:
    async def measure(number: int) -> dict[str, float]:
        config = gym_config(run, {"counter": (COUNTER, {"num_workers": workers})})
        sockets = run.folder / "sockets"
        before = set(_sockets_in(sockets))
        began: list[float] = []

        def on_event(event: ServerEvent) -> None:
            if event.kind == "starting":
                began.append(time.perf_counter())

        url = config.instances["counter"].url
        ready = asyncio.create_task(_until_ready(url, sockets, before, workers))
        try:
            async with deployed(run, config, on_event) as deployment:
                ended = await ready
                return {READY.key: ended - began[0], CPU.key: _cpu_of(deployment)}
        finally:
            ready.cancel()

    return measure


async def _until_ready(url: str, sockets: Path, before: set[Path], workers: int) -> float:
    """Return when the server answers and the private sockets of all workers, where there are several, are open."""
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            opened = workers == 1 or len(set(_sockets_in(sockets)) - before) == workers
            if opened and await _answers(host, int(port)):
                break
            await asyncio.sleep(_POLL_S)
    return time.perf_counter()


def _sockets_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if len(path.name) == 32 and path.is_socket()]


async def _answers(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await reader.read()).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
    finally:
        writer.close()


def _cpu_of(deployment: Deployment) -> float:
    return cpu_seconds(tree([server.pid for server in deployment.servers if server.pid is not None]))


async def _measured_import(number: int) -> dict[str, float]:
    seconds, used = await _import()
    return {IMPORT.key: seconds, CPU.key: used}


async def _import() -> tuple[float, float]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _IMPORT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise ChildProcessError(f"importing {MODULE} failed with exit code {process.returncode}")
    seconds, used = map(float, output.split())
    return seconds, used
