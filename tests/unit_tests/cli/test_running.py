from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_gym.cli.main import run
from nemo_gym.cli.running import running_config
from nemo_gym.deployment import RunRecord
from nemo_gym.deployment.records import RunFiles
from nemo_gym.errors import NemoGymError, UsageError
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
    with pytest.raises(NemoGymError, match=f"the head server {here} does not answer"):
        running_config(None)


def test_status_tells_that_a_head_server_does_not_answer(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{find_open_port()}"
    publish(url, "/a")
    assert run(["env", "status"]) == 1
    assert f"head server {url}: not listening" in capsys.readouterr().out
    assert run(["env", "status", "--json"]) == 1
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["healthy"], status["health"]) == (False, "not listening")
