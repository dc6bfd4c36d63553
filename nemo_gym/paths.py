"""Where components are found, and where run-time files live.

A component (a resources server, an agent, a model server) is a folder `<kind>/<name>/`. It is looked for in the
working directory first, then in the extra roots of `NEMO_GYM_EXTRA_ROOTS`, then beside the installed package, so
that a user's own environment needs no registration and can replace one of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PARENT_DIR: Final = Path(__file__).resolve().parent.parent
"""The installation: the folder that holds the package `nemo_gym` and the component folders it ships."""

EXTRA_ROOTS_ENV: Final = "NEMO_GYM_EXTRA_ROOTS"
STATE_DIR_ENV: Final = "NEMO_GYM_STATE_DIR"

COMPONENT_KINDS: Final = ("resources_servers", "responses_api_agents", "responses_api_models")


def component_roots(working_dir: Path | None = None) -> list[Path]:
    """Return the folders that may hold component folders, the one that wins first, each once.

    Args:
        working_dir: The user's folder; the process's working directory when None.
    """
    extra = [Path(part).expanduser() for part in os.environ.get(EXTRA_ROOTS_ENV, "").split(os.pathsep) if part]
    candidates = [working_dir or Path.cwd(), *extra, PARENT_DIR]
    return list(dict.fromkeys(path.resolve() for path in candidates))


def find_component(kind: str, name: str, working_dir: Path | None = None) -> Path | None:
    """Return the folder of the component `name` of `kind` (one of `COMPONENT_KINDS`), or None."""
    for root in component_roots(working_dir):
        folder = root / kind / name
        if folder.is_dir():
            return folder
    return None


def iter_components(kind: str, working_dir: Path | None = None) -> Iterator[Path]:
    """Yield the component folders of `kind`, by name; a name found under several roots comes once."""
    found: dict[str, Path] = {}
    for root in component_roots(working_dir):
        base = root / kind
        if not base.is_dir():
            continue
        for folder in base.iterdir():
            if folder.is_dir() and (folder / "app.py").is_file():
                found.setdefault(folder.name, folder)
    for name in sorted(found):
        yield found[name]


def find_file(path: str | Path, working_dir: Path | None = None) -> Path | None:
    """Return the existing file that a relative path of a configuration means: the first root that has it."""
    path = Path(path).expanduser()
    if path.is_absolute():
        return path if path.is_file() else None
    for root in component_roots(working_dir):
        if (root / path).is_file():
            return root / path
    return None


def state_dir() -> Path:
    """Return the folder for files that outlive a run (secret, records of running deployments), made private.

    `NEMO_GYM_STATE_DIR`, else `nemo_gym` under `XDG_STATE_HOME`, else `~/.local/state/nemo_gym`
    (XDG Base Directory Specification).
    """
    chosen = os.environ.get(STATE_DIR_ENV)
    if chosen:
        path = Path(chosen).expanduser()
    else:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nemo_gym"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
