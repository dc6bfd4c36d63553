"""Commands whose module is imported when they are called, so that `gym --help` and `gym version` start fast.

The modules of the commands import FastAPI, aiohttp and the wire types at their top, as modules do; that costs most of
a second. A `LazyCommand` stands in for such a module's Typer application: it knows the name and the line of help
that a listing needs, and hands over when it is asked to parse arguments. Nothing else in the package imports on demand.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(TyperCommand):
    """Stands in the list of commands for the Typer application `app` of a module that is not imported yet.

    Args:
        name: The command's name.
        module: The module's dotted name; it has a `typer.Typer` named `app`.
        summary: The line that `gym --help` shows.
    """

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the module and let its command parse the arguments; what runs next is the real command."""
        application: typer.Typer = importlib.import_module(self._module).app
        command = typer.main.get_command(application)
        command.name = self.name
        return command.make_context(info_name, args, parent=parent, **extra)


LAZY_COMMANDS = (
    LazyCommand("env", "nemo_gym.cli.env", "Start, check, test and create environments."),
    LazyCommand("eval", "nemo_gym.cli.eval", "Collect rollouts and sum them up."),
    LazyCommand("list", "nemo_gym.cli.listing", "List the components that are installed."),
    LazyCommand("config", "nemo_gym.cli.config", "Show the resolved configuration."),
)


class LazyGroup(TyperGroup):
    """The group at the root, with the lazy commands before those that are registered the usual way."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        eager = dict(self.commands)
        self.commands.clear()
        for command in LAZY_COMMANDS:
            self.add_command(command)
        self.commands.update(eager)
