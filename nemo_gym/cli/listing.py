"""`gym list`: the components that a call could use, and whether what they need is installed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.options import AsJson
from nemo_gym.cli.output import plain_table, result_console, write_json
from nemo_gym.cli.selection import FLAG_OF_KIND
from nemo_gym.configuration.loading import read_config_file
from nemo_gym.errors import ConfigError
from nemo_gym.paths import COMPONENT_KINDS, PARENT_DIR, iter_components

app = typer.Typer(add_completion=False)

EPILOG = """\
Examples:

gym list

gym list agents

gym list resources-servers --json
"""

_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


class Kind(StrEnum):
    """The kinds of component, as a caller writes them."""

    RESOURCES_SERVERS = "resources-servers"
    AGENTS = "agents"
    MODEL_TYPES = "model-types"


_KIND_OF_FOLDER = dict(zip(COMPONENT_KINDS, Kind, strict=True))


@dataclass(frozen=True, slots=True)
class Component:
    """One component folder, as `gym list` shows it.

    Args:
        kind: The kind of component.
        name: The folder's name, which the component flags take.
        description: The sentence in its configuration, or the first one of its README.
        configs: The names of its configurations.
        folder: Where it is.
        shipped: Whether it came with nemo_gym.
        missing: Requirements that are not installed.
    """

    kind: str
    name: str
    description: str
    configs: list[str]
    folder: str
    shipped: bool
    missing: list[str]


@app.command(epilog=EPILOG)
def list_components(
    kind: Annotated[Kind | None, typer.Argument(help="Only this kind.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List resources servers, agents and model types: those of the working directory and those that came along."""
    chosen = [folder for folder, name in _KIND_OF_FOLDER.items() if kind in (None, name)]
    components = [describe(folder, path) for folder in chosen for path in iter_components(folder)]
    if as_json:
        write_json([asdict(component) for component in components])
        return
    console = result_console()
    for position, folder in enumerate(chosen):
        if position:
            console.print()
        kind_name = _KIND_OF_FOLDER[folder]
        title = f"{kind_name.replace('-', ' ').capitalize()} ({FLAG_OF_KIND[folder]} NAME)"
        console.print(Text(title, style="bold"))
        console.print(_table([one for one in components if one.kind == kind_name]))


def describe(kind: str, folder: Path) -> Component:
    """Return what can be said of a component without running it."""
    return Component(
        kind=_KIND_OF_FOLDER[kind],
        name=folder.name,
        description=_description(kind, folder),
        configs=sorted(path.stem for path in folder.glob("configs/*.yaml")),
        folder=str(folder),
        shipped=folder.parent.parent == PARENT_DIR,
        missing=list(missing_requirements(folder)),
    )


def missing_requirements(folder: Path) -> Iterator[str]:
    """Yield the names in the folder's requirements.txt that are not installed; versions are not compared."""
    path = folder / "requirements.txt"
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _REQUIREMENT.match(line)
        if match:
            try:
                importlib.metadata.version(match[1])
            except importlib.metadata.PackageNotFoundError:
                yield match[1]


def _description(kind: str, folder: Path) -> str:
    path = folder / "configs" / f"{folder.name}.yaml"
    try:
        config: dict[str, Any] = read_config_file(path).plain()
    except ConfigError:
        config = {}
    for body in config.values():
        settings = body.get(kind, {}).get(folder.name) if isinstance(body, dict) else None
        if isinstance(settings, dict) and settings.get("description"):
            return str(settings["description"]).strip()
    return _first_sentence(folder / "README.md")


def _first_sentence(readme: Path) -> str:
    if not readme.is_file():
        return ""
    for paragraph in readme.read_text(encoding="utf-8").split("\n\n"):
        text = " ".join(paragraph.split())
        if text and not text.startswith(("#", "```", "|", "<", "!")):
            return re.split(r"(?<=\.)\s", text)[0]
    return ""


def _table(components: list[Component]) -> Table:
    rows = [(one.name, "nemo_gym" if one.shipped else "here", _described(one)) for one in components]
    return plain_table(("name", "from", "description"), rows or [("(none)", "", "")])


def _described(component: Component) -> Text:
    description = Text(component.description)
    if component.missing:
        description.append(f"\nneeds: pip install {' '.join(component.missing)}", style="yellow")
    return description
