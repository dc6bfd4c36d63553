"""Workers forked from a template: each is as if it had been started by itself, and nothing outlives anything."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server_process import SERVER, WITH_APP, Process, eventually, gone

# What a module finds when it is imported or run, in the main process and in the workers.
SURROUNDINGS = """
import json
import random
import resource
import signal
import sys
import threading

seed = random.random()
ticking = threading.Event()
threading.Thread(target=ticking.wait, name="of the module", daemon=True).start()

def surroundings() -> dict:
    module = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "file": __file__,
        "name": __name__,
        "main": [module.__file__, module.__name__ in ("__main__", "__mp_main__"), module.__spec__ is None],
        "is main": module.__dict__ is globals() or vars(module)["Server"] is Server,
        "set by main": os.environ.get("SET_BY_MAIN"),
        "numpy": "numpy" in sys.modules,
        "umask": umask,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_CORE", "RLIMIT_STACK")},
        "users": [os.getresuid(), os.getresgid(), os.getgroups()],
    }

if __name__ == "__main__":
    os.umask(0o027)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.nice(3)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([65534])
        os.setresgid(65534, 65534, 65534)

umask = os.umask(0o077)
os.umask(umask)

if __name__ == "__main__":
    (Path(os.environ["BUILDS"]).parent / "main.json").write_text(json.dumps(surroundings()))
    os.environ["SET_BY_MAIN"] = "yes"
    os.environ.pop("TAKEN_BY_MAIN", None)
    sys.path.append("/added/by/main")
    os.chdir("elsewhere")

class Server(Server):
    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.post("/surroundings")
        async def tell() -> dict:
            threads = [thread.name for thread in threading.enumerate()]
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            return {"of": surroundings(), "pid": os.getpid(), "seed": seed, "threads": threads,
                    "taken": os.environ.get("TAKEN_BY_MAIN"), "ignored": ignored}

        return app
"""
WAITS_FOR_A_FILE = """
import time
if __name__ == "__mp_main__":
    folder = Path(os.environ["BUILDS"]).parent
    try:
        (folder / "first").mkdir()
    except FileExistsError:
        while not (folder / "go").exists():
            time.sleep(0.02)
