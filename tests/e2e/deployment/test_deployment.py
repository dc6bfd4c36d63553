"""Real server processes, as small as they can be: scripts that need only the standard library."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nemo_gym.deployment import Deployment, ServerEvent, StopSignals, running_deployments
from nemo_gym.deployment.process import find_cause
from nemo_gym.deployment.records import RunFiles
from nemo_gym.errors import ConfigError, Interrupted, NemoGymError, ServerStartError, ServerStoppedError
from nemo_gym.global_config import GlobalConfig, load_global_config
from nemo_gym.paths import state_dir

PREAMBLE = """
import json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

settings = json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])[os.environ["NEMO_GYM_CONFIG_PATH"]]
settings = settings["resources_servers"]["tiny"]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("RuntimeError: told to die", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *args):
        pass

def serve():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    HTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


MakeConfig = Callable[..., GlobalConfig]


@pytest.fixture
def make_config(project: Path) -> MakeConfig:
    def make(body: str = "serve()", names: tuple[str, ...] = ("one", "two"), extra: str = "") -> GlobalConfig:
        write_project(project, body, names, extra)
        return load_global_config([project / "config.yaml"])

    return make


def write_project(project: Path, body: str, names: tuple[str, ...] = ("one", "two"), extra: str = "") -> None:
    folder = project / "resources_servers" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "app.py").write_text(PREAMBLE + textwrap.dedent(body), encoding="utf-8")
    instances = "".join(f"{name}: {{resources_servers: {{tiny: {{entrypoint: app.py}}}}}}\n" for name in names)
    (project / "config.yaml").write_text(instances + extra, encoding="utf-8")


def setter(event: asyncio.Event, kind: str) -> Callable[[ServerEvent], None]:
    """Return a handler that sets `event` at the first event of a kind."""

    def on_event(server_event: ServerEvent) -> None:
        if server_event.kind == kind:
            event.set()

    return on_event


def pids_of(deployment: Deployment) -> list[int]:
    return [server.pid for server in deployment.servers if server.pid is not None]


