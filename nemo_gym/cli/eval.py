"""`gym eval`: collect rollouts, and sum up those that were collected."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import DictConfig, OmegaConf

from nemo_gym.cli.call_again import call_again
from nemo_gym.cli.observing import observed
from nemo_gym.cli.options import (
    Agent,
    AsJson,
    Concurrency,
    Configs,
    HeadServer,
    InputFile,
    Limit,
    ModelType,
    NoServe,
    NumRepeats,
    OutputFile,
    Overrides,
    Overwrite,
    PassThreshold,
    ResourcesServers,
    Resume,
    RolloutTimeout,
)
from nemo_gym.cli.output import note, result_console, shown_path, work_console, write_json
from nemo_gym.cli.rendering import ServerDisplay
from nemo_gym.cli.report import EPILOG as REPORT_EPILOG, report
from nemo_gym.cli.reports import show_profile
from nemo_gym.cli.rollout_display import RolloutDisplay
from nemo_gym.cli.run_plan import RunPlan, output_path
from nemo_gym.cli.run_summary import RunSummary
from nemo_gym.cli.running import running_config
from nemo_gym.cli.selection import Components, select
from nemo_gym.config_types import AggregateMetrics, server_url
from nemo_gym.dashboard import running_dashboard
from nemo_gym.deployment import Deployment, StopSignals, running_deployments
from nemo_gym.errors import Interrupted, NemoGymError, UsageError
from nemo_gym.global_config import DRY_RUN_KEY_NAME, GlobalConfig, secrets_in
from nemo_gym.logs.redaction import Redactor
from nemo_gym.reward_profile import PASS_THRESHOLD, profile_as_json, profile_rollouts, write_metrics
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollector
from nemo_gym.rollouts.aggregation import fetch_agent_metrics
from nemo_gym.rollouts.ledger import CollectionSummary
from nemo_gym.rollouts.tally import RunTally
from nemo_gym.server.tracing import Tracing
from nemo_gym.server_utils import ServerClient, close_client

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Collect rollouts and sum them up.")

RUN_EPILOG = """\
Examples:

gym eval run --resources-server example_session_state_mgmt

gym eval run -r my_environment -m openai_model --input tasks.jsonl --num-repeats 8 policy_model_name=my-model

gym eval run -r my_environment --resume

gym eval run --no-serve --agent my_environment_simple_agent --limit 100

Results go to results/ENVIRONMENT/TIME/rollouts.jsonl unless --output says otherwise. The exit code is 1 when a
rollout failed; failures never count as reward 0, and --resume makes them again.
"""
PROFILE_EPILOG = """\
Examples:

gym eval profile results/example_session_state_mgmt/20260102T030405Z/rollouts.jsonl

gym eval profile rollouts.jsonl --json
"""


@app.command(epilog=RUN_EPILOG)
def run(
    context: typer.Context,
    overrides: Overrides = None,
    resources_server: ResourcesServers = None,
    agent: Agent = None,
    model_type: ModelType = None,
    config: Configs = None,
    input_file: InputFile = None,
    output: OutputFile = None,
    limit: Limit = None,
    num_repeats: NumRepeats = None,
    concurrency: Concurrency = 64,
    rollout_timeout: RolloutTimeout = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    no_serve: NoServe = False,
    head_server: HeadServer = None,
    as_json: AsJson = False,
) -> None:
    """Run every row of a dataset through an agent, and write and sum up the scored rollouts."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    components = Components(resources_server or (), agent, model_type, config or (), overrides or ())
    if no_serve:
        target = _running_target(components, head_server)
    elif head_server:
        raise UsageError("--head-server goes with --no-serve")
    else:
        target = _own_target(components)
    plan = RunPlan(_plain(target.config_dict), target.agent)
    job = RolloutCollectionConfig(
        input_path=plan.input_path(input_file),
        output_path=output_path(plan.environment, output, resume=resume, overwrite=overwrite),
        agent=target.agent,
        limit=limit,
        num_repeats=num_repeats or (1 if input_file else plan.dataset_repeats()),
        concurrency=concurrency,
        resume=resume,
        overwrite=overwrite,
        rollout_timeout_s=rollout_timeout,
        run_settings=plan.run_settings(),
    )
    work = _Work(job, target)
    changes = {"resume": True, "overwrite": False, "output": shown_path(job.output_path)}
    again = call_again(context, changes, Redactor(secrets_in(target.config_dict)))
    try:
        with observed(target.config_dict) as tracing:
            agents = asyncio.run(work.collect(tracing))
    except (Interrupted, NemoGymError):
        if work.counts.total:
            work.summary(again).show_unfinished(work_console())
        raise
    _report(work.summary(again), agents, as_json=as_json)
    if not work.counts.complete:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Target:
    """The servers that a run asks.

    Args:
        config_dict: Their configuration.
        agent: The agent that was named, where one was.
        to_serve: The configuration to start first; None when they run already.
        logs: The folder of their logs, where they run already and it is known.
    """

    config_dict: DictConfig
    agent: str | None
    to_serve: GlobalConfig | None = None
    logs: Path | None = None


