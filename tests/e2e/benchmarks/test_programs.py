"""Programs that the benchmarks run: what is told of one that fails, and what is left by one that is ended."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.harness.rounds import Load, measure_load
from benchmarks.harness.run import ROOT, Run
from benchmarks.harness.servers import Server, all_accepting, free_port, running_process

LIMIT_S = 120

ALERTS = """\
[NOTICE]   (77) : haproxy version is 2.6.12
[ALERT]    (77) : Binding [h.cfg:10] for frontend front: cannot bind socket
[ALERT]    (77) : Some protocols failed to start their listeners! Exiting.
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "work").mkdir()
    return Run(tmp_path, 1, True, Console(quiet=True))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (ALERTS, "Binding [h.cfg:10] for frontend front: cannot bind socket; Some protocols failed to start"),
        ("Traceback:\nOSError: it is in use\n\n", "OSError: it is in use"),
        ("x" * 1000 + "\n", "...xxx"),
        ("", "nothing"),
    ],
)
async def test_why_a_program_failed_is_told_in_one_line(run: Run, output: str, said: str) -> None:
    async def fail() -> None:
        async with running_process(run, ["sh", "-c", f"printf '%s' '{output}' >&2"]) as pid:
            await all_accepting(run, "127.0.0.1", free_port(), pid, 1)

    with pytest.raises(ChildProcessError) as caught:
        await fail()
    told = str(caught.value)
    assert told.startswith(f"the server ended while it was starting; the program said: {said}")
    assert "\n" not in told
    assert len(told) < 400


async def test_a_program_that_is_not_there_is_told(run: Run) -> None:
    async def fail() -> None:
        async with running_process(run, [str(run.folder / "no-such-program")]):
            pass

    with pytest.raises(ChildProcessError, match=r"the program did not start; .*no-such-program"):
        await fail()


def evening_out(port: int, workers: list[int]) -> dict[str, Any]:
    """Return the job of a client that stops all workers but one in turn, and waits for ever for answers."""
    config = {"counter": {"resources_servers": {"silent": {"entrypoint": "app.py", "host": "127.0.0.1", "port": port}}}}
    return {
        "host": "127.0.0.1",
        "port": port,
        "config": config,
        "name": "counter",
        "straight_to_owner": False,
        "workers": workers,
        "connections": 2,
        "live": 2,
        "sessions": 1,
        "warm_up": 0,
    }


async def until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Two processes that stand for workers."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield [process.pid for process in started]
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_client_ended_while_it_holds_workers_back_leaves_none_of_them_stopped(
    sleepers: list[int], silent_port: int
) -> None:
    job = evening_out(silent_port, sleepers)
    server = Server("127.0.0.1", silent_port, [], sleepers, sleepers, job["config"], "counter")
    measuring = asyncio.create_task(measure_load(server, Load("counter", "server_client", job), 0))
    await until(lambda: is_stopped(sleepers[1]))
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    await until(lambda: not is_stopped(sleepers[1]))


async def test_a_client_whose_benchmark_was_killed_leaves_no_worker_stopped(
    sleepers: list[int], silent_port: int
) -> None:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load.server_client", stdin=subprocess.PIPE, cwd=ROOT
    )
    assert client.stdin is not None
    client.stdin.write(json.dumps(evening_out(silent_port, sleepers)).encode() + b"\n")
    await until(lambda: is_stopped(sleepers[1]))
    client.stdin.close()
    await client.wait()
    await until(lambda: not is_stopped(sleepers[1]))
