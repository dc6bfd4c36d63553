"""The command `gym` from end to end: real servers, the embedded model, real signals, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

GYM = [sys.executable, "-m", "nemo_gym.cli"]
COUNTER = "example_session_state_mgmt"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def gym(here: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([*GYM, *arguments], cwd=here, capture_output=True, text=True, timeout=180)
    assert result.returncode == code, f"{arguments}\n{result.stdout}\n{result.stderr}"
    return result


@contextmanager
def gym_running(here: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    log = here / "stderr.txt"
    with (
        log.open("w") as stderr,
        subprocess.Popen([*GYM, *arguments], cwd=here, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rollout_keys(path: Path) -> Counter[tuple[int, int]]:
    return Counter((line["_ng_task_index"], line["_ng_rollout_index"]) for line in read_lines(path))


def processes_of_this_test() -> list[psutil.Process]:
    """Every process that was started with this test's own state directory, other than the test itself."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get("NEMO_GYM_STATE_DIR") == os.environ["NEMO_GYM_STATE_DIR"]
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be interrupted"
        if path.is_file() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"no {count} lines in {path}")


def test_the_counter_is_solved_by_the_embedded_model(here: Path) -> None:
    result = gym(here, "eval", "run", "--resources-server", COUNTER)
    (run_dir,) = (here / "results" / COUNTER).iterdir()
    rollouts = read_lines(run_dir / "rollouts.jsonl")
    assert len(rollouts) == 50
    assert {line["reward"] for line in rollouts} == {1.0}
    assert (run_dir / "rollouts_metrics.json").is_file()
    assert "ready after" in result.stderr
    assert "Traceback" not in result.stderr
    assert "warning" not in result.stderr.lower()
    assert processes_of_this_test() == []


def test_a_program_gets_json(here: Path) -> None:
    result = gym(here, "eval", "run", "-r", COUNTER, "--limit", "3", "--output", "out.jsonl", "--json")
    report = json.loads(result.stdout)
    assert (report["total"], report["finished"], report["failed"]) == (3, 3, 0)
    assert Path(report["files"]["rollouts"]) == here / "out.jsonl"
    profile = json.loads(gym(here, "eval", "profile", "out.jsonl", "--json").stdout)
    assert profile


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_is_resumed_without_loss_or_repetition(here: Path, signum: signal.Signals) -> None:
    call = ["eval", "run", "-r", COUNTER, "--num-repeats", "16", "--output", "out.jsonl"]
    output = here / "out.jsonl"
    with gym_running(here, *call) as process:
        wait_for_lines(output, 20, process)
        servers = processes_of_this_test()
        assert len(servers) >= 4
        process.send_signal(signum)
        code = process.wait(60)
    assert code == (-9 if signum == signal.SIGKILL else 128 + signum)
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert not alive
    if signum != signal.SIGKILL:
        assert "that are left: gym eval run --resources-server" in (here / "stderr.txt").read_text()
    assert output.read_bytes().count(b"\n") < 800
    gym(here, *call, code=2)
    gym(here, *call, "--resume")
    assert rollout_keys(output) == Counter({(task, rollout): 1 for task in range(50) for rollout in range(16)})
    assert {line["reward"] for line in read_lines(output)} == {1.0}


def test_a_new_environment_passes_its_tests_and_is_solved_on_two_workers(here: Path) -> None:
    gym(here, "env", "init", "--resources-server", "my_tally")
    assert "passed" in gym(here, "env", "test", "--resources-server", "my_tally").stdout
    gym(here, "eval", "run", "--resources-server", "my_tally", "--num-repeats", "20")
    (run_dir,) = (here / "results" / "my_tally").iterdir()
    rollouts = read_lines(run_dir / "rollouts.jsonl")
    assert len(rollouts) == 100
    assert {line["reward"] for line in rollouts} == {1.0}


def test_running_servers_are_seen_and_used_by_other_calls(here: Path) -> None:
    with gym_running(here, "env", "start", "-r", COUNTER, "--json") as process:
        assert process.stdout is not None
        decoder, text = json.JSONDecoder(), ""
        while True:
            text += process.stdout.readline()
            try:
                started, _ = decoder.raw_decode(text)
            except ValueError:
                continue
            break
        (status,) = json.loads(gym(here, "env", "status", "--json").stdout)
        assert status["healthy"]
        assert {one["name"] for one in status["servers"]} == {one["name"] for one in started["servers"]}
        assert "ok" in gym(here, "env", "status").stdout
        gym(here, "eval", "run", "--no-serve", "--limit", "5", "--output", "one.jsonl")
        gym(here, "eval", "run", "--no-serve", "--head-server", started["head_url"], "--limit", "5", "-o", "two.jsonl")
        assert len(read_lines(here / "one.jsonl")) == len(read_lines(here / "two.jsonl")) == 5
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert processes_of_this_test() == []
    assert json.loads(gym(here, "env", "status", "--json").stdout) == []


def test_a_server_that_cannot_start_shows_why(here: Path) -> None:
    gym(here, "env", "init", "--resources-server", "broken")
    app = here / "resources_servers" / "broken" / "app.py"
    app.write_text(app.read_text() + "\nraise ValueError('the answers are missing')\n")
    text = app.read_text().replace('if __name__ == "__main__":', 'if __name__ == "never":')
    app.write_text(text)
    result = gym(here, "eval", "run", "-r", "broken", code=1)
    assert "error: broken (resources_servers/broken) exited with code 1 while it was starting" in result.stderr
    assert "cause: ValueError: the answers are missing" in result.stderr
    assert processes_of_this_test() == []