def server_processes(project: Path) -> list[psutil.Process]:
    """Whatever still runs in the project's component folder, which no other test has."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(project / "resources_servers")):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_gone(processes: list[psutil.Process], seconds: float = 60) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive


async def get(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    port, _, path = port.partition("/")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
    await reader.read()
    writer.close()


async def test_all_servers_answer_inside_and_none_is_left_after(make_config: MakeConfig, project: Path) -> None:
    config = make_config()
    async with Deployment(config) as deployment:
        pids = pids_of(deployment)
        assert len(pids) == 2
        for instance in config.instances.values():
            await get(f"{instance.url}/health")
        await get(f"{deployment.head_url}/health")
        assert all(os.getsid(pid) == pid for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert server_processes(project) == []


async def test_events_tell_each_step_of_each_server(make_config: MakeConfig) -> None:
    events: list[ServerEvent] = []
    async with Deployment(make_config(), on_event=events.append):
        assert {(event.kind, event.instance.name) for event in events} == {
            ("starting", "one"),
            ("starting", "two"),
            ("ready", "one"),
            ("ready", "two"),
        }
        assert all(event.seconds > 0 for event in events if event.kind == "ready")
        events.clear()
    assert [event.kind for event in events] == ["stopping", "stopping", "stopped", "stopped"]


async def test_a_display_that_fails_does_not_keep_servers_alive(make_config: MakeConfig, project: Path) -> None:
    def broken(event: ServerEvent) -> None:
        raise OSError("the terminal is gone")

    async with Deployment(make_config(), on_event=broken):
        pass
    assert server_processes(project) == []


async def test_a_server_that_exits_at_start_shows_its_cause_and_log(make_config: MakeConfig, project: Path) -> None:
    config = make_config(
        """
        if os.environ["NEMO_GYM_CONFIG_PATH"] == "two":
            print("reading the answers")
            raise ValueError("no answers in \\u20ac file")
        serve()
        """
    )
    with pytest.raises(ServerStartError) as caught:
        async with Deployment(config):
            pytest.fail("one server never came up")
    text = str(caught.value)
    assert "two (resources_servers/tiny) exited with code 1" in text
    assert "cause: ValueError: no answers in \u20ac file" in text
    assert "| reading the answers" in text
    (log,) = [line for line in text.splitlines() if line.startswith("log: ")]
    assert os.path.isfile(log.removeprefix("log: "))  # noqa: ASYNC240, PTH113
    assert server_processes(project) == []


async def test_only_the_last_thirty_lines_of_a_log_are_shown(make_config: MakeConfig) -> None:
    config = make_config("for i in range(100): print('line', i)\nsys.exit(1)", names=("one",))
    with pytest.raises(ServerStartError) as caught:
        async with Deployment(config):
            pass
    shown = [line for line in str(caught.value).splitlines() if line.startswith("  | ")]
    assert shown == [f"  | line {i}" for i in range(70, 100)]


async def test_a_huge_log_and_endless_lines_are_cut(make_config: MakeConfig) -> None:
    config = make_config("print('x' * 1_000_000)\nprint('y' * 1000)\nsys.exit(1)", names=("one",))
    with pytest.raises(ServerStartError) as caught:
        async with Deployment(config):
            pass
    shown = [line for line in str(caught.value).splitlines() if line.startswith("  | ")]
    assert shown == [f"  | {'x' * 500}", f"  | {'y' * 500}"]


async def test_a_server_that_never_answers_is_given_up_after_the_limit(make_config: MakeConfig, project: Path) -> None:
    config = make_config("time.sleep(600)", names=("one",), extra="server_start_timeout: 0.5\nserver_stop_grace: 5\n")
    with pytest.raises(ServerStartError, match=r"one .* was not ready after 0\.5 s .*server_start_timeout"):
        async with Deployment(config):
            pass
    assert server_processes(project) == []


async def test_a_slow_server_is_waited_for(make_config: MakeConfig) -> None:
    ready: list[ServerEvent] = []
    config = make_config("time.sleep(1)\nserve()", names=("one",))
    async with Deployment(config, on_event=ready.append):
        pass
    assert next(event.seconds for event in ready if event.kind == "ready") >= 1


async def test_a_taken_port_is_named_before_anything_starts(make_config: MakeConfig) -> None:
    config = make_config()
    taken = config.instances["two"].port
    events: list[ServerEvent] = []
    with socket.socket() as blocker:
        blocker.bind(("127.0.0.1", taken))
        blocker.listen()
        with pytest.raises(ServerStartError, match=f"two: port {taken} on 127.0.0.1 is in use"):
            async with Deployment(config, on_event=events.append):
                pass
    assert events == []


async def test_a_port_taken_meanwhile_is_recognised_in_the_log(make_config: MakeConfig) -> None:
    config = make_config("raise OSError(98, 'Address already in use')", names=("one",))
    with pytest.raises(ServerStartError) as caught:
        async with Deployment(config):
            pass
    assert f"cause: port {config.instances['one'].port} on 127.0.0.1 is in use" in str(caught.value)


async def test_an_address_of_another_machine_is_refused(make_config: MakeConfig, project: Path) -> None:
    make_config()
    config = load_global_config(
        [project / "config.yaml"], [f"one.resources_servers.tiny.{key}" for key in ("host=192.0.2.1", "port=4321")]
    )
    with pytest.raises(ServerStartError, match=r"one: can't listen on 192\.0\.2\.1, port 4321"):
        async with Deployment(config):
            pass


async def test_a_missing_entrypoint_is_named(make_config: MakeConfig, project: Path) -> None:
    config = make_config()
    (project / "resources_servers" / "tiny" / "app.py").unlink()
    with pytest.raises(ServerStartError, match=r"one: its entrypoint .*app\.py does not exist"):
        async with Deployment(config):
            pass


@pytest.mark.parametrize("key", ["server_start_timeout", "server_stop_grace"])
def test_times_must_be_numbers_of_seconds(make_config: MakeConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected a number of seconds above 0, got 'soon'"):
        Deployment(make_config(extra=f"{key}: soon\n"))


async def run_until_crash(config: GlobalConfig, signum: signal.Signals | None = None) -> None:
    async with asyncio.timeout(30), Deployment(config) as deployment:
        if signum is None:
            await get(f"{config.instances['one'].url}/die")
        else:
            os.kill(pids_of(deployment)[0], signum)
        await asyncio.Event().wait()


async def test_a_crash_ends_the_block_and_stops_the_others(make_config: MakeConfig, project: Path) -> None:
    config = make_config()
    with pytest.raises(ServerStoppedError) as caught:
        await run_until_crash(config)
    assert "one (resources_servers/tiny) exited with code 3 while it was running" in str(caught.value)
    assert "cause: RuntimeError: told to die" in str(caught.value)
    assert server_processes(project) == []


async def test_a_crash_while_others_still_start_ends_the_start(make_config: MakeConfig, project: Path) -> None:
    config = make_config(
        """
        if os.environ["NEMO_GYM_CONFIG_PATH"] == "two":
            time.sleep(600)
        serve()
        """,
        extra="server_stop_grace: 1\n",
    )

    def kill_when_ready(event: ServerEvent) -> None:
        if event.kind == "ready":
            asyncio.get_running_loop().call_soon(os.kill, pids_of(deployment)[0], signal.SIGKILL)

    deployment = Deployment(config, on_event=kill_when_ready)

    async def work() -> None:
        async with asyncio.timeout(30), deployment:
            pytest.fail("one server never came up")

    with pytest.raises(ServerStoppedError, match=r"one .* was killed by SIGKILL"):
        await work()
    assert server_processes(project) == []


async def test_a_crash_that_also_broke_the_work_is_the_error_shown(make_config: MakeConfig) -> None:
    config = make_config()

    async def work() -> None:
        async with Deployment(config):
            await get(f"{config.instances['one'].url}/die")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ConnectionError("the counter does not answer") from None

    with pytest.raises(ServerStoppedError) as caught:
        await asyncio.wait_for(work(), 30)
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_a_crash_in_the_moment_the_work_fails_leaves_no_cancellation_behind(make_config: MakeConfig) -> None:
    config = make_config()
    crashed = asyncio.Event()

    async def work() -> None:
        async with Deployment(config, on_event=setter(crashed, "failed")):
            # The owner of the deployment waits in a way that swallows the cancellation.
            try:
                await get(f"{config.instances['one'].url}/die")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    with pytest.raises(ServerStoppedError):
        await work()
    assert crashed.is_set()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_server_killed_by_a_signal_says_which(make_config: MakeConfig) -> None:
    with pytest.raises(ServerStoppedError, match=r"one .* was killed by SIGKILL"):
        await run_until_crash(make_config(), signal.SIGKILL)


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(
    make_config: MakeConfig, project: Path
) -> None:
    config = make_config(
        """
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.pause()"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        HTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
        """,
        names=("one",),
        extra="server_stop_grace: 0.3\n",
    )
    async with Deployment(config):
        processes = server_processes(project)
        assert len(processes) == 2
    wait_gone(processes)


async def test_what_a_server_leaves_running_goes_with_it(make_config: MakeConfig, project: Path) -> None:
    config = make_config(
        'subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])\nserve()', names=("one",)
    )
    async with Deployment(config):
        processes = server_processes(project)
        assert len(processes) == 2
    wait_gone(processes)


async def test_cancelling_while_servers_stop_kills_them_at_once(make_config: MakeConfig, project: Path) -> None:
    config = make_config(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        HTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
        """,
        extra="server_stop_grace: 600\n",
    )
    stopping = asyncio.Event()

    async def run() -> None:
        async with Deployment(config, on_event=setter(stopping, "stopping")):
            pass

    async with asyncio.timeout(60):
        task = asyncio.create_task(run())
        await stopping.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server_processes(project) == []


