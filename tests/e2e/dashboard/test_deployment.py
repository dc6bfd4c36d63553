"""A real deployment, one of whose workers is killed: the dashboard, the status and the metrics tell the same."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp

from nemo_gym.dashboard import running_dashboard
from nemo_gym.deployment import Deployment
from nemo_gym.deployment.diagnosis import FindingKind
from nemo_gym.deployment.status import StatusWatch
from nemo_gym.global_config import load_global_config
from tests.e2e.dashboard.conftest import PERMISSION, Visit

CONFIG = """
counter:
  resources_servers:
    example_session_state_mgmt:
      entrypoint: app.py
      num_workers: 3
"""
SESSIONS = 12


async def begin_sessions(url: str) -> None:
    for _ in range(SESSIONS):
        # Each with cookies of its own.
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/seed_session", json={"initial_count": 0}) as reply:
                assert reply.status == 200, await reply.text()


async def worker_with_sessions(head: str) -> tuple[int, int, int]:
    """Wait until all sessions are seen; return slot, process and sessions of one worker."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            async with session.get(f"{head}/dashboard/data") as reply:
                (server,) = (await reply.json())["servers"]
            workers = [one for one in server["workers"] if one["sessions_open"]]
            if sum(one["sessions_open"] for one in workers) == SESSIONS:
                return workers[-1]["slot"], workers[-1]["pid"], workers[-1]["sessions_open"]
            await asyncio.sleep(0.1)


async def test_a_killed_worker_is_seen_on_the_dashboard_in_the_status_and_in_the_metrics(
    visiting: Callable[..., AbstractAsyncContextManager[Visit]], tmp_path: Path
) -> None:
    assert os.environ.get(PERMISSION) == "1"
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    config = load_global_config([tmp_path / "config.yaml"], working_dir=tmp_path)
    async with Deployment(config, working_dir=tmp_path, dashboard=running_dashboard) as deployment:
        await begin_sessions(config.instances["counter"].url)
        async with visiting(deployment.head_url) as visit:
            await visit.shows(".server .bar .pill", "3 of 3 ok")
            await visit.shows(".server .figures div:first-child dd", str(SESSIONS))
            slot, pid, sessions = await worker_with_sessions(deployment.head_url)
            os.kill(pid, signal.SIGKILL)
            row = f".server tbody tr:nth-child({slot + 1})"
            await visit.shows(f"{row} .restarts", re.compile(r"^1.*SIGKILL"))
            await visit.shows(f"{row} td:nth-child(5)", str(sessions))
            await visit.shows(".server .bar .pill", "3 of 3 ok")
            await visit.shows("#verdict-title", "1 problem")
            await visit.sees(f"worker {slot} was replaced", "#events")
            await visit.sees(f"{sessions} sessions lost with it", "#events")
        (status,) = await StatusWatch().look()
        findings = status.servers[0].findings
        assert [finding.worker for finding in findings if finding.kind is FindingKind.REPLACED] == [slot]
        async with aiohttp.ClientSession() as session, session.get(f"{status.servers[0].url}/metrics") as reply:
            restarts = re.findall(
                r'^nemo_gym_worker_restarts_total\{.*worker="(\d+)".*\} 1\.0$', await reply.text(), re.M
            )
        assert restarts == [str(slot)]
