"""`gym env test --num-workers`: which servers and rows a call means, and how the outcome looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

from omegaconf import OmegaConf
from rich.text import Text

from nemo_gym.cli.output import note, result_console, work_console, write_json
from nemo_gym.cli.rendering import ServerDisplay
from nemo_gym.cli.run_plan import RunPlan
from nemo_gym.cli.selection import Components, select
from nemo_gym.conformance import ConformanceJob, ConformanceReport, Finding, FindingKind, check_conformance
from nemo_gym.deployment import Deployment, StopSignals
from nemo_gym.errors import UsageError
from nemo_gym.global_config import GlobalConfig

SHOWN_FINDINGS: Final = 5

_LABELS: Final = {FindingKind.NOT_DETERMINISTIC: ("answered once", "and again")}


def plan_check(components: Components, num_workers: int, input_file: Path | None, limit: int) -> ConformanceJob:
    """Return the check that a call asks for.

    Raises:
        UsageError: It is not clear which server, agent or rows are meant.
    """
    selection = select(components)
    config = selection.load()
    values = OmegaConf.to_container(config.config_dict, resolve=True)
    assert isinstance(values, dict)
    plan = RunPlan({str(key): value for key, value in values.items()}, selection.agent)
    input_path = plan.input_path(input_file)
    if plan.agent is None:
        raise UsageError("the configuration has several agents\nSay which one makes the rollouts: --agent NAME.")
    server = plan.environment
    if server not in (instance.name for instance in config.select("resources_servers")):
        raise UsageError(f"the agent {plan.agent} has no resources server to check")
    return ConformanceJob(config, server, plan.agent, input_path, num_workers, limit)


def run_check(job: ConformanceJob) -> ConformanceReport:
    """Run a check, showing on standard error what is done."""
    return asyncio.run(_run(job))


async def _run(job: ConformanceJob) -> ConformanceReport:
    console = work_console()

    def deploy(config: GlobalConfig) -> Deployment:
        return Deployment(config, on_event=ServerDisplay(console, len(config.instances)))

    async with StopSignals():
        return await check_conformance(job, deploy=deploy, on_progress=lambda text: note(text, style="bold"))


def show_report(report: ConformanceReport, *, as_json: bool) -> None:
    """Write the outcome: for a program, or for people."""
    if as_json:
        write_json({"passed": report.passed, **asdict(report)})
        return
    console = result_console()
    for (is_fault, _, hint), group in groupby(report.findings, key=lambda one: (one.is_fault, one.kind, one.hint)):
        findings = list(group)
        style = "bold red" if is_fault else "yellow"
        console.print(Text(findings[0].kind.replace("_", " ").capitalize(), style=style))
        for line in _lines(findings):
            console.print(Text(line), soft_wrap=True)
        console.print(Text(f"  {hint}\n", style="dim"), soft_wrap=True)
    if report.unexamined:
        console.print(Text(f"{report.unexamined} more rows differ.\n"), soft_wrap=True)
    if not report.passed:
        console.print(Text(f"Logs: {', '.join(report.log_dirs)}"), soft_wrap=True)
    console.print(Text(_verdict(report), style="green" if report.passed else "bold red"), soft_wrap=True)


def _lines(findings: list[Finding]) -> Iterable[str]:
    for finding in findings[:SHOWN_FINDINGS]:
        if finding.task_index is None:
            continue
        name = f" ({finding.row_id})" if finding.row_id else ""
        yield "  " + ", ".join(
            part for part in (f"row {finding.task_index}{name}", finding.request, finding.path) if part
        )
        first, second = _LABELS.get(finding.kind, ("one worker, a session at a time", "answered"))
        if finding.expected:
            yield f"    {first}: {finding.expected}"
        if finding.answered:
            yield f"    {second}: {finding.answered}"
    if len(findings) > SHOWN_FINDINGS:
        yield f"  ... and {len(findings) - SHOWN_FINDINGS} rows more"


def _verdict(report: ConformanceReport) -> str:
    if not report.passed:
        return f"{report.server} does not keep its sessions right, or it could not be found out."
    reached = "" if report.workers_reached is None else f" ({report.workers_reached} of them were reached)"
    return (
        f"{report.server} answers the same with {report.num_workers} workers{reached} as with one: "
        f"{report.rows} rows, {report.replayed} sessions."
    )