async def test_the_record_is_there_while_it_runs(make_config: MakeConfig, project: Path) -> None:
    config = make_config()
    async with Deployment(config) as deployment:
        (record,) = running_deployments()
        assert record.pid == os.getpid()
        assert record.head_url == deployment.head_url
        assert record.working_dir == str(project)
        assert record.config_paths == [str(project / "config.yaml")]
        assert sorted(os.listdir(record.log_dir)) == ["one.log", "two.log"]  # noqa: PTH208
    assert running_deployments() == []


async def test_a_dry_run_builds_every_server_and_serves_none(make_config: MakeConfig, project: Path) -> None:
    events: list[ServerEvent] = []
    config = make_config("time.sleep(0.2)", extra="dry_run: true\n")
    async with Deployment(config, on_event=events.append):
        assert [event.kind for event in events] == ["starting", "starting", "ready", "ready"]
        assert server_processes(project) == []


async def test_a_dry_run_shows_why_a_server_can_not_be_built(make_config: MakeConfig) -> None:
    config = make_config("raise ValueError('no answers')", names=("one",), extra="dry_run: true\n")
    with pytest.raises(ServerStartError, match=r"exited with code 1 (.|\n)*cause: ValueError: no answers"):
        async with Deployment(config):
            pytest.fail("it can't be built")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of one environment variable is Linux's")
