"""`gym env status` and `/metrics` of real servers, of which a worker is killed, and one frozen."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_gym.server.figures import ServerFigures, WorkerFigures
from nemo_gym.session_routing import SOCKET_DIR_ENV

GYM = [sys.executable, "-m", "nemo_gym.cli"]
COUNTER = "example_session_state_mgmt"
WORKERS = 3
SETTINGS = f"{COUNTER}.resources_servers.{COUNTER}"


@dataclass(frozen=True)
class Running:
    """A deployment in a process of its own, and the environment in which its user calls `gym`."""

    environment: dict[str, str]
    folder: Path
    url: str

    def gym(self, *arguments: str, code: int = 0) -> str:
        result = subprocess.run(
            [*GYM, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert result.returncode == code, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def status(self, *, code: int = 0) -> dict[str, Any]:
        """What `gym env status --json` says of the counter."""
        (found,) = json.loads(self.gym("env", "status", "--json", code=code))
        assert found["healthy"] == (code == 0)
        (server,) = [one for one in found["servers"] if one["name"] == COUNTER]
        return dict(server)

    def figures(self) -> ServerFigures:
        return ServerFigures.from_json(json.loads(self.get("/workers")))

    def all_answer(self) -> bool:
        """Whether all workers of the counter answer."""
        return [worker.responding for worker in self.figures().workers] == [True] * WORKERS

    def seed(self) -> None:
        request = urllib.request.Request(
            f"{self.url}/seed_session",
            data=b'{"initial_count": 1}',
            headers={"content-type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return bytes(reply.read())

    def metrics(self, *names: str) -> list[dict[str, float]]:
        """The samples of metrics, as they are at one time, each by worker."""
        families = list(text_string_to_metric_families(self.get("/metrics").decode()))
        samples = [sample for family in families for sample in family.samples]
        return [{one.labels["worker"]: one.value for one in samples if one.name == name} for name in names]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("status")
    with tempfile.TemporaryDirectory(prefix="status-", dir="/tmp") as sockets:
        environment = {**os.environ, "NEMO_GYM_STATE_DIR": str(base / "state"), SOCKET_DIR_ENV: sockets}
        command = [*GYM, "env", "start", "-r", COUNTER, "--json", f"{SETTINGS}.num_workers={WORKERS}"]
        # A worker that a test freezes is to stay.
        command.append(f"{SETTINGS}.worker_health_timeout_s=600")
        with (
            (base / "stderr.txt").open("w") as stderr,
            subprocess.Popen(
                command, cwd=base, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as process,
        ):
            try:
                servers = {one["name"]: one["url"] for one in read_json(process)["servers"]}
                yield Running(environment, base, servers[COUNTER])
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def read_json(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    text = ""
    while line := process.stdout.readline():
        text += line
        with suppress(ValueError):
            return dict(json.loads(text))
    raise AssertionError(f"it ended before all was said: {text}")


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def successor(running: Running, victim: WorkerFigures) -> WorkerFigures:
    """Wait for the process that takes a worker's place, and return its figures."""
    found: list[WorkerFigures] = []

    def serves() -> bool:
        try:
            workers = running.figures().workers
        except OSError:  # the victim may have taken the connection
            return False
        others = [one for one in workers if one.slot == victim.slot and one.pid != victim.pid]
        found[:] = [one for one in others if one.responding and one.state == "serving"]
        return bool(found)

    eventually(serves)
    return found[0]


def test_a_killed_worker_is_seen_in_status_json_and_metrics(running: Running) -> None:
    for _ in range(12):
        running.seed()
    eventually(lambda: running.figures().sessions_open == 12)
    victim = max(running.figures().workers, key=lambda worker: worker.sessions_open)
    slot = str(victim.slot)
    os.kill(victim.pid, signal.SIGKILL)
    replaced = successor(running, victim)
    assert (replaced.restarts, replaced.last_exit) == (victim.restarts + 1, "killed by SIGKILL")
    assert replaced.sessions_lost == victim.sessions_lost + victim.sessions_open

    server = running.status()
    assert [one["slot"] for one in server["figures"]["workers"]] == list(range(WORKERS))
    assert server["health"] == "ok"
    (finding,) = [one for one in server["findings"] if one["kind"] == "replaced"]
    assert (finding["severity"], finding["worker"]) == ("warning", victim.slot)

    text = running.gym("env", "status")
    assert f"warning: {COUNTER}: worker {slot} was replaced" in text
    assert f"(killed by SIGKILL); {replaced.sessions_lost} sessions lost in its place so far" in text
    assert any({slot, str(replaced.pid)} <= set(line.split()) for line in text.splitlines())

    restarts, lost, started_at = running.metrics(
        "nemo_gym_worker_restarts_total", "nemo_gym_sessions_lost_total", "nemo_gym_worker_start_time_seconds"
    )
    assert (restarts[slot], lost[slot]) == (replaced.restarts, replaced.sessions_lost)
    assert started_at[slot] > victim.started_at
    eventually(lambda: running.metrics("nemo_gym_worker_up") == [{str(number): 1 for number in range(WORKERS)}])


def test_a_frozen_worker_is_an_error_until_it_goes_on(running: Running) -> None:
    eventually(running.all_answer)
    (victim,) = [worker for worker in running.figures().workers if worker.slot == 1]
    with frozen(victim.pid):
        server = running.status(code=1)
        (row,) = [one for one in server["figures"]["workers"] if one["pid"] == victim.pid]
        assert row["responding"] is False
        (finding,) = [one for one in server["findings"] if one["kind"] == "not_responding" and one["worker"] == 1]
        assert finding["severity"] == "error"
        up, sessions = running.metrics("nemo_gym_worker_up", "nemo_gym_sessions_open")
        assert up[str(victim.slot)] == 0
        assert str(victim.slot) not in sessions
    eventually(running.all_answer)
    running.status()


def test_watching_in_a_real_terminal_goes_on_until_ctrl_c(running: Running) -> None:
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [*GYM, "env", "status", "--watch", "--interval", "0.2"]
    environment = {name: value for name, value in running.environment.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        command,
        cwd=running.folder,
        env={**environment, "TERM": "xterm"},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    ) as process:
        os.close(inner)
        seen = b""
        while seen.count(b"Ctrl-C ends") < 3:
            seen += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # how the end of a terminal is told
            while chunk := os.read(terminal, 65536):
                seen += chunk
        assert process.wait(60) == 130
    os.close(terminal)
    assert b"req/s" in seen
    assert COUNTER.encode() in seen.split(b"\x1b[?1049l")[1], "the last frame stays"
    assert b"Traceback" not in seen


def test_a_worker_that_dies_over_and_over_is_an_error(running: Running) -> None:
    eventually(running.all_answer)
    (victim,) = [worker for worker in running.figures().workers if worker.slot == 2]
    for _ in range(3):
        os.kill(victim.pid, signal.SIGKILL)
        victim = successor(running, victim)
    (finding,) = [one for one in running.status(code=1)["findings"] if one["kind"] == "restarting"]
    assert (finding["severity"], finding["worker"]) == ("error", 2)
    assert f"worker 2 restarts over and over: {victim.deaths} times" in finding["text"]
