"""A new environment from templates: small, stateful, tested, and ready for several workers.

The templates are ordinary files of the package whose names end in `.template`, filled in by `string.Template`. What
they make is meant to be changed: a tally per session, with two tools and a verifier that looks at the state.
"""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from nemo_gym.errors import UsageError

_VALID_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")

# Where each template goes, relative to the new folder.
_FILES: Final = {
    "app.py.template": "app.py",
    "config.yaml.template": "configs/$name.yaml",
    "example.jsonl.template": "data/example.jsonl",
    "README.md.template": "README.md",
    "requirements.txt.template": "requirements.txt",
    "test_app.py.template": "tests/test_app.py",
}


def create_environment(name: str, parent: Path) -> list[Path]:
    """Write a new resources server into `parent / name` and return its files.

    Args:
        name: The folder's name: a Python identifier in snake_case.
        parent: The folder of resources servers, made when it is missing.

    Raises:
        UsageError: The name can't be used, or the folder exists.
    """
    check_name(name)
    folder = parent / name
    values = {"name": name, "class_name": class_name(name)}
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        raise UsageError(f"{folder} exists already\nChoose another name, or remove it first.") from None
    except OSError as error:
        raise UsageError(f"can't create {folder}: {error.strerror}") from error
    templates = files(__package__) / "templates"
    written = []
    for source, target in _FILES.items():
        path = folder / Template(target).substitute(values)
        path.parent.mkdir(exist_ok=True)
        text = Template((templates / source).read_text(encoding="utf-8")).substitute(values)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def check_name(name: str) -> None:
    """Make sure that a folder of this name can be imported and named in a configuration.

    Raises:
        UsageError: It can't; with a name that could.
    """
    if _VALID_NAME.fullmatch(name) and not keyword.iskeyword(name):
        return
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    proposal = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    if not _VALID_NAME.fullmatch(proposal) or keyword.iskeyword(proposal):
        proposal = f"env_{proposal}".rstrip("_")
    raise UsageError(
        f"'{name}' can't be the name of an environment: it must be a Python identifier in snake_case\n"
        f"For example: {proposal}"
    )


def class_name(name: str) -> str:
    """Return the name of the server's class: `unit_converter` becomes `UnitConverterResourcesServer`."""
    return "".join(word.capitalize() for word in name.split("_")) + "ResourcesServer"