async def test_a_configuration_too_large_to_be_handed_over_says_so(make_config: MakeConfig, project: Path) -> None:
    config = make_config(extra=f"table: {'x' * 140_000}\n")
    with pytest.raises(ConfigError, match=r"137 KB.* 128 KB") as caught:
        async with Deployment(config):
            pytest.fail("no server can be started")
    assert "file" in str(caught.value)
    assert server_processes(project) == []


@pytest.mark.parametrize("use", [running_deployments, RunFiles])
def test_a_state_folder_that_can_not_be_used_is_named(
    use: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(blocked))
    with pytest.raises(NemoGymError, match=rf"{blocked}(.|\n)*NEMO_GYM_STATE_DIR"):
        use()


def test_a_record_whose_process_is_gone_is_removed() -> None:
    folder = state_dir() / "deployments"
    folder.mkdir(parents=True)
    # The id of a process that does run: only the lock counts.
    stale = folder / f"20260101T000000Z-{os.getpid()}-abcd.json"
    stale.write_text('{"pid": 1, "head_url": "", "working_dir": "", "started_at": "", "log_dir": ""}')
    (folder / "broken.json").write_text("{")
    assert running_deployments() == []
    assert not stale.exists()


async def test_the_log_folders_of_the_last_ten_runs_are_kept(make_config: MakeConfig) -> None:
    logs = state_dir() / "logs"
    for number in range(15):
        (logs / f"20260101T0000{number:02}Z-1-abcd").mkdir(parents=True)
    async with Deployment(make_config(names=("one",))) as deployment:
        kept = sorted(path.name for path in logs.iterdir())
    assert kept == [f"20260101T0000{number:02}Z-1-abcd" for number in range(6, 15)] + [deployment.log_dir.name]


PARENT = """
import asyncio, sys
from nemo_gym.deployment import Deployment, StopSignals
from nemo_gym.errors import Interrupted
from nemo_gym.global_config import load_global_config

async def main():
    async with StopSignals(), Deployment(load_global_config(["config.yaml"])):
        print("running", flush=True)
        await asyncio.Event().wait()

try:
    asyncio.run(main())
except Interrupted as interrupted:
    sys.exit(128 + interrupted.signum)
"""


