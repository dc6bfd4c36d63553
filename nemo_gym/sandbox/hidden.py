"""What programs in bubblewrap must not see though it lies in a folder that they see.

Components hold answers (reference solutions, tests, datasets), and the folders where they are found hold more that is
nobody's business: keys, results. An installed package has them among Python's own, a checkout may be below /usr.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nemo_gym.paths import COMPONENT_KINDS, component_roots

NEEDED: Final = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/share"),
    *("/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/nix/store"),
)
"""Folders of the system that a sandbox can't do without."""


def hidden_folders(root_dir: Path) -> list[Path]:
    """Return the existing folders to hide, links resolved: roots of components, unless programs need what is in them.

    Args:
        root_dir: The folder of all sandboxes.
    """
    found: dict[Path, None] = {}
    for root in [*component_roots(), root_dir.resolve()]:
        if not _is_needed(root):
            found[root] = None
        found |= dict.fromkeys((root / name).resolve() for name in (*COMPONENT_KINDS, "nemo_gym"))
    return [folder for folder in found if folder.is_dir()]


def _is_needed(root: Path) -> bool:
    """Whether programs need what is in a folder; not where that is in an environment of Python's, mounted by itself."""
    environments = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix)]
    inner = [folder for folder in environments if folder != root and folder.is_relative_to(root)]
    needed = [Path(path).resolve() for path in (*NEEDED, *sysconfig.get_paths().values())]
    needed += [folder.resolve() for folder in _interpreters()]
    return any(path.is_relative_to(root) and not any(map(path.is_relative_to, inner)) for path in needed)


def _interpreters() -> list[Path]:
    """Return the folders of the interpreter and of a virtual environment's link to it."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    return [Path(sys.executable).parent, Path(base).parent]


def seen_at(hidden: Sequence[Path], mounted: Sequence[str]) -> set[str]:
    """Return where the hidden folders would be seen, the mounted paths being mounted where they are."""
    places = set()
    for mount in mounted:
        source = Path(mount).resolve()
        for folder in hidden:
            if folder.is_relative_to(source):
                places.add(os.path.normpath(Path(mount, folder.relative_to(source))))
    return places
