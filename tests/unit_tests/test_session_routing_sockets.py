"""The socket directory, the private server and its place in the application's life."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from nemo_gym.errors import ConfigError
from nemo_gym.session_routing import (
    SOCKET_DIR_ENV,
    create_socket_dir,
    install_session_routing,
    remove_socket_dir,
    sweep_stale_socket_dirs,
    worker_socket_path,
)
from tests.session_workers import COOKIE, SECRET, leave_stale_socket, make_app, running_workers

INSTALL: dict[str, Any] = {"session_cookie": COOKIE, "secret_key": SECRET}


@pytest.fixture
def parent() -> Iterator[Path]:
    """A short folder of the test's own."""
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


class TestDirectory:
    @pytest.mark.promise("directory-private")
    def test_is_private_short_and_new_each_time(self) -> None:
        first, second = create_socket_dir(), create_socket_dir()
        assert first != second
        for path in (first, second):
            assert mode(path) == 0o700
            assert len(os.fsencode(worker_socket_path(path, "0" * 32))) <= 103
            assert [entry.name for entry in path.iterdir()] == ["owner"]
            remove_socket_dir(path)
            assert not path.exists()
            remove_socket_dir(path)

    @pytest.mark.promise("directory-falls-back")
    def test_falls_back_to_the_next_folder(self, parent: Path, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        too_long = tmp_path / ("x" * 100)
        too_long.mkdir()
        assert create_socket_dir(tmp_path / "missing", file, too_long, parent).parent == parent
        assert list(too_long.iterdir()) == []

    @pytest.mark.promise("directory-falls-back")
    def test_names_the_setting_and_each_cause_when_no_folder_can_be_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        too_long = tmp_path / ("x" * 100)
        too_long.mkdir()
        with pytest.raises(ConfigError, match=f"(?s)more than 103.*No such file.*{SOCKET_DIR_ENV}"):
            create_socket_dir(too_long, tmp_path / "missing")
        monkeypatch.setenv(SOCKET_DIR_ENV, str(tmp_path / "missing"))
        with pytest.raises(ConfigError, match=f"{SOCKET_DIR_ENV}.*missing: No such file"):
            create_socket_dir()

    def test_is_made_where_the_setting_says(self, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SOCKET_DIR_ENV, str(parent))
        assert create_socket_dir().parent == parent


@pytest.mark.promise("directory-swept")
class TestSweep:
    def test_takes_what_a_killed_process_left_and_leaves_what_is_in_use(self, parent: Path) -> None:
        in_use = create_socket_dir(parent)
        program = (
            "import sys, time; from nemo_gym.session_routing import create_socket_dir\n"
            "print(create_socket_dir(sys.argv[1]), flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", program, parent], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            left = Path(process.stdout.readline().strip())
            leave_stale_socket(left, "a" * 32)
            assert sweep_stale_socket_dirs(parent) == []
            process.send_signal(signal.SIGKILL)
        assert sweep_stale_socket_dirs(parent) == [left]
        assert not left.exists()
        assert in_use.exists()

    def test_leaves_what_is_not_a_socket_directory(self, parent: Path, tmp_path: Path) -> None:
        (tmp_path / "owner").write_text("1")
        (parent / "nemo-gym-link").symlink_to(tmp_path)
        (parent / "nemo-gym-file").write_text("")
        (parent / "other").mkdir()
        (parent / "other" / "owner").write_text("1")
        (parent / "nemo-gym-just-made").mkdir()
        assert sweep_stale_socket_dirs(parent) == []
        assert (tmp_path / "owner").exists()

    def test_takes_one_that_was_never_locked_after_an_hour(self, parent: Path) -> None:
        old = parent / "nemo-gym-old"
        old.mkdir()
        os.utime(old, (time.time() - 4_000,) * 2)
        assert sweep_stale_socket_dirs(parent) == [old]


class TestPrivateServer:
    @pytest.mark.promise("private-server-life")
    def test_starts_after_the_applications_start_and_stops_before_its_end(self, parent: Path) -> None:
        there: list[bool] = []

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            there.append(path.exists())
            yield
            there.append(path.exists())

        app = make_app(lifespan=lifespan)
        path = worker_socket_path(parent, install_session_routing(app, socket_dir=parent, **INSTALL))
        with TestClient(app):
            assert mode(path) == 0o600
            assert stat.S_ISSOCK(path.lstat().st_mode)
        assert there == [False, False]
        assert not path.exists()

    @pytest.mark.promise("private-server-life")
    def test_that_cannot_start_fails_the_applications_start_and_still_ends_its_lifespan(self, parent: Path) -> None:
        steps: list[str] = []

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            steps.append("start")
            try:
                yield
            finally:
                steps.append("end")

        app = make_app(lifespan=lifespan)
        install_session_routing(app, socket_dir=parent / "missing", **INSTALL)
        with pytest.raises(FileNotFoundError), TestClient(app):
            pass
        assert steps == ["start", "end"]

    @pytest.mark.promise("id-per-process")
    def test_refuses_an_id_that_another_process_has(self, parent: Path) -> None:
        app = make_app()
        leave_stale_socket(parent, install_session_routing(app, socket_dir=parent, **INSTALL))
        with pytest.raises(RuntimeError, match="call install_session_routing in each worker"), TestClient(app):
            pass

    @pytest.mark.promise("lifespan-once")
    async def test_runs_the_applications_lifespan_only_once(self, parent: Path) -> None:
        runs = 0

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            nonlocal runs
            runs += 1
            yield

        async with running_workers(parent, 2, lambda: make_app(lifespan=lifespan)) as (first, second):
            cookie = (await first.request("/seed", method="POST")).cookie
            assert (await second.request("/count", method="POST", cookie=cookie)).status == 200
        assert runs == 2