@contextmanager
def parent_process(project: Path, *, wait_ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A parent in a process of its own, once its servers are ready."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=project, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        try:
            if wait_ready:
                assert parent.stdout.readline() == "running\n"
            yield parent
        finally:
            parent.kill()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_every_server_in_good_order(project: Path, signum: signal.Signals) -> None:
    write_project(project, "serve()")
    with parent_process(project) as parent:
        processes = server_processes(project)
        assert len(processes) == 2
        parent.send_signal(signum)
        assert parent.wait(30) == 128 + signum
        assert not any(process.is_running() for process in processes)


def test_ctrl_c_while_servers_start_stops_them(project: Path) -> None:
    write_project(project, "open(os.environ['NEMO_GYM_CONFIG_PATH'], 'w').close()\ntime.sleep(600)")
    markers = [project / "resources_servers" / "tiny" / name for name in ("one", "two")]
    with parent_process(project, wait_ready=False) as parent:
        wait_until(lambda: all(marker.exists() for marker in markers))
        processes = server_processes(project)
        assert len(processes) == 2
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 128 + signal.SIGINT
        assert not any(process.is_running() for process in processes)


def test_a_second_ctrl_c_kills_servers_that_do_not_want_to_stop(project: Path) -> None:
    write_project(
        project,
        """
        def refuse(*_):
            open(settings["marker"] + os.environ["NEMO_GYM_CONFIG_PATH"], "w").close()
        signal.signal(signal.SIGTERM, refuse)
        HTTPServer((settings["host"], settings["port"]), Handler).serve_forever()
        """,
        extra="server_stop_grace: 600\n",
    )
    text = (project / "config.yaml").read_text().replace("app.py}", "app.py, marker: marker-}")
    (project / "config.yaml").write_text(text)
    markers = [project / "resources_servers" / "tiny" / f"marker-{name}" for name in ("one", "two")]
    with parent_process(project) as parent:
        processes = server_processes(project)
        parent.send_signal(signal.SIGINT)
        wait_until(lambda: all(marker.exists() for marker in markers))
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 128 + signal.SIGINT
        assert not any(process.is_running() for process in processes)


def test_no_server_outlives_a_killed_parent(project: Path) -> None:
    write_project(
        project,
        """
        from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer

        class Tiny(SimpleResourcesServer):
            async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
                return BaseVerifyResponse(**body.model_dump(), reward=1.0)

        if __name__ == "__main__":
            Tiny.run_webserver()
        """,
    )
    text = (project / "config.yaml").read_text().replace("app.py}", "app.py, num_workers: 2}", 1)
    (project / "config.yaml").write_text(text)
    with parent_process(project) as parent:
        processes = server_processes(project)
        assert len(processes) >= 4  # a server, and one with two workers
        parent.kill()
        wait_gone(processes)


def wait_until(condition: Callable[[], bool], attempts: int = 6000) -> None:
    for _ in range(attempts):
        if condition():
            return
        signal.sigtimedwait([], 0.01)
    pytest.fail("it did not happen in time")


async def test_a_signal_becomes_an_interruption_when_the_block_has_ended() -> None:
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        async with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up = True

    with pytest.raises(Interrupted) as caught:
        await work()
    assert caught.value.signum == signal.SIGTERM
    assert cleaned_up


async def test_a_server_that_was_stopped_by_the_same_signal_has_not_failed() -> None:
    async def work() -> None:
        async with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ServerStoppedError("one exited with code 0") from None

    with pytest.raises(Interrupted):
        await work()


async def test_a_signal_does_not_hide_another_error() -> None:
    async def work() -> None:
        async with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise OSError("the disk is full") from None

    with pytest.raises(OSError, match="the disk is full"):
        await work()


async def test_a_signal_that_was_ignored_before_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with StopSignals():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["Traceback:", "  File x", "ValueError: no", "stopping"], "ValueError: no"),
        (["pkg.errors.ConfigError: bad key"], "pkg.errors.ConfigError: bad key"),
        (["2026-01-02 03:04:05,678 ERROR a 7 nemo_gym.server: key: wrong", "a hint"], "key: wrong"),
        (
            [
                "2026-01-02 03:04:05,678 ERROR a/0a1b 8 nemo_gym.server.bootstrap: env.port: wrong",
                "2026-01-02 03:04:05,678 ERROR a/main 7 nemo: a worker of a could not start; its error stands above",
            ],
            "env.port: wrong",
        ),
        (
            [
                "2026-01-02 03:04:05,678 ERROR a 7 nemo_gym.server: A failed: ValueError: no (a/app.py:3)",
                "    | Traceback (most recent call last):",
                "    | ValueError: no",
            ],
            "ValueError: no",
        ),
        (
            [
                '{"time": "2026-01-02T03:04:05.678Z", "level": "ERROR", "server": "a", "pid": 7, "logger": "nemo_gym", '
                '"message": "A failed", "exception": "ValueError: a \\"no\\"", "traceback": "Traceback (most'
            ],
            'A failed: ValueError: a "no"',
        ),
        (["first", "last", ""], "last"),
        (["first", "2026-01-02 03:04:05,678 INFO a 7 uvicorn.error: Application startup complete."], "first"),
        (["2026-01-02 03:04:05,678 INFO a 7 uvicorn.error: Application startup complete."], None),
        ([], None),
    ],
)
def test_the_cause_is_the_line_that_says_most(lines: list[str], cause: str | None) -> None:
    assert find_cause(lines) == cause


def test_any_line_is_no_cause_of_a_process_that_still_runs() -> None:
    assert find_cause(["loading a model"], ended=False) is None
    assert find_cause(["ValueError: no", "loading a model"], ended=False) == "ValueError: no"
