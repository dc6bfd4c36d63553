"""Server processes as `gym env start` starts them: `python app.py` with the configuration in the environment."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server_process import OWN_APP, SERVER, WITH_APP, WITHOUT_APP, Process, eventually


def test_one_worker_serves_in_process_with_its_own_config_type(start: Callable[..., Process]) -> None:
    server = start(greeting="good morning")
    server.wait_until_ready()
    status, body, cookie = server.call("/add")
    assert (status, body["greeting"], body["pid"]) == (200, "good morning", server.process.pid)
    assert cookie is not None
    assert cookie.startswith("Server___server=")
    assert server.process.children() == []


@pytest.mark.promise("built-once", "reaches-its-owner")
@pytest.mark.parametrize(
    "source", [SERVER + WITH_APP, SERVER + WITHOUT_APP, SERVER + OWN_APP], ids=["app", "no app", "foreign app"]
)
def test_several_workers_build_their_application_once_each_and_keep_sessions_whole(
    start: Callable[..., Process], source: str
) -> None:
    server = start(source, num_workers=3)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    owners = set()
    for _ in range(12):
        _, first, cookie = server.call("/add")
        owners.add(first["pid"])
        for expected in (2, 3, 4):
            _, again, _ = server.call("/add", cookie)
            assert (again["value"], again["pid"]) == (expected, first["pid"])
    assert {path.read_text() for path in server.builds.iterdir()} == {"built by __mp_main__\n"}
    assert owners <= {int(path.name) for path in server.builds.iterdir()}


def test_who_only_defines_a_server_imports_no_client() -> None:
    program = "import sys, nemo_gym.base_resources_server\nsys.exit('aiohttp' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(("num_workers", "forks"), [(1, False), (2, True), (2, False)])
def test_a_server_has_imported_what_its_calls_need_before_it_serves(
    start: Callable[..., Process], num_workers: int, forks: bool
) -> None:
    imported = "{sorted({'aiohttp', 'nemo_gym.server.owner_calls'} & set(sys.modules))}"
    source = "import sys\n" + SERVER.replace("built by {type(self).__module__}", imported) + WITHOUT_APP
    server = start(source, num_workers=num_workers, forks=forks)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == num_workers)
    assert {path.read_text() for path in server.builds.iterdir()} == {"['aiohttp', 'nemo_gym.server.owner_calls']\n"}


def test_a_taken_port_is_named(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.process.wait(20) == 1
    log = server.log.read_text()
    assert f"server can't listen on 127.0.0.1:{port}: Address already in use" in log
    assert "Traceback" not in log


def test_settings_of_a_wrong_type_are_named_without_a_traceback(start: Callable[..., Process]) -> None:
    server = start(greeting=["not", "text"])
    assert server.process.wait(20) == 2
    log = server.log.read_text()
    assert "server.greeting: Input should be a valid string" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_that_cant_be_built_ends_instead_of_restarting_for_ever(
    start: Callable[..., Process], num_workers: int
) -> None:
    broken = SERVER.replace("app = super().setup_webserver()", "raise RuntimeError('no such data')")
    server = start(broken + WITH_APP, num_workers=num_workers)
    assert server.process.wait(30) == 1
    log = server.log.read_text()
    assert "no such data" in log
    assert "ERROR" in log


def test_a_dry_run_builds_the_application_and_ends(start: Callable[..., Process]) -> None:
    server = start(dry_run=True)
    assert server.process.wait(20) == 0
    assert [path.read_text() for path in server.builds.iterdir()] == ["built by __main__\n"]


def test_started_by_hand_without_configuration_it_says_how_servers_are_started(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SERVER + WITH_APP)
    result = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "gym env start" in result.stderr
    assert "Traceback" not in result.stderr
