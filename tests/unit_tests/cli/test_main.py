"""The command as users meet it: mostly in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nemo_gym
from nemo_gym.cli import main as cli_main
from nemo_gym.cli.lazy import LAZY_COMMANDS
from nemo_gym.cli.main import run
from nemo_gym.errors import NemoGymError
from nemo_gym.paths import state_dir

HEAVY = {"fastapi", "openai", "aiohttp", "omegaconf", "uvicorn"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def gym(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemo_gym.cli", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_examples() -> None:
    result = gym("--help")
    assert result.returncode == 0
    for name in ("env", "eval", "list", "config", "version"):
        assert name in result.stdout
    assert "gym eval run --resources-server example_session_state_mgmt" in result.stdout


@pytest.mark.parametrize("arguments", ["--help", "version"])
def test_light_commands_import_no_web_framework(arguments: str) -> None:
    code = (
        "import sys\nfrom nemo_gym.cli.main import run\n"
        f"assert run(['{arguments}']) == 0\n"
        f"sys.exit(', '.join({HEAVY!r} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", LAZY_COMMANDS, ids=lambda command: command.name)
def test_every_listed_command_has_help_with_examples(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command.name, "--help"]) == 0
    assert f"Usage: gym {command.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["env", "start"],
        ["env", "status"],
        ["env", "test"],
        ["env", "init"],
        ["eval", "run"],
        ["eval", "profile"],
        ["config", "dump"],
        ["list"],
    ],
    ids=" ".join,
)
def test_every_command_shows_an_example_in_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert f"gym {' '.join(arguments)}" in text.split("Example", 1)[1]


def test_version_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"nemo_gym {nemo_gym.__version__}\n")
    assert run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nemo_gym"] == nemo_gym.__version__


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["versoin"], "Did you mean 'version'?"),
        (["env", "strat"], "Did you mean 'start'"),
        (["eval", "run", "--num-repeat", "2"], "--num-repeats"),
        (["eval", "run", "-r", "example_session_state_mgnt"], "Did you mean 'example_session_state_mgmt'?"),
        (["eval", "run", "--limit", "none"], "limit"),
        (["eval", "run", "--concurrency", "0"], "concurrency"),
        (["env", "start"], "say what to run"),
        (["env", "start", "--config", "gone.yaml"], "there is no such file"),
        (["env", "test"], "say what to test"),
        (["env", "init", "--resources-server", "My-Env"], "For example: my_env"),
        (["env", "init"], "--resources-server"),
        (["eval", "run", "--resume", "--overwrite", "-r", "x"], "exclude each other"),
        (["eval", "run", "--head-server", "http://x"], "goes with --no-serve"),
        (["eval", "run", "--no-serve"], "no deployment is running"),
        (["eval", "run", "--no-serve", "--head-server", "nonsense"], "expected an address"),
        (["eval", "run", "--no-serve", "-r", "x"], "takes no components"),
        (["eval", "profile", "gone.jsonl"], "gone.jsonl"),
        (["config", "dump", "-r", "example_session_state_mgmt", "nonsense"], "key.sub=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_exits_with_2_and_says_what_is_wrong(
    here: Path, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert hint in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert captured.out == ""


def failing(error: Exception) -> Any:
    def command(*args: Any, **kwargs: Any) -> None:
        raise error

    return command


def test_failed_work_exits_with_1_and_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_main, "write_line", failing(NemoGymError("the [disk] is full\nmake room")))
    assert run(["version"]) == 1
    assert capsys.readouterr().err == "error: the [disk] is full\nmake room\n"


def test_an_unexpected_error_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_main, "write_line", failing(ZeroDivisionError("by zero")))
    assert run(["version"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: unexpected ZeroDivisionError: by zero\nTraceback: ")
    (saved,) = (state_dir() / "tracebacks").iterdir()
    assert str(saved) in text
    assert "ZeroDivisionError: by zero" in saved.read_text()


def test_debug_shows_the_traceback_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli_main, "write_line", failing(ZeroDivisionError("by zero")))
    assert run(["--debug", "version"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_main, "write_line", failing(KeyboardInterrupt()))  # type: ignore[arg-type]
    assert run(["version"]) == 130


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m nemo_gym.cli list --json | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout == "["
    assert result.stderr == ""


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_name_that_is_no_text_can_be_shown(here: Path, flags: list[str]) -> None:
    (here / os.fsdecode(b"resources_servers/\xff")).mkdir(parents=True)
    (here / os.fsdecode(b"resources_servers/\xff/app.py")).touch()
    result = gym("list", "resources-servers", *flags, cwd=here, PYTHONIOENCODING="utf-8:strict")
    assert result.returncode == 0, result.stderr
    assert "\\udcff" in result.stdout


def test_list_shows_components_of_the_working_directory_and_shipped_ones(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "init", "--resources-server", "mine"]) == 0
    (here / "resources_servers" / "mine" / "requirements.txt").write_text(
        "# none\naiohttp>=3\nno-such-package-here==1\n"
    )
    capsys.readouterr()
    assert run(["list", "--json"]) == 0
    found = {(one["kind"], one["name"]): one for one in json.loads(capsys.readouterr().out)}
    mine = found["resources-servers", "mine"]
    assert mine["description"] == "An agent keeps a running tally."
    assert mine["shipped"] is False
    assert mine["missing"] == ["no-such-package-here"]
    assert found["resources-servers", "example_session_state_mgmt"]["shipped"] is True
    assert ("agents", "simple_agent") in found
    assert ("model-types", "pattern_model") in found

    assert run(["list", "resources-servers"]) == 0
    text = capsys.readouterr().out
    assert "mine" in text
    assert "needs: pip install no-such-package-here" in text
    assert "simple_agent" not in text


def test_config_dump_shows_what_servers_get_with_secrets_masked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "env.yaml").write_text("policy_api_key: very-secret-key\n")
    call = ["config", "dump", "-r", "example_session_state_mgmt", "--json"]
    assert run(call) == 0
    captured = capsys.readouterr()
    config = json.loads(captured.out)
    assert {"policy_model", "head_server"} <= config.keys()
    assert "very-secret-key" not in captured.out
    assert run([*call, "--show-secrets"]) == 0
    assert json.loads(capsys.readouterr().out)["policy_api_key"] == "very-secret-key"


def test_init_makes_an_environment_that_the_next_calls_find(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "init", "--resources-server", "mine"]) == 0
    captured = capsys.readouterr()
    assert "resources_servers/mine/app.py" in captured.out.splitlines()
    assert "gym eval run --resources-server mine" in captured.err
    assert run(["env", "init", "--resources-server", "mine"]) == 2


def test_status_without_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "status"]) == 0
    assert capsys.readouterr().out == "No deployment is running.\n"
    assert run(["env", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_without_pytest_the_dev_extra_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\nsys.modules['pytest'] = None\n"
        "from nemo_gym.cli.main import run\nsys.exit(run(['env', 'test', '--agent', 'simple_agent']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "pip install 'nemo-gym[dev]'" in result.stderr
