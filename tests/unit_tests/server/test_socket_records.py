"""The record of where a server's workers listen: who finds it, and what a wrong one does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nemo_gym.paths import state_dir
from nemo_gym.server.socket_records import read_socket_dir, recorded_socket_dir

pytestmark = pytest.mark.usefixtures("private_state")


def record() -> Path:
    (path,) = (state_dir() / "worker_sockets").iterdir()
    return path


def folder(base: Path, name: str) -> Path:
    path = base / name
    path.mkdir()
    return path


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "a/../b", "%41"])
def test_it_is_there_while_the_server_runs_and_private(tmp_path: Path, host: str) -> None:
    assert read_socket_dir(host, 80) is None
    with recorded_socket_dir(host, 80, tmp_path):
        assert read_socket_dir(host, 80) == tmp_path
        assert read_socket_dir(host, 81) is None
        assert record().stat().st_mode & 0o777 == 0o600
    assert read_socket_dir(host, 80) is None
    assert list((state_dir() / "worker_sockets").iterdir()) == []


def test_a_server_without_sockets_leaves_none() -> None:
    with recorded_socket_dir("h", 80, None):
        assert read_socket_dir("h", 80) is None


def test_a_newer_one_of_the_same_address_stays(tmp_path: Path) -> None:
    old, new = folder(tmp_path, "old"), folder(tmp_path, "new")
    first, second = recorded_socket_dir("h", 80, old), recorded_socket_dir("h", 80, new)
    first.__enter__()
    with second:
        assert read_socket_dir("h", 80) == new
        first.__exit__(None, None, None)
        assert read_socket_dir("h", 80) == new


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"socket_dir": 1}', b'{"socket_dir": "here"}', b'{"socket_dir": "/a\\u0000"}'],
)
def test_a_garbled_one_is_none(tmp_path: Path, content: bytes) -> None:
    with recorded_socket_dir("h", 80, tmp_path):
        record().write_bytes(content)
        assert read_socket_dir("h", 80) is None


@pytest.mark.promise("straight-record")
def test_one_that_others_can_write_a_link_and_a_pipe_are_none(tmp_path: Path) -> None:
    with recorded_socket_dir("h", 80, tmp_path):
        path = record()
        path.chmod(0o666)
        assert read_socket_dir("h", 80) is None
        path.chmod(0o600)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert read_socket_dir("h", 80) is None
        path.unlink()
        os.mkfifo(path, 0o600)
        assert read_socket_dir("h", 80) is None
        path.unlink()


@pytest.mark.promise("straight-record")
def test_what_a_crash_left_is_none_without_its_folder_and_is_swept_at_the_next_start(tmp_path: Path) -> None:
    lost, held = folder(tmp_path, "lost"), folder(tmp_path, "held")
    crashed = recorded_socket_dir("h", 80, lost)
    crashed.__enter__()
    lost.rmdir()
    assert read_socket_dir("h", 80) is None
    theirs = record().with_name("h_80.0123456789abcdef.json")
    theirs.write_bytes(record().read_bytes())
    with recorded_socket_dir("h", 81, held):
        assert {path.name for path in theirs.parent.iterdir() if ".0123" in path.name or "_80" in path.name} == {
            theirs.name
        }
    os.utime(theirs, (0, time.time() - 31 * 24 * 60 * 60))
    with recorded_socket_dir("h", 81, held):
        assert not theirs.exists()
    crashed.__exit__(None, None, None)


def test_a_server_starts_where_no_record_can_be_written(tmp_path: Path) -> None:
    (state_dir() / "worker_sockets").write_text("a file in its place")
    with recorded_socket_dir("h", 80, tmp_path):
        assert read_socket_dir("h", 80) is None
