"""What `gym eval run` shows on a terminal and on a pipe: while it runs, at its end, and when it ends early."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.rollouts.progress_record import read_runs
from tests.fake_agent import FakeAgent, read_lines, running_fake_agent, write_rows

PATIENCE_S = 120
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
HOLD: dict[str, Any] = {"behaviours": ["hold"]}


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    with running_fake_agent() as agent:
        yield agent


@pytest.fixture
def head_url(agent: FakeAgent) -> Iterator[str]:
    """A head server that knows the agent."""

    class Head(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(OmegaConf.to_yaml(agent.config())).encode())

        def log_message(self, *args: object) -> None:  # type: ignore[override]
            pass

    with HTTPServer(("127.0.0.1", 0), Head) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def call(head_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    run = ["eval", "run", "--no-serve", "--head-server", head_url, "--input", "rows.jsonl", "--output", "out.jsonl"]
    return [sys.executable, "-m", "nemo_gym.cli", *run]


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], columns: int) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env)
        os.close(follower)
        self.raw = ""

    @property
    def text(self) -> str:
        return CONTROL.sub("", self.raw).replace("\r", "")

    def read_until(self, wanted: str | None) -> None:
        """Read until a text was shown, or to the end where it is None."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted is None or wanted not in self.text:
            ready, _, _ = select.select([self._leader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"not shown: {wanted}\n{self.text}"
            try:
                data = os.read(self._leader, 65536)
            except OSError:  # how Linux tells that the other side is closed
                data = b""
            if not data:
                assert wanted is None, f"not shown: {wanted}\n{self.text}"
                return
            self.raw += data.decode("utf-8", "replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)


@contextmanager
def on_a_terminal(command: list[str], columns: int = 100) -> Iterator[Terminal]:
    terminal = Terminal(command, columns)
    try:
        yield terminal
    finally:
        terminal.close()


def on_a_pipe(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_terminal_shows_progress_and_ctrl_c_what_there_is_and_how_to_go_on(call: list[str], agent: FakeAgent) -> None:
    failing = {"behaviours": [500]}
    lost = {"behaviours": [410, "ok"], "reward": 0.5}
    write_rows(Path("rows.jsonl"), {"reward": 1.0}, lost, failing, HOLD, HOLD)
    with on_a_terminal(call) as terminal:
        terminal.read_until("3/5  60 %")
        terminal.read_until("mean reward 0.750  2 running")
        terminal.read_until("1 failed  1 run again (1 for a lost session)")
        wait_until(lambda: [run.total for run in read_runs()] == [5])
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(None)
        assert terminal.process.wait(PATIENCE_S) == 130
    agent.release()
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "the cursor is not back"
    lines = lines_of(terminal.text)
    assert "finished 2 of 5 rollouts" in lines
    assert "not made 2 under way or waiting when the run ended" in lines
    assert "run again 1 1 of them for a lost session" in lines
    assert "http_error 1 agent 'agent' answered 500: said 500" in lines
    assert "failures: out_failures.jsonl" in lines
    [run] = read_runs()
    assert (run.finished, run.done, run.failed, run.lost_sessions) == ("interrupted", 2, 1, 1)

    shown = terminal.text.partition("to go on with the 3 that are left: gym ")[2]
    again = on_a_pipe([*call[:3], *shlex.split(shown)])
    assert again.returncode == 1, again.stderr
    assert "2 of 5 rollouts were finished by an earlier run" in again.stderr
    assert "finished 2 of 5 rollouts; an earlier run had finished 2" in lines_of(again.stdout)
    assert len(read_lines(Path("out.jsonl"))) == 4


def test_a_narrow_terminal_is_enough(call: list[str], agent: FakeAgent) -> None:
    write_rows(Path("rows.jsonl"), {"id": 0}, HOLD)
    with on_a_terminal(call, columns=30) as terminal:
        terminal.read_until("1/2")
        agent.release()
        terminal.read_until(None)
        assert terminal.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in terminal.text


def test_a_pipe_gets_plain_lines_and_the_summary_with_failures_and_files(call: list[str]) -> None:
    failing = [{"behaviours": [500]}] * 4
    write_rows(Path("rows.jsonl"), {"reward": 1.0}, *failing, {"behaviours": [{"reward": "high"}]})
    result = on_a_pipe([*call, "--num-repeats", "2"])
    assert result.returncode == 1
    assert "\x1b" not in result.stdout + result.stderr
    assert result.stderr.count("failed: row") == 3, "of ten"
    lines = lines_of(result.stdout)
    for told in (
        "failed 10 8 http_error, 2 bad_reply",
        "finished 2 of 12 rollouts",
        "http_error 8 agent 'agent' answered 500: said 500",
        "rollouts: out.jsonl",
        "metrics: out_metrics.json",
        "failures: out_failures.jsonl",
        "to read them: gym eval report out.jsonl",
    ):
        assert told in lines
    assert lines[-1].startswith("to make the 10 that failed again: gym eval run")
    assert "--input rows.jsonl --output out.jsonl --num-repeats 2 --resume" in lines[-1]
    assert [run.finished for run in read_runs()] == ["completed"]


def test_a_program_gets_json_alone_and_nothing_when_it_is_stopped(call: list[str], agent: FakeAgent) -> None:
    write_rows(Path("rows.jsonl"), {"id": 0}, {"behaviours": [500]})
    told = json.loads(on_a_pipe([*call, "--json"]).stdout)
    assert (told["finished"], told["failed"], told["failures"]["http_error"]["count"]) == (1, 1, 1)
    assert set(told["files"]) == {"rollouts", "metrics", "failures"}

    write_rows(Path("rows.jsonl"), HOLD)
    command = [*call, "--json", "--overwrite"]
    stopped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    agent.wait_until(lambda: len(agent.calls) == 3)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=PATIENCE_S)
    agent.release()
    assert (stopped.returncode, out) == (128 + signal.SIGTERM, "")
    assert "to go on with the 1 that are left: gym eval run" in err
    assert "--overwrite" not in err


def test_a_run_that_nobody_reads_is_stopped_in_good_order(call: list[str], agent: FakeAgent) -> None:
    write_rows(Path("rows.jsonl"), {"id": 0}, HOLD)
    read, write = os.pipe()
    with os.fdopen(write, "w") as told:
        stopped = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=told)
    agent.wait_until(lambda: len(agent.calls) == 2)
    wait_until(lambda: len(read_lines(Path("out.jsonl"))) == 1)
    os.close(read)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(PATIENCE_S) == 128 + signal.SIGINT
    agent.release()
    assert len(read_lines(Path("out.jsonl"))) == 1
    assert [run.finished for run in read_runs()] == ["interrupted"]


def test_neither_a_state_directory_nor_metrics_that_can_not_be_written_hide_what_was_made(
    call: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path("rows.jsonl"), {"id": 0})
    Path("out_metrics.json.new").mkdir()
    Path("file").touch()
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(Path("file").absolute()))
    result = on_a_pipe(call)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("the run's progress can't be shown elsewhere") == 1
    assert "finished 1 of 1 rollouts" in lines_of(result.stderr)
    assert "error: can't write out_metrics.json: Is a directory" in result.stderr
