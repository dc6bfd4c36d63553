"""How running deployments are doing, as seen from another process: what `gym env status` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson

from nemo_gym.deployment.diagnosis import Finding, FindingKind, Severity, diagnose
from nemo_gym.deployment.rates import Looks, WorkerRates, worker_rates
from nemo_gym.deployment.records import RunRecord, running_deployments
from nemo_gym.server.figures import HIDDEN, ServerFigures

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_RATES_OVER_S: Final = 10.0
_DIAGNOSIS_OVER_S: Final = 60.0

_Instance = Mapping[str, Any]


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
        figures: What its workers tell; None where it does not show them.
        findings: What is wrong with it, the worst first.
        rates: What its workers did since an earlier look, by process id; empty at the first look.
    """

    name: str
    kind: str
    implementation: str
    url: str
    num_workers: int
    health: str
    figures: ServerFigures | None = None
    findings: Sequence[Finding] = ()
    rates: Mapping[int, WorkerRates] = field(default_factory=dict)


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
        """Whether the head server and every server answer, and no server has an error among its findings."""
        return self.health == "ok" and all(
            server.health == "ok" and all(finding.severity is not Severity.ERROR for finding in server.findings)
            for server in self.servers
        )


class StatusWatch:
    """Looks at the running deployments of this user, and remembers enough to tell what happened between looks."""

    def __init__(self) -> None:
        self._looks: dict[str, Looks] = {}

    async def look(self) -> list[DeploymentStatus]:
        """Ask every running deployment, and each of its servers."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            found = await asyncio.gather(*(self._deployment(session, one) for one in running_deployments()))
        urls = {server.url for one in found for server in one.servers}
        # Of servers that are gone nothing is kept; those of a head server that is silent for once are asked again.
        if all(one.health == "ok" for one in found):
            self._looks = {url: looks for url, looks in self._looks.items() if url in urls}
        return list(found)

    async def _deployment(self, session: aiohttp.ClientSession, record: RunRecord) -> DeploymentStatus:
        try:
            async with session.get(f"{record.head_url}/server_instances") as response:
                response.raise_for_status()
                instances: list[_Instance] = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return DeploymentStatus(record, _problem(error))
        return DeploymentStatus(record, "ok", await asyncio.gather(*(self._server(session, one) for one in instances)))

    async def _server(self, session: aiohttp.ClientSession, instance: _Instance) -> ServerStatus:
        # At once, for each may wait for the whole limit.
        health, (figures, problem) = await asyncio.gather(
            _health(session, instance["url"]), _figures(session, instance)
        )
        findings = [] if problem is None or health != "ok" else [problem]
        rates: Mapping[int, WorkerRates] = {}
        if health != "ok":
            text = f"the server at {instance['url']} does not do its work: {health}; see its log"
            findings.append(Finding(Severity.ERROR, FindingKind.SERVER_DOWN, instance["name"], None, text))
        if figures is not None:
            looks = self._looks.setdefault(instance["url"], Looks(kept_s=_DIAGNOSIS_OVER_S))
            earlier = looks.before(figures, _RATES_OVER_S)
            rates = {} if earlier is None else worker_rates(figures, earlier)
            findings += diagnose(figures, looks.before(figures, _DIAGNOSIS_OVER_S), looks.before(figures, 0.0))
            looks.add(figures)
        known = {name: instance[name] for name in ("name", "kind", "implementation", "url", "num_workers")}
        return ServerStatus(**known, health=health, figures=figures, findings=findings, rates=rates)


async def _health(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/health") as response:
            return "ok" if response.status == 200 else f"/health answered {response.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return _problem(error)


async def _figures(session: aiohttp.ClientSession, instance: _Instance) -> tuple[ServerFigures | None, Finding | None]:
    """Return a server's figures, or what to say of their absence; nothing where it is of a version without any."""
    try:
        async with session.get(f"{instance['url']}/workers") as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"its figures can't be had: {_problem(error)}"
        return None, Finding(Severity.WARNING, FindingKind.FIGURES_MISSING, instance["name"], None, text)
    if status == 200:
        return _read(body, instance["name"]), None
    if status == 404:
        # Versions without figures answer it too, in other words.
        is_hidden = HIDDEN.encode() in body
        finding = Finding(Severity.NOTE, FindingKind.FIGURES_HIDDEN, instance["name"], None, HIDDEN)
        return None, finding if is_hidden else None
    text = f"its figures can't be had: /workers answered {status}"
    return None, Finding(Severity.WARNING, FindingKind.FIGURES_MISSING, instance["name"], None, text)


def _read(body: bytes, server: str) -> ServerFigures | None:
    """Return the figures that a reply holds; None where the route is something else, such as an environment's own."""
    try:
        figures = ServerFigures.from_json(orjson.loads(body))
    except (ValueError, TypeError, AttributeError):
        return None
    return figures if figures.server == server and figures.workers else None


def _problem(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {_TIMEOUT.total:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "not listening"
    return f"{type(error).__name__}: {error}"
