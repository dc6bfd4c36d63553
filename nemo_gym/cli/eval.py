"""`gym eval`: collect rollouts, and sum up those that were collected."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from omegaconf import DictConfig, OmegaConf

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
from nemo_gym.cli.output import note, result_console, shown_path, work_console, write_json, write_line
from nemo_gym.cli.rendering import RolloutDisplay, ServerDisplay, duration
from nemo_gym.cli.reports import show_profile
from nemo_gym.cli.run_plan import RunPlan, output_path
from nemo_gym.cli.running import running_config
from nemo_gym.cli.selection import Components, select
from nemo_gym.config_types import AggregateMetrics
from nemo_gym.deployment import Deployment, StopSignals
from nemo_gym.errors import Interrupted, ServerStoppedError, UsageError
from nemo_gym.global_config import DRY_RUN_KEY_NAME, GlobalConfig
from nemo_gym.reward_profile import PASS_THRESHOLD, profile_as_json, profile_rollouts, write_metrics
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollector, RolloutsStoppedError
from nemo_gym.rollouts.aggregation import fetch_agent_metrics
from nemo_gym.rollouts.ledger import CollectionSummary
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
    outcome = asyncio.run(_collect(job, target))
    _report(job, outcome, as_json=as_json)
    if not outcome.summary.complete:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Target:
    """The servers that a run asks.

    Args:
        config_dict: Their configuration.
        agent: The agent that was named, where one was.
        to_serve: The configuration to start first; None when they run already.
    """

    config_dict: DictConfig
    agent: str | None
    to_serve: GlobalConfig | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a run came to: how far it got, the agents' own metrics, and the logs of the servers it started."""

    summary: CollectionSummary
    agents: Mapping[str, AggregateMetrics]
    logs: Path | None


def _own_target(components: Components) -> _Target:
    selection = select(components)
    config = selection.load()
    if config.config_dict.get(DRY_RUN_KEY_NAME):
        raise UsageError(f"with {DRY_RUN_KEY_NAME} servers are built and not run: `gym env start` does that")
    return _Target(config.config_dict, selection.agent, to_serve=config)


def _running_target(components: Components, head_server: str | None) -> _Target:
    if components != Components(agent=components.agent):
        raise UsageError("--no-serve uses running servers: it takes no components, files or overrides to start")
    return _Target(running_config(head_server), components.agent)


async def _collect(job: RolloutCollectionConfig, target: _Target) -> _Outcome:
    console = work_console()
    display = RolloutDisplay(console)
    client = ServerClient.from_config(target.config_dict)
    collector = RolloutCollector(job, client, on_event=display)
    logs: Path | None = None
    try:
        async with StopSignals(), collector, AsyncExitStack() as stack:
            note(f"Results: {shown_path(job.output_path)}")
            if target.to_serve is not None:
                servers = ServerDisplay(console, len(target.to_serve.instances))
                deployment = await stack.enter_async_context(Deployment(target.to_serve, on_event=servers))
                logs = deployment.log_dir
            stack.push_async_callback(close_client)
            with display:
                summary = await collector.collect()
            return _Outcome(summary, await fetch_agent_metrics(client, job.output_path), logs)
    except (Interrupted, ServerStoppedError, RolloutsStoppedError):
        _show_how_to_go_on(job, collector.statistics())
        raise


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _show_how_to_go_on(job: RolloutCollectionConfig, summary: CollectionSummary) -> None:
    done = summary.already_done + summary.finished
    if summary.total:
        note(
            f"{done} of {summary.total} rollouts are finished and kept. "
            f"To go on: the same call with --resume --output {shown_path(job.output_path)}"
        )


def _report(job: RolloutCollectionConfig, outcome: _Outcome, *, as_json: bool) -> None:
    """Write the metrics file, and show what the run came to and where everything is."""
    profile = profile_rollouts(job.output_path)
    write_metrics(job.files.metrics, profile, outcome.agents)
    paths = {"rollouts": job.output_path, "metrics": job.files.metrics, "failures": job.files.failures}
    paths = {name: path for name, path in paths.items() if path.exists()}
    if as_json:
        summary = asdict(outcome.summary)
        files = {name: str(path.resolve()) for name, path in paths.items()}
        write_json({**summary, "files": files, "metrics": profile_as_json(profile, outcome.agents)})
        return
    console = result_console()
    console.print()
    show_profile(console, profile, outcome.agents, with_tasks=False)
    console.print()
    for name, path in paths.items():
        write_line(f"{name}: {shown_path(path)}")
    ended = outcome.summary.finished + outcome.summary.failed
    again = f", {outcome.summary.run_again} run again" if outcome.summary.run_again else ""
    note(f"{ended} rollout{'' if ended == 1 else 's'} in {duration(outcome.summary.duration_s)}{again}")
    if outcome.summary.failed:
        note(f"{outcome.summary.failed} of them failed; make them again with --resume.", style="red")
        if outcome.logs is not None:
            note(f"logs of the servers: {outcome.logs}")


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
