"""`gym env status` against servers that answer what a test says."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from nemo_gym.cli.main import run
from nemo_gym.cli.status_view import StatusView
from nemo_gym.deployment import RunRecord
from nemo_gym.deployment.diagnosis import diagnose
from nemo_gym.deployment.rates import Looks, total_rates, worker_rates
from nemo_gym.deployment.records import RunFiles
from nemo_gym.deployment.status import DeploymentStatus, ServerStatus
from nemo_gym.server.figures import HIDDEN, Histogram, ServerFigures, WorkerFigures

NOW = 1_800_000_000.0
FAST = Histogram((0.01, 0.1, 1.0), (90, 8, 2, 0), 1.5)


def worker(slot: int, **values: Any) -> WorkerFigures:
    values = {"worker_id": f"{slot:032x}", "pid": 4000 + slot, "started_at": NOW - 300, **values}
    return WorkerFigures(slot=slot, **values)


def server(*workers: WorkerFigures, at: float = NOW) -> ServerFigures:
    return ServerFigures("counter", "resources_servers", at, len(workers), workers, "")


class Fake:
    """A head server and a server `counter` at one address; replies by path, as a test sets them."""

    def __init__(self) -> None:
        fake = self
        self.looks = 0
        self._later: tuple[int, ServerFigures] | None = None
        self.replies: dict[str, tuple[int, Any]] = {"/health": (200, {"status": "ok"})}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/server_instances":
                    fake.count_look()
                status, body = fake.replies.get(self.path, (404, {"detail": "Not Found"}))
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:  # type: ignore[override]
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.instance(self.url)

    def instance(self, url: str, **further: Any) -> None:
        known = {"kind": "resources_servers", "implementation": "example", "num_workers": 2}
        self.replies["/server_instances"] = (200, [{"name": "counter", **known, "url": url, **further}])

    def show(self, figures: ServerFigures, *, from_look: int = 1) -> None:
        if from_look == 1:
            self.replies["/workers"] = (200, figures.to_json())
        else:
            self._later = (from_look, figures)

    def count_look(self) -> None:
        self.looks += 1
        if self._later is not None and self.looks >= self._later[0]:
            self.show(self._later[1])


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    thread = Thread(target=fake.http.serve_forever, args=(0.02,))
    thread.start()
    files = RunFiles()
    files.publish(RunRecord(1234, fake.url, "/somewhere", "2026-01-02T03:04:05+00:00", "/logs"))
    yield fake
    files.close()
    fake.http.shutdown()
    thread.join()
    fake.http.server_close()


def status(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert run(["env", "status", *flags]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_workers_stand_under_their_server_with_their_figures(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.show(
        server(
            worker(0, sessions_open=12, requests_handled=300, request_seconds=FAST, memory_bytes=95_000_000),
            worker(1, sessions_open=14, requests_handled=280, restarts=1, state="serving", started_at=NOW - 4000),
        )
    )
    lines = [line.split() for line in status(capsys).splitlines()]
    (heading,) = [line for line in lines if line[:2] == ["counter", "ok"]]
    assert heading == ["counter", "ok", "resources_servers,", "2", "workers,", fake.url]
    titles, first, second, together = lines[lines.index(heading) + 1 :][:4]
    assert titles[:4] == ["worker", "state", "process", "sessions"]
    assert first[:4] == ["0", "ok", "4000", "12"]
    assert {"300", "95M"} <= set(first)
    assert second[:4] == ["1", "ok", "4001", "14"]
    assert together[:2] == ["all", "26"]


def test_what_is_wrong_is_said_plainly_and_does_not_fail_the_call(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    died = worker(1, restarts=1, last_exit="killed by SIGKILL", sessions_lost=4, started_at=NOW - 30)
    fake.show(server(worker(0), died))
    text = status(capsys)
    assert "warning: counter: worker 1 was replaced 30 s ago (killed by SIGKILL); 4 sessions lost" in text
    assert re.search(r"^ +1 +replaced +4001 ", text, re.MULTILINE)


def test_an_error_among_the_findings_fails_the_call(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.show(
        server(worker(0), worker(1, restarts=9, deaths=9, last_exit="ended with exit code 1", started_at=NOW - 3))
    )
    assert "error: counter: worker 1 restarts over and over" in status(capsys, code=1)
    (found,) = json.loads(status(capsys, "--json", code=1))
    assert (found["health"], found["healthy"]) == ("ok", False)
    (finding,) = found["servers"][0]["findings"]
    assert (finding["severity"], finding["kind"], finding["server"]) == ("error", "restarting", "counter")
    assert finding["worker"] == 1


def test_json_has_all_figures_as_they_came(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    figures = server(worker(0, request_seconds=FAST, replies={"2xx": 100}), worker(1))
    fake.show(figures)
    (found,) = json.loads(status(capsys, "--json"))
    assert set(found) == {"record", "health", "servers", "healthy"}
    (of_server,) = found["servers"]
    assert ServerFigures.from_json(of_server.pop("figures")) == figures
    assert of_server == {
        "name": "counter",
        "kind": "resources_servers",
        "implementation": "example",
        "url": fake.url,
        "num_workers": 2,
        "health": "ok",
        "findings": [],
        "rates": {},
    }


@pytest.mark.parametrize(
    "reply",
    [
        (404, {"detail": "Not Found"}),
        (200, {"workers": 4}),
        (200, ["a"]),
        (200, b"<html>"),
        (200, {}),
        (200, {"workers": [{"name": "Ann"}]}),
    ],
)
def test_a_server_without_figures_is_shown_by_its_health_alone(
    fake: Fake, reply: tuple[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.replies["/workers"] = reply
    fake.instance(fake.url, told_by_a_newer_version=1)
    text = status(capsys)
    assert f"counter ok  resources_servers, 2 workers, {fake.url}" in text
    assert "sessions" not in text
    assert json.loads(status(capsys, "--json"))[0]["servers"][0]["figures"] is None


def test_figures_that_could_not_be_had_are_told_of(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies["/workers"] = (500, {})
    assert "warning: counter: its figures can't be had: /workers answered 500" in status(capsys)


def test_hidden_figures_are_explained(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies["/workers"] = (404, {"detail": HIDDEN})
    assert f"note: counter: {HIDDEN}" in status(capsys)


def test_a_server_that_does_not_answer_is_an_error(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        fake.instance(url)
        text = status(capsys, code=1)
    assert f"counter not listening  resources_servers, 2 workers, {url}" in text
    assert "error: counter: " in text


def test_a_head_server_that_answers_nonsense_is_no_traceback(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies["/server_instances"] = (200, b"[")
    assert f"head server {fake.url}: JSONDecodeError" in status(capsys, code=1)


def test_an_interval_needs_watching(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "status", "--interval", "3"]) == 2
    assert "--interval goes with --watch" in capsys.readouterr().err


WATCH = ["env", "status", "--watch", "--interval", "0.1"]


class Output(StringIO):
    """Standard output that sends this process a signal once a text was written so many times."""

    def __init__(self, text: str, times: int, signum: signal.Signals, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._end = (text, times, signum)
        self._is_terminal = is_terminal
        self._was_sent = False

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        length = super().write(text)
        wanted, times, signum = self._end
        if not self._was_sent and self.getvalue().count(wanted) >= times:
            self._was_sent = True
            os.kill(os.getpid(), signum)
        return length


def test_watching_on_a_pipe_writes_frame_after_frame_until_ctrl_c(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.show(server(worker(0), worker(1)))
    monkeypatch.setattr("sys.stdout", output := Output("counter ok", 3, signal.SIGINT))
    assert run(WATCH) == 130
    assert output.getvalue().count("counter ok") == 3
    assert "\x1b" not in output.getvalue()
    assert capsys.readouterr().err == ""


def test_watching_as_json_writes_a_line_for_each_look(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.show(server(worker(0, requests_handled=100), worker(1)))
    fake.show(server(worker(0, requests_handled=150), worker(1), at=NOW + 5), from_look=2)
    monkeypatch.setattr("sys.stdout", output := Output("\n", 2, signal.SIGTERM))
    assert run([*WATCH, "--json"]) == 143
    first, second = [json.loads(line)[0]["servers"][0] for line in output.getvalue().splitlines()]
    assert first["rates"] == {}
    rates = second["rates"]["4000"]
    assert (rates["requests_per_s"], rates["seconds"]) == (10.0, 5.0)


def test_watching_on_a_terminal_redraws_and_leaves_the_last_frame(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    output = Output("Ctrl-C ends", 3, signal.SIGINT, is_terminal=True)
    monkeypatch.setattr("sys.stdout", output)
    fake.show(server(worker(0), worker(1)))
    assert run(WATCH) == 130
    before, after = output.getvalue().split("\x1b[?1049l")
    assert "\x1b[?1049h" in before, "the alternate screen, which leaves the user's own as it was"
    assert "every 0.1 s; Ctrl-C ends" in before
    assert after.count("resources_servers, 2 workers") == 1


def test_watching_waits_for_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", output := Output("No deployment is running.", 2, signal.SIGINT))
    assert run(WATCH) == 130
    assert output.getvalue().count("No deployment is running.") == 2


def shown(figures: ServerFigures, *, width: int, height: int = 100, **options: Any) -> list[str]:
    record = RunRecord(1, "http://127.0.0.1:1", "/somewhere", "2026-01-02T03:04:05+00:00", "/logs")
    rates = options.pop("rates", {})
    one = ServerStatus(
        figures.server, figures.kind, "it", "http://127.0.0.1:2", 2, "ok", figures, diagnose(figures), rates
    )
    output = StringIO()
    console = Console(file=output, width=width, height=height, force_terminal=True, color_system=None)
    console.print(StatusView([DeploymentStatus(record, "ok", [one])], **options))
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_a_narrow_window_has_fewer_columns_and_no_broken_lines(width: int) -> None:
    figures = server(worker(0, sessions_open=12345, memory_bytes=10**9), worker(1, responding=False, restarts=3))
    lines = shown(figures, width=width)
    assert all(len(line) <= width for line in lines)
    (titles,) = [line.split() for line in lines if line.startswith("  worker ")]
    assert {"state", "sessions"} <= set(titles) or width < 40
    assert ("process" in titles) == (width >= 200)
    assert any(line.split()[:1] == ["0"] for line in lines)


def test_rates_have_columns_when_there_are_rates() -> None:
    before = server(worker(0, requests_handled=100, sessions_created=10, cpu_s=10.0), worker(1), at=NOW - 10)
    figures = server(worker(0, requests_handled=400, sessions_created=15, cpu_s=15.0), worker(1))
    assert "req/s" not in " ".join(shown(figures, width=300))
    lines = shown(figures, width=300, rates=worker_rates(figures, before), heading="at noon")
    assert lines[0] == "at noon"
    (titles,) = [line.split() for line in lines if "req/s" in line]
    (row,) = [line.split() for line in lines if line.split()[:1] == ["0"]]
    assert row[titles.index("new/s")] == "0.5"
    assert "30.0" in row
    assert "50%" in row


def test_the_number_of_workers_is_the_present_one() -> None:
    assert any("resources_servers, 3 workers" in line for line in shown(server(*map(worker, range(3))), width=200))


def test_a_low_window_leaves_out_the_workers_that_are_well() -> None:
    figures = server(*(worker(slot) for slot in range(40)), worker(40, loop_lag_s=3.0))
    lines = shown(figures, width=120, height=20, fits_window=True)
    assert len(lines) <= 20
    assert any("loop blocked" in line for line in lines)
    assert any("(40 more that are ok)" in line for line in lines)
    assert len(shown(figures, width=120, height=5, fits_window=True)) == 5
    assert len(shown(figures, width=120, height=20)) > 40


def test_a_worker_that_is_replaced_has_two_lines() -> None:
    leaving = worker(0, pid=77, state="leaving", responding=False)
    lines = [line.split() for line in shown(server(leaving, worker(0, state="starting"), worker(1)), width=200)]
    rows = [line[:3] for line in lines if line[:1] in (["0"], ["1"])]
    assert rows == [["0", "leaving", "77"], ["0", "starting", "4000"], ["1", "ok", "4001"]]


def test_rates_are_of_one_process_and_of_the_time_that_it_lived() -> None:
    before = server(worker(0, requests_handled=100), worker(1, requests_handled=900), at=NOW - 10)
    newcomer = worker(1, pid=5000, requests_handled=8, started_at=NOW - 4)
    figures = server(worker(0, requests_handled=100), newcomer, worker(2, responding=False))
    rates = worker_rates(figures, before)
    assert {pid: one.requests_per_s for pid, one in rates.items()} == {4000: 0.0, 5000: 2.0}
    assert worker_rates(figures, replace(figures, workers=(worker(0, responding=False),), at=NOW - 1)).keys() == {5000}
    together = total_rates(rates.values())
    assert together is not None
    assert together.requests_per_s == 2.0
    assert total_rates([]) is None


def test_a_process_that_an_earlier_look_did_not_know_is_counted_from_its_own_start() -> None:
    unknown = worker(0, requests_handled=800, started_at=NOW - 100)
    (rates,) = worker_rates(server(unknown), server(at=NOW - 2)).values()
    assert (rates.seconds, rates.requests_per_s) == (100.0, 8.0)


def test_looks_begin_anew_when_the_clock_is_set_back() -> None:
    looks = Looks(kept_s=60)
    for at in (NOW, NOW + 2, NOW - 3600):
        looks.add(server(at=at))
    assert [look.at for look in looks] == [NOW - 3600]


def test_looks_are_kept_as_long_as_they_may_be_compared() -> None:
    looks = Looks(kept_s=60)
    assert looks.before(server(at=NOW), 10) is None
    for seconds in range(0, 200, 2):
        looks.add(server(at=NOW + seconds))
    assert len(list(looks)) == 31
    now = server(at=NOW + 200)
    assert [looks.before(now, seconds).at - now.at for seconds in (10, 60, 600)] == [-10, -60, -62]  # type: ignore[union-attr]
