"""The life of server processes: sessions and workers lost, graceful ends, and nothing left of a killed parent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server_process import Process, eventually, gone


@pytest.mark.promise("gone-is-410")
def test_a_session_of_a_worker_that_died_is_gone_and_the_others_stay(start: Callable[..., Process]) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 2)
    sessions: dict[int, str] = {}

    def both_own_one() -> bool:
        _, body, cookie = server.call("/add")
        assert cookie is not None
        sessions[body["pid"]] = cookie
        return len(sessions) == 2

    eventually(both_own_one)
    lost, kept = sessions
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: server.call("/add", sessions[lost])[0] == 410)
    assert server.call("/add", sessions[kept])[1]["value"] == 2
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    assert server.call("/add", sessions[lost])[0] == 410


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sigterm_finishes_the_requests_in_flight_and_leaves_nothing(
    start: Callable[..., Process], num_workers: int
) -> None:
    server = start(num_workers=num_workers)
    server.wait_until_ready()
    family = server.family()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.2)
        server.process.terminate()
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 200")
    server.process.wait(15)
    eventually(lambda: gone(family))


@pytest.mark.promise("workers-follow")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_follows_its_parent(start: Callable[..., Process], num_workers: int) -> None:
    server = start(num_workers=num_workers)
    server.wait_until_ready()
    family = server.family()
    os.close(server.pipe_write)
    server.pipe_write = None  # type: ignore[assignment]
    eventually(lambda: gone(family))


@pytest.mark.promise("workers-follow")
def test_workers_follow_a_main_process_that_was_killed(start: Callable[..., Process]) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    eventually(lambda: len(list(server.builds.iterdir())) == 2)
    family = server.family()
    server.process.kill()
    eventually(lambda: gone(family))


@pytest.mark.promise("directory-swept")
def test_the_sockets_of_a_killed_main_process_are_swept_at_the_next_start(
    start: Callable[..., Process], sockets: Path
) -> None:
    server = start(num_workers=2)
    server.wait_until_ready()
    (left,) = sockets.iterdir()
    server.process.kill()
    server.process.wait()
    again = start(num_workers=2)
    again.wait_until_ready()
    assert left not in sockets.iterdir()
    again.process.terminate()
    again.process.wait(15)
    assert list(sockets.iterdir()) == []
