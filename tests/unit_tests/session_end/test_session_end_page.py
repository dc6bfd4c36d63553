"""The server that the page on session end shows does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ending_server import VERIFY, make, running, until

PAGE = Path(__file__).parents[3] / "docs" / "session-end.md"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


async def test_the_pages_server_removes_what_its_sessions_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders() -> list[Path]:
        return list(tmp_path.glob("workbench-*"))

    blocks = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks["resources_servers/workbench/app.py"], "app.py", "exec", dont_inherit=True), names)
    settings = yaml.safe_load(blocks["resources_servers/workbench/configs/workbench.yaml"])
    settings = settings["workbench"]["resources_servers"]["workbench"]
    server = make(names["Workbench"], settings["session_end"])
    async with running(server, 2, keeps_cookies=False) as (client, other):
        named = (await client.post("/seed_session"))[1]
        await other.post("/seed_session")
        assert await client.post("/write", {**named, "text": "hello"}) == (200, {"written": 5})
        assert len(folders()) == 2
        assert (await client.post("/verify", {**named, **VERIFY}))[1]["reward"] == 1
        await until(lambda: len(folders()) == 1)
        assert await client.post("/close_session", named) == (200, {"closed": False})
        assert (await client.post("/write", {**named, "text": "hello"}))[1]["reason"] == "session_ended"
    assert folders() == []