def _own_target(components: Components) -> _Target:
    selection = select(components)
    config = selection.load()
    if config.config_dict.get(DRY_RUN_KEY_NAME):
        raise UsageError(f"with {DRY_RUN_KEY_NAME} servers are built and not run: `gym env start` does that")
    return _Target(config.config_dict, selection.agent, to_serve=config)


def _running_target(components: Components, head_server: str | None) -> _Target:
    if components != Components(agent=components.agent):
        raise UsageError("--no-serve uses running servers: it takes no components, files or overrides to start")
    config = running_config(head_server)
    head = ServerClient.from_config(config).head_server_config
    return _Target(config, components.agent, logs=_logs_of(server_url(head.host, head.port)))


def _logs_of(head_url: str) -> Path | None:
    with suppress(NemoGymError):  # a state directory that can't be used: the run needs none
        return next((Path(one.log_dir) for one in running_deployments() if one.head_url == head_url), None)
    return None


class _Work:
    """One run: the servers it needs, its collector, and what it has come to, also where it ended early."""

    def __init__(self, job: RolloutCollectionConfig, target: _Target) -> None:
        self.counts = CollectionSummary()
        self._job = job
        self._target = target
        self._logs = target.logs
        self._tally = RunTally()

    async def collect(self, tracing: Tracing | None) -> dict[str, AggregateMetrics]:
        """Make the rollouts, and return the agents' own metrics of them."""
        job, to_serve = self._job, self._target.to_serve
        console = work_console()
        display = RolloutDisplay(console, self._tally)
        client = ServerClient.from_config(self._target.config_dict, tracing=tracing)
        collector = RolloutCollector(job, client, on_event=display, tally=self._tally)
        async with StopSignals(), collector, AsyncExitStack() as stack:
            note(f"Results: {shown_path(job.output_path)}")
            if to_serve is not None:
                servers = ServerDisplay(console, len(to_serve.instances))
                started = Deployment(to_serve, on_event=servers, dashboard=running_dashboard)
                self._logs = (await stack.enter_async_context(started)).log_dir
                note(f"Dashboard: {started.head_url}")
            stack.push_async_callback(close_client)
            try:
                with display:
                    await collector.collect()
            finally:
                self.counts = collector.statistics()
            return await fetch_agent_metrics(client, job.output_path)

    def summary(self, call_again: str) -> RunSummary:
        """Return what it has come to; `call_again` is the command that makes what is left."""
        return RunSummary(self._job.files, self.counts, self._tally, call_again, self._logs)


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _report(summary: RunSummary, agents: Mapping[str, AggregateMetrics], *, as_json: bool) -> None:
    """Write the metrics file, and show what the run came to and where everything is."""
    try:
        profile = profile_rollouts(summary.files.output)
        write_metrics(summary.files.metrics, profile, agents)
    except NemoGymError:
        summary.show_unfinished(work_console())
        raise
    if as_json:
        write_json(summary.to_json(profile, agents))
    else:
        summary.show(result_console(), profile, agents)


@app.command(epilog=PROFILE_EPILOG)
def profile(
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="A rollouts file.", show_default=False)],
    pass_threshold: PassThreshold = PASS_THRESHOLD,
    tasks: Annotated[bool, typer.Option("--tasks", help="Show each task, those that fare worst first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sum up a rollouts file: rewards, pass@k, tokens, durations, failures."""
    found = profile_rollouts(rollouts, pass_threshold=pass_threshold)
    if as_json:
        write_json(profile_as_json(found))
    else:
        show_profile(result_console(), found, {}, with_tasks=tasks)


app.command(epilog=REPORT_EPILOG)(report)