"""


@pytest.fixture
def three_workers(start: Callable[..., Process]) -> Process:
    server = start(num_workers=3, shutdown_grace_s=1)
    server.wait_until_ready()
    return server


def started(start: Callable[..., Process], tmp_path: Path, **settings: Any) -> tuple[Any, list[Any]]:
    """Return what the main process of a server found, and what each of two workers did."""
    server = start("import signal\n" + SERVER + SURROUNDINGS + WITH_APP, num_workers=2, **settings)
    server.wait_until_ready()
    answers: dict[int, Any] = {}

    def both_answered() -> bool:
        _, body, _ = server.call("/surroundings")
        answers[body["pid"]] = body
        return len(answers) == 2

    eventually(both_answered)
    found = json.loads((server.folder / "main.json").read_text())
    server.process.terminate()
    server.process.wait(20)
    text = json.dumps([found, [*answers.values()]]).replace(str(server.folder), "FOLDER")
    main, workers = json.loads(text)
    return main, workers


def test_a_main_process_and_its_workers_find_what_they_find_without_the_launcher(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEN_BY_MAIN", "no")
    for number in range(2):
        (tmp_path / f"server{number}" / "elsewhere").mkdir(parents=True)
    forked_main, forked = started(start, tmp_path)
    spawned_main, spawned = started(start, tmp_path, forks=False)
    assert forked_main == spawned_main
    assert forked_main["argv"] == ["app.py"]
    for worker in (*forked, *spawned):
        assert worker["of"] == spawned[0]["of"]
        assert worker["of"]["set by main"] == "yes"
        assert (worker["of"]["umask"], worker["of"]["blocked"]) == (0o027, [signal.SIGUSR2])
        assert (worker["of"]["niceness"], worker["of"]["limits"]["RLIMIT_CORE"]) == (forked_main["niceness"], [0, 0])
        assert len(worker["of"]["processors"]) == 1
        assert worker["taken"] is None
        assert not worker["ignored"]
        assert not worker["of"]["numpy"]
        assert "of the module" in worker["threads"]
    assert len({worker["seed"] for worker in (*forked, *spawned)}) == 4


def test_a_server_is_healthy_when_all_of_its_workers_serve(start: Callable[..., Process]) -> None:
    server = start(SERVER + WAITS_FOR_A_FILE + WITH_APP, num_workers=2)

    def status() -> int:
        try:
            return server.call("/health")[0]
        except OSError:
            return 0

    eventually(lambda: status() == 503)
    assert status() == 503
    assert server.call("/add")[0] == 200
    (server.folder / "go").touch()
    eventually(lambda: status() == 200)
    for worker in server.workers():
        worker.kill()
    eventually(lambda: len(list(server.builds.iterdir())) == 4)
    # A replacement does not wait for others.
    eventually(lambda: status() == 200)


@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_outlive_their_template_and_are_replaced_without_it(
    three_workers: Process, lost_by: signal.Signals
) -> None:
    family, workers = three_workers.family(), three_workers.workers()
    three_workers.template().send_signal(lost_by)
    assert three_workers.call("/add")[0] == 200
    workers[0].kill()
    eventually(lambda: "Workers can't be forked any more" in three_workers.log.read_text())
    eventually(lambda: len(list(three_workers.builds.iterdir())) == 4, 60)
    assert all(worker.is_running() for worker in workers[1:])
    family += three_workers.family()
    three_workers.process.terminate()
    assert three_workers.process.wait(20) == 0
    eventually(lambda: gone(family))


@pytest.mark.promise("workers-follow")
def test_workers_follow_the_main_process_although_their_template_is_gone(three_workers: Process) -> None:
    family = three_workers.family()
    three_workers.template().kill()
    three_workers.process.kill()
    eventually(lambda: gone(family))


def test_a_frozen_template_does_not_hold_up_the_end(three_workers: Process) -> None:
    family = three_workers.family()
    three_workers.template().suspend()
    three_workers.process.terminate()
    three_workers.process.wait(20)
    eventually(lambda: gone(family))


def test_what_stops_a_whole_group_leaves_the_template_to_its_main_process(three_workers: Process) -> None:
    template, family = three_workers.template(), three_workers.family()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        template.send_signal(number)
    three_workers.workers()[0].kill()
    eventually(lambda: len(list(three_workers.builds.iterdir())) == 4)
    assert three_workers.template() == template
    three_workers.process.send_signal(signal.SIGINT)
    three_workers.process.wait(20)
    eventually(lambda: gone(family))


def test_workers_and_template_hold_no_descriptors_of_each_other(three_workers: Process) -> None:
    template = three_workers.template()
    before = template.num_fds()
    for count in (4, 5):
        three_workers.workers()[0].kill()
        eventually(lambda count=count: len(list(three_workers.builds.iterdir())) == count)  # type: ignore[misc]
        eventually(lambda: len(three_workers.workers()) == 3)
    assert template.num_fds() == before
    eventually(lambda: len({open_pipes(worker) for worker in three_workers.workers()}) == 1)


@pytest.mark.parametrize("who", ["main process", "template"])
def test_a_process_short_of_descriptors_starts_a_worker_later(three_workers: Process, who: str) -> None:
    short = three_workers.process if who == "main process" else three_workers.template()
    before = three_workers.workers()
    limits = short.rlimit(psutil.RLIMIT_NOFILE)
    three_workers.process.send_signal(signal.SIGTTIN)
    eventually(lambda: len(three_workers.workers()) == 4)
    eventually(lambda: len(list(three_workers.builds.iterdir())) == 4)
    held = short.num_fds()
    short.rlimit(psutil.RLIMIT_NOFILE, (held + 1, limits[1]))
    three_workers.process.send_signal(signal.SIGTTIN)
    eventually(lambda: "could not be started" in three_workers.log.read_text())
    assert three_workers.call("/add")[0] == 200
    assert all(worker.is_running() for worker in before)
    assert short.num_fds() == held
    short.rlimit(psutil.RLIMIT_NOFILE, limits)
    eventually(lambda: len(list(three_workers.builds.iterdir())) == 5)
    assert three_workers.process.is_running()
    assert "Workers can't be forked any more" not in three_workers.log.read_text()


def test_a_system_without_files_in_memory_has_its_workers_spawned(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef memfd_create(name, flags=0):\n    raise OSError(38, 'Function not implemented')\n"
        "os.memfd_create = memfd_create\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        server = start(SERVER + WITH_APP, num_workers=2)
    server.wait_until_ready()
    assert len(server.workers()) == 2


def test_the_end_of_a_worker_is_known_where_such_signals_are_ignored(start: Callable[..., Process]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server = start(SERVER + WITH_APP, num_workers=2)
    finally:
        signal.signal(signal.SIGCHLD, before)
    server.wait_until_ready()
    worker = server.workers()[0]
    worker.kill()
    eventually(lambda: f"Worker {worker.pid} ended with code -9; starting another" in server.log.read_text())
    eventually(lambda: len(list(server.builds.iterdir())) == 3)
    assert "Workers can't be forked any more" not in server.log.read_text()


def open_pipes(process: psutil.Process) -> int:
    """Return how many pipes a process has open."""
    names = []
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            names.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return sum(name.startswith("pipe:") for name in names)
