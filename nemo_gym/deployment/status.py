"""How running deployments are doing, as seen from another process: what `gym env status` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from nemo_gym.deployment.records import RunRecord, running_deployments

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server of a running deployment.

    Args:
        name: The instance's name.
        kind: Which kind of server it is.
        implementation: The name of its folder.
        url: Where it answers.
        num_workers: Its worker processes.
        health: `ok`, or what is wrong.
    """

    name: str
    kind: str
    implementation: str
    url: str
    num_workers: int
    health: str


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """One running deployment.

    Args:
        record: What its parent process published.
        health: `ok` when the head server answers, or what is wrong.
        servers: Its servers; empty when the head server does not answer.
    """

    record: RunRecord
    health: str
    servers: Sequence[ServerStatus] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether the head server and every server answer."""
        return self.health == "ok" and all(server.health == "ok" for server in self.servers)


async def deployment_statuses() -> list[DeploymentStatus]:
    """Ask every running deployment of this user, and each of its servers."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        return list(await asyncio.gather(*(_deployment(session, record) for record in running_deployments())))


async def _deployment(session: aiohttp.ClientSession, record: RunRecord) -> DeploymentStatus:
    try:
        async with session.get(f"{record.head_url}/server_instances") as response:
            response.raise_for_status()
            instances = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        return DeploymentStatus(record, _problem(error))
    return DeploymentStatus(record, "ok", await asyncio.gather(*(_server(session, one) for one in instances)))


async def _server(session: aiohttp.ClientSession, instance: dict[str, Any]) -> ServerStatus:
    try:
        async with session.get(f"{instance['url']}/health") as response:
            health = "ok" if response.status == 200 else f"/health answered {response.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        health = _problem(error)
    return ServerStatus(**instance, health=health)


def _problem(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {_TIMEOUT.total:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "not listening"
    return f"{type(error).__name__}: {error}"