def test_a_server_that_dies_ends_the_run_and_says_so(here: Path) -> None:
    call = ["eval", "run", "-r", COUNTER, "--num-repeats", "16", "--output", "out.jsonl"]
    with gym_running(here, *call) as process:
        wait_for_lines(here / "out.jsonl", 20, process)
        (victim,) = [one for one in processes_of_this_test() if one.environ().get("NEMO_GYM_CONFIG_PATH") == COUNTER]
        victim.kill()
        assert process.wait(60) == 1
    text = (here / "stderr.txt").read_text()
    assert f"error: {COUNTER} (resources_servers/{COUNTER}) was killed by SIGKILL while it was running" in text
    assert "that are left: gym eval run --resources-server" in text
    assert processes_of_this_test() == []


def test_runs_that_begin_at_once_do_not_meet(here: Path) -> None:
    call = [*GYM, "eval", "run", "-r", COUNTER, "--limit", "2"]
    runs = [subprocess.Popen(call, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    for run in runs:
        _, text = run.communicate(timeout=180)
        assert run.returncode == 0, text
    folders = list((here / "results" / COUNTER).iterdir())
    assert [len(read_lines(folder / "rollouts.jsonl")) for folder in folders] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--input", "empty.jsonl"], "empty.jsonl has no rows"),
        (["--output", "/dev/null"], "not a regular file"),
        (["--output", "no-rollouts.jsonl", "--resume"], "not a result of a rollout collection"),
        (["--limit", "1", "dry_run=true"], "gym env start"),
    ],
)
def test_what_can_not_be_run_is_refused_before_a_server_starts(here: Path, arguments: list[str], problem: str) -> None:
    (here / "empty.jsonl").touch()
    (here / "no-rollouts.jsonl").write_text('{"reward": 1.0}\n')
    result = gym(here, "eval", "run", "-r", COUNTER, *arguments, code=2)
    assert problem in result.stderr
    assert "ready" not in result.stderr
    assert result.stdout == ""
    assert sorted(path.name for path in here.rglob("*.jsonl")) == ["empty.jsonl", "no-rollouts.jsonl"]


def test_a_dry_run_builds_the_servers_and_ends(here: Path) -> None:
    result = gym(here, "env", "start", "-r", COUNTER, "dry_run=true")
    assert "Dry run: each of the 3 servers was built" in result.stderr
    assert "Stopping" not in result.stderr


def test_servers_that_do_not_start_leave_nothing_to_resume(here: Path) -> None:
    gym(here, "eval", "run", "-r", COUNTER, "--limit", "1")
    gym(here, "eval", "run", "-r", COUNTER, "server_start_timeout=0.01", code=1)
    result = gym(here, "eval", "run", "-r", COUNTER, "--limit", "1", "--resume")
    assert "1 of 1 rollouts were finished by an earlier run" in result.stderr
    assert len(list((here / "results" / COUNTER).iterdir())) == 1


def test_paths_below_the_working_directory_are_shown_relative_to_it(here: Path) -> None:
    result = gym(here, "eval", "run", "-r", COUNTER, "--limit", "1", "--output", str(here / "out.jsonl"))
    assert "rollouts: out.jsonl\nmetrics: out_metrics.json\n" in result.stdout
    assert "Results: out.jsonl\n" in result.stderr
    assert re.search(r"^finished +1 +of 1 rollouts", result.stdout, re.MULTILINE)


def test_repeats_come_from_the_call_else_from_the_dataset(here: Path) -> None:
    repeats = f"{COUNTER}_simple_agent.responses_api_agents.simple_agent.datasets.0.num_repeats=2"
    result = gym(here, "eval", "run", "-r", COUNTER, "--limit", "2", "--json", repeats)
    assert json.loads(result.stdout)["finished"] == 4
    result = gym(here, "eval", "run", "-r", COUNTER, "--limit", "2", "--num-repeats", "3", "--json", repeats)
    assert json.loads(result.stdout)["finished"] == 6


def test_a_row_that_asks_for_another_agent_is_not_given_to_the_only_one(here: Path) -> None:
    row = {
        "initial_count": 0,
        "expected_count": 0,
        "responses_create_params": {"input": "hello"},
        "agent_ref": {"type": "responses_api_agents", "name": "another_agent"},
    }
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    result = gym(here, "eval", "run", "-r", COUNTER, "--input", "rows.jsonl", "--output", "out.jsonl", code=1)
    (failure,) = read_lines(here / "out_failures.jsonl")
    assert failure["_ng_failure_class"] == "no_agent"
    assert "another_agent" in failure["reason"]
    assert "\nlogs: " in result.stdout
    named = f"{COUNTER}_simple_agent"
    gym(here, "eval", "run", "-r", COUNTER, "-a", named, "--input", "rows.jsonl", "--output", "named.jsonl")
    assert len(read_lines(here / "named.jsonl")) == 1


def test_component_tests_run_where_the_component_is(here: Path) -> None:
    tests = here / "resources_servers" / "mine" / "tests"
    tests.mkdir(parents=True)
    (tests.parent / "app.py").write_text("ANSWER = 42\n")
    (tests / "test_app.py").write_text(
        "from resources_servers.example_single_tool_call.app import __name__ as shipped\n"
        "from resources_servers.mine.app import ANSWER\n\n"
        "async def test_it(): assert (ANSWER, shipped.split('.')[1]) == (42, 'example_single_tool_call')\n"
    )
    command = ("env", "test", "--resources-server", "mine")
    told = gym(here, *command).stdout
    assert "1 passed" in told
    assert "passed" in told.splitlines()[-1]
    (tests.parent / "app.py").write_text("ANSWER = 41\n")
    gym(here, *command, code=1)
    assert "no tests" in gym(here, *command, "--", "-k", "nothing", code=1).stdout
