"""`gym config`: what the servers would get to see."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml  # type: ignore[import-untyped]

from nemo_gym.cli.options import Agent, AsJson, Configs, ModelType, Overrides, ResourcesServers
from nemo_gym.cli.output import write_json, write_line
from nemo_gym.cli.selection import Components, select

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show the resolved configuration.")

DUMP_EPILOG = """\
Examples:

gym config dump --resources-server example_session_state_mgmt

gym config dump --config my.yaml policy_model_name=my-model --json
"""


@app.callback()
def group() -> None:
    """Show the resolved configuration."""


@app.command(epilog=DUMP_EPILOG)
def dump(
    overrides: Overrides = None,
    resources_server: ResourcesServers = None,
    agent: Agent = None,
    model_type: ModelType = None,
    config: Configs = None,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Do not mask keys and secrets.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the configuration as the servers would get it: files merged, overrides applied, ports chosen."""
    chosen = select(Components(resources_server or (), agent, model_type, config or (), overrides or ()))
    text = chosen.load().to_yaml(mask_secrets=not show_secrets)
    if as_json:
        write_json(yaml.safe_load(text))
    else:
        write_line(text.rstrip())
