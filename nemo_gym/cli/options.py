"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ResourcesServers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--resources-server",
        "-r",
        metavar="NAME[/CONFIG]",
        help="A resources server by its folder's name, with the agent its configuration defines. Repeatable.",
        show_default=False,
    ),
]
Agent: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--agent",
        "-a",
        metavar="NAME",
        help="An agent instance of the configuration, or else an implementation to add to it.",
        show_default=False,
    ),
]
ModelType: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model-type",
        "-m",
        metavar="NAME",
        help="The model server that is the policy; pattern_model when the configuration has none.",
        show_default=False,
    ),
]
Configs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="PATH", help="A configuration file. Repeatable.", show_default=False),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of the configuration, such as policy_model_name=my-model.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]

InputFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--input", "-i", metavar="FILE", help="Rows to run, JSON lines. [default: the agent's examples]"),
]
OutputFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Results. [default: in a new folder under ./results]"),
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only the first so many rows.", show_default=False)
]
NumRepeats: TypeAlias = Annotated[
    int | None,
    typer.Option("--num-repeats", "-n", min=1, help="Rollouts per row. [default: the dataset's own, or 1]"),
]
Concurrency: TypeAlias = Annotated[int, typer.Option("--concurrency", min=1, help="Rollouts under way at once.")]
RolloutTimeout: TypeAlias = Annotated[
    float | None,
    typer.Option("--rollout-timeout", min=0.001, help="Seconds that a rollout may take.", show_default=False),
]
Resume: TypeAlias = Annotated[bool, typer.Option("--resume", help="Continue --output, or else the newest run.")]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace what --output holds.")]
NoServe: TypeAlias = Annotated[bool, typer.Option("--no-serve", help="Use servers that run already.")]
HeadServer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--head-server",
        metavar="URL",
        help="With --no-serve: which deployment, by its head server.",
        show_default=False,
    ),
]
PassThreshold: TypeAlias = Annotated[
    float, typer.Option("--pass-threshold", help="The reward from which on a rollout has passed.")
]
