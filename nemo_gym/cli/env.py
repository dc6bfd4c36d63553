"""`gym env`: start servers, look at those that run, test components, begin a new environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from nemo_gym.cli.conformance import plan_check, run_check, show_report
from nemo_gym.cli.observing import observed
from nemo_gym.cli.options import Agent, Configs, InputFile, ModelType, Overrides, ResourcesServers
from nemo_gym.cli.output import note, plain_table, result_console, work_console, write_json, write_line
from nemo_gym.cli.rendering import ServerDisplay, server_table
from nemo_gym.cli.scaffold import create_environment
from nemo_gym.cli.selection import Components, component_folder, select
from nemo_gym.cli.status import STATUS_EPILOG, status
from nemo_gym.cli.testing import TestResult, check_pytest, run_tests
from nemo_gym.conformance import ConformanceJob
from nemo_gym.dashboard import running_dashboard
from nemo_gym.deployment import Deployment, StopSignals
from nemo_gym.errors import UsageError
from nemo_gym.global_config import GlobalConfig
from nemo_gym.paths import COMPONENT_KINDS, iter_components

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Start, check, test and create environments.")

START_EPILOG = """\
Examples:

gym env start --resources-server example_session_state_mgmt

gym env start -r my_environment -m openai_model policy_model_name=my-model

gym env start --config my.yaml my_environment.resources_servers.my_environment.num_workers=8

Ctrl-C stops all servers; a second one kills them.
"""
TEST_EPILOG = """\
Examples:

gym env test --resources-server example_session_state_mgmt

gym env test --agent simple_agent --model-type pattern_model

gym env test --all

gym env test -r my_environment -- -x -k reward

gym env test -r my_environment --num-workers 4

With --num-workers no tests are run. Example rows are run on one worker by the environment's agent and replayed on so
many workers, each request on another one, sessions woven together; every reply has to be the same. --agent and
--model-type then say who makes the rollouts, and KEY=VALUE arguments change the configuration.

The exit code is 1 when tests, or the check, have failed.
"""
INIT_EPILOG = """\
Example:

gym env init --resources-server unit_converter
"""


@app.command(epilog=START_EPILOG)
def start(
    overrides: Overrides = None,
    resources_server: ResourcesServers = None,
    agent: Agent = None,
    model_type: ModelType = None,
    config: Configs = None,
    as_json: Annotated[bool, typer.Option("--json", help="When all are ready, print the servers as JSON.")] = False,
) -> None:
    """Start the servers of a configuration and keep them running until Ctrl-C."""
    chosen = select(Components(resources_server or (), agent, model_type, config or (), overrides or ()))
    configuration = chosen.load()
    with observed(configuration.config_dict):
        asyncio.run(_run_servers(configuration, as_json=as_json))


async def _run_servers(config: GlobalConfig, *, as_json: bool) -> None:
    display = ServerDisplay(work_console(), len(config.instances))
    deployment = Deployment(config, on_event=display, dashboard=running_dashboard)
    note(f"Starting {len(config.instances)} servers; their logs: {deployment.log_dir}")
    async with StopSignals(), deployment:
        if deployment.dry_run:
            note(f"Dry run: each of the {len(config.instances)} servers was built and has ended.", style="green")
            return
        if as_json:
            write_json({"head_url": deployment.head_url, "servers": _describe(config)})
        else:
            result_console().print(server_table(config.instances.values()))
            note(f"Ready. Head server and dashboard: {deployment.head_url}. Ctrl-C stops all.", style="green")
        await asyncio.Event().wait()


def _describe(config: GlobalConfig) -> list[dict[str, object]]:
    return [
        {
            "name": instance.name,
            "kind": instance.kind,
            "implementation": instance.implementation,
            "url": instance.url,
            "num_workers": instance.num_workers,
        }
        for instance in config.instances.values()
    ]


app.command(epilog=STATUS_EPILOG)(status)


@app.command("test", epilog=TEST_EPILOG)
def run_component_tests(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- PYTEST_ARGUMENTS]",
            help="Passed on to pytest; with --num-workers, KEY=VALUE overrides of the configuration.",
            show_default=False,
        ),
    ] = None,
    resources_server: Annotated[
        list[str] | None,
        typer.Option("--resources-server", "-r", metavar="NAME", help="Repeatable.", show_default=False),
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option("--agent", "-a", metavar="NAME", help="Repeatable.", show_default=False)
    ] = None,
    model_type: Annotated[
        list[str] | None, typer.Option("--model-type", "-m", metavar="NAME", help="Repeatable.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Test every component that `gym list` shows.")] = False,
    num_workers: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Instead of its tests: does the resources server keep its sessions on so many workers?",
            show_default=False,
        ),
    ] = None,
    config: Configs = None,
    input_file: InputFile = None,
    limit: Annotated[int, typer.Option(min=1, help="With --num-workers: only the first so many rows.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="With --num-workers: print JSON.")] = False,
) -> None:
    """Run the tests that components bring along, or check that a server's sessions stay whole on several workers."""
    named = dict(zip(COMPONENT_KINDS, (resources_server or [], agent or [], model_type or []), strict=True))
    if num_workers is not None:
        if every:
            raise UsageError("--num-workers checks one resources server; --all goes without it")
        components = _one_server(named, config or [], arguments or [])
        _check_sessions(plan_check(components, num_workers, input_file, limit), as_json=as_json)
        return
    if config or input_file or as_json:
        raise UsageError("--config, --input and --json go with --num-workers")
    folders = [component_folder(kind, name) for kind, names in named.items() for name in names]
    if every:
        folders = [folder for kind in COMPONENT_KINDS for folder in iter_components(kind)]
    if not folders:
        raise UsageError("say what to test: --resources-server NAME, --agent NAME, --model-type NAME or --all")
    check_pytest()
    results = []
    for folder in folders:
        note(f"Testing {folder}", style="bold")
        results.append(run_tests(folder, arguments or ()))
    _show_results(results, tolerate_no_tests=every)


def _one_server(named: Mapping[str, list[str]], configs: list[str], overrides: list[str]) -> Components:
    servers, agents, models = named.values()
    if max(len(servers), len(agents), len(models)) > 1 or not (servers or configs):
        raise UsageError("--num-workers goes with one --resources-server NAME, and at most one agent and model type")
    return Components(servers, next(iter(agents), None), next(iter(models), None), configs=configs, overrides=overrides)


def _check_sessions(job: ConformanceJob, *, as_json: bool) -> None:
    report = run_check(job)
    show_report(report, as_json=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _show_results(results: list[TestResult], *, tolerate_no_tests: bool) -> None:
    styles = {"passed": "green", "failed": "bold red", "no tests": "yellow"}
    rows = ((one.kind, one.name, Text(one.outcome, style=styles[one.outcome])) for one in results)
    result_console().print(plain_table(("kind", "component", "tests"), rows))
    accepted = {"passed", "no tests"} if tolerate_no_tests else {"passed"}
    if any(one.outcome not in accepted for one in results):
        raise typer.Exit(1)


@app.command(epilog=INIT_EPILOG)
def init(
    resources_server: Annotated[
        str, typer.Option("--resources-server", "-r", metavar="NAME", help="The new folder's name, in snake_case.")
    ],
) -> None:
    """Create a new environment in ./resources_servers: small, stateful, tested, ready for several workers."""
    files = create_environment(resources_server, Path.cwd() / "resources_servers")
    for path in files:
        write_line(str(path.relative_to(Path.cwd())))
    note(
        "\nNext:\n"
        f"  gym env test --resources-server {resources_server}\n"
        f"  gym eval run --resources-server {resources_server}"
    )
