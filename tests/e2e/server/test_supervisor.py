"""Workers that break, hang, or are many: what the main process of a server does about them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import psutil
import pytest

from tests.server_process import SERVER, WITH_APP, WITHOUT_APP, Process, eventually, gone

BREAKS_WHEN_TOLD = """
if __name__ == "__mp_main__" and (Path(os.environ["BUILDS"]).parent / "broken").exists():
    raise RuntimeError("only workers break")
"""


def workers_of(server: Process) -> list[psutil.Process]:
    return server.workers()


def log_lines(server: Process, text: str) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if text in line]


@pytest.fixture
def two_workers(start: Callable[..., Process]) -> Process:
    server = start(SERVER + BREAKS_WHEN_TOLD + WITH_APP, num_workers=2, worker_health_timeout_s=3, shutdown_grace_s=1)
    server.wait_until_ready()
    eventually(lambda: len(log_lines(server, "Application startup complete")) == 2)
    return server


def test_workers_that_break_while_importing_end_the_start(start: Callable[..., Process]) -> None:
    source = SERVER + "\nif __name__ == '__mp_main__': raise RuntimeError('only workers break')\n" + WITH_APP
    server = start(source, num_workers=2)
    assert server.process.wait(30) == 1
    assert log_lines(server, "a worker of server could not start")
    assert len(log_lines(server, "RuntimeError: only workers break")) <= 2


def test_a_replacement_that_breaks_is_tried_again_after_growing_pauses(two_workers: Process) -> None:
    flag = two_workers.folder / "broken"
    flag.touch()
    workers_of(two_workers)[0].kill()
    eventually(lambda: bool(log_lines(two_workers, "starting another in 2 s")), 40)
    assert len(log_lines(two_workers, "RuntimeError: only workers break")) == 2
    assert two_workers.call("/add")[0] == 200
    flag.unlink()
    eventually(lambda: len(log_lines(two_workers, "Application startup complete")) == 3, 40)


def test_workers_killed_one_after_the_other_are_replaced_at_once(two_workers: Process) -> None:
    for _ in range(3):
        before = workers_of(two_workers)
        before[0].kill()
        eventually(lambda before=before: bool({*workers_of(two_workers)} - {*before}))  # type: ignore[misc]
        assert two_workers.call("/add")[0] == 200
        ready = len(before)
        eventually(lambda ready=ready: len(workers_of(two_workers)) == ready)  # type: ignore[misc]
    assert two_workers.process.is_running()


def test_a_worker_that_hangs_is_replaced(two_workers: Process) -> None:
    hung = workers_of(two_workers)[0]
    hung.suspend()
    eventually(lambda: gone([hung]))
    assert log_lines(two_workers, f"Worker {hung.pid} has not answered")
    eventually(lambda: len(log_lines(two_workers, "Application startup complete")) == 3)


def test_a_worker_may_take_longer_to_start_than_it_may_be_silent(start: Callable[..., Process]) -> None:
    slow = SERVER + "\nimport time\nif __name__ == '__mp_main__': time.sleep(4)\n" + WITH_APP
    server = start(slow, num_workers=2, worker_health_timeout_s=1)
    eventually(lambda: len(log_lines(server, "Application startup complete")) == 2)
    assert not log_lines(server, "has not answered")
    assert not log_lines(server, "starting another")


def test_sighup_replaces_the_workers_and_sigttin_and_sigttou_change_their_number(two_workers: Process) -> None:
    first = {worker.pid for worker in workers_of(two_workers)}
    two_workers.process.send_signal(signal.SIGHUP)
    eventually(lambda: not first & {worker.pid for worker in workers_of(two_workers)}, 60)
    assert two_workers.call("/add")[0] == 200
    two_workers.process.send_signal(signal.SIGTTIN)
    eventually(lambda: len(workers_of(two_workers)) == 3)
    for expected in (2, 1):
        two_workers.process.send_signal(signal.SIGTTOU)
        eventually(lambda expected=expected: len(workers_of(two_workers)) == expected)  # type: ignore[misc]
    assert two_workers.call("/add")[0] == 200


def test_a_hung_worker_does_not_hold_up_the_end(two_workers: Process) -> None:
    family = two_workers.family()
    workers_of(two_workers)[0].suspend()
    two_workers.process.terminate()
    two_workers.process.wait(60)
    eventually(lambda: gone(family))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_grace_for_requests_in_flight_can_be_set(start: Callable[..., Process], num_workers: int) -> None:
    endless = SERVER.replace("asyncio.sleep(0.5)", "asyncio.sleep(500)")
    server = start(endless + WITHOUT_APP, num_workers=num_workers, shutdown_grace_s=1)
    server.wait_until_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.3)
        server.process.terminate()
        server.process.wait(8)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_lifespan_that_fails_is_a_failed_start(start: Callable[..., Process], num_workers: int) -> None:
    source = SERVER.replace(
        "        return app\n\n    async def verify",
        "        from contextlib import asynccontextmanager\n"
        "        @asynccontextmanager\n"
        "        async def lifespan(app):\n"
        "            raise RuntimeError('no database')\n"
        "            yield\n"
        "        app.router.lifespan_context = lifespan\n"
        "        return app\n\n    async def verify",
    )
    server = start(source + WITH_APP, num_workers=num_workers)
    assert server.process.wait(30) == 1
    assert log_lines(server, "no database")


HANGS_WHEN_IT_STARTS = SERVER.replace(
    "        return app\n\n    async def verify",
    "        from contextlib import asynccontextmanager\n"
    "        @asynccontextmanager\n"
    "        async def lifespan(app):\n"
    "            if (Path(os.environ['BUILDS']).parent / 'hang').exists():\n"
    "                print('hangs', flush=True)\n"
    "                await asyncio.sleep(500)\n"
    "            yield\n"
    "        app.router.lifespan_context = lifespan\n"
    "        return app\n\n    async def verify",
)


def test_a_worker_that_never_served_does_not_hold_up_the_end(start: Callable[..., Process]) -> None:
    server = start(HANGS_WHEN_IT_STARTS + WITH_APP, num_workers=2, shutdown_grace_s=600)
    server.wait_until_ready()
    (server.folder / "hang").touch()
    workers_of(server)[0].kill()
    eventually(lambda: bool(log_lines(server, "hangs")))
    family = server.family()
    server.process.terminate()
    # The one that has served ends by itself.
    assert server.process.wait(20) == 0
    eventually(lambda: gone(family))


def test_what_ends_a_whole_group_has_no_worker_replaced(two_workers: Process) -> None:
    os.killpg(two_workers.process.pid, signal.SIGTERM)
    assert two_workers.process.wait(20) == 0
    assert not log_lines(two_workers, "starting another")


def test_the_system_refusing_a_worker_does_not_end_the_others(start: Callable[..., Process]) -> None:
    server = start(SERVER + WITH_APP, num_workers=2, shutdown_grace_s=1, forks=False)
    server.wait_until_ready()
    limits = server.process.rlimit(psutil.RLIMIT_NOFILE)
    server.process.rlimit(psutil.RLIMIT_NOFILE, (server.process.num_fds() + 1, limits[1]))
    for number in (signal.SIGTTIN, signal.SIGHUP):
        server.process.send_signal(number)
    eventually(lambda: bool(log_lines(server, "could not be started") and log_lines(server, "old workers stay")))
    eventually(lambda: bool(log_lines(server, "trying again in 2 s")))
    assert server.call("/add")[0] == 200
    server.process.rlimit(psutil.RLIMIT_NOFILE, limits)
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    assert server.process.is_running()


def test_ctrl_c_ends_a_server_started_by_hand_without_a_traceback(start: Callable[..., Process]) -> None:
    server = start()
    server.wait_until_ready()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 128 + signal.SIGINT
    assert not log_lines(server, "Traceback")


def test_workers_log_as_the_main_process_does(start: Callable[..., Process]) -> None:
    loud = SERVER.replace(
        "app = super()", "import logging; logging.getLogger('mine').info('hello')\n        app = super()"
    )
    server = start(loud + WITHOUT_APP, num_workers=2)
    server.wait_until_ready()
    eventually(lambda: len(log_lines(server, " mine: hello")) == 2)


def test_the_entrypoint_may_stand_in_a_subfolder_and_only_import_the_class(start: Callable[..., Process]) -> None:
    source = f"""
from pathlib import Path
elsewhere = Path(__file__).with_name("elsewhere.py")
if __name__ == "__main__":
    elsewhere.write_text({SERVER!r})
from elsewhere import Server
"""
    server = start(source + WITHOUT_APP, entrypoint="inner/serve_it.py", num_workers=2, greeting="from afar")
    server.wait_until_ready()
    _, body, cookie = server.call("/add")
    assert body["greeting"] == "from afar"
    assert [server.call("/add", cookie)[1]["value"] for _ in range(3)] == [2, 3, 4]
