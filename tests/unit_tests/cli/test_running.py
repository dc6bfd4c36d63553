from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nemo_gym.cli.main import run
from nemo_gym.cli.running import running_config
from nemo_gym.deployment import RunRecord
from nemo_gym.deployment.records import RunFiles
from nemo_gym.errors import ServerNotFoundError, UsageError
from nemo_gym.global_config import find_open_port

Publish = Callable[[str, str], None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Records of deployments that seem to run, with head servers that do not answer."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def write(head_url: str, working_dir: str) -> None:
            files = RunFiles()
            stack.callback(files.close)
            files.publish(RunRecord(1234, head_url, working_dir, "2026-01-02T03:04:05+00:00", "/logs"))

        yield write


def test_several_deployments_are_listed_to_choose_from(publish: Publish) -> None:
    publish("http://127.0.0.1:1", "/a")
    publish("http://127.0.0.1:2", "/b")
    with pytest.raises(UsageError) as caught:
        running_config(None)
    assert "--head-server http://127.0.0.1:1 (in /a)" in str(caught.value)
    assert "--head-server http://127.0.0.1:2 (in /b)" in str(caught.value)


def test_the_only_one_of_this_folder_is_taken(publish: Publish) -> None:
    here = f"http://127.0.0.1:{find_open_port()}"
    publish(here, str(Path.cwd()))
    publish("http://127.0.0.1:2", "/elsewhere")
    with pytest.raises(ServerNotFoundError, match=f"no head server answers at {here}"):
        running_config(None)


def test_status_tells_that_a_head_server_does_not_answer(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{find_open_port()}"
    publish(url, "/a")
    assert run(["env", "status"]) == 1
    text = capsys.readouterr().out
    assert f"head server {url}: not listening" in text
    assert "workers" not in text, "there is no server to show"
    assert run(["env", "status", "--json"]) == 1
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["healthy"], status["health"]) == (False, "not listening")


def test_an_address_that_something_else_answers_is_no_head_server() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *args: object) -> None:  # type: ignore[override]
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ServerNotFoundError, match=f"no head server answers at {url}"):
            running_config(url)
        thread.join()
