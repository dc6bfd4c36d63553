"""The folders of local sandboxes: made, locked by whoever cleans them up, and swept when nobody did.

Every sandbox has one folder below a root that is private to the user. Its guard holds a lock on it (flock), which the
kernel drops when the guard ends, however it ends. So a folder without a lock is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nemo_gym.errors import SandboxCreateError
from nemo_gym.sandbox.supervision.tree import remove_tree

logger = logging.getLogger(__name__)

MARKER: Final = "NEMO_GYM_SANDBOX"
"""The variable by which a sandbox's processes are found when their guard is gone."""
SUPERVISORS_END_S: Final = 0.5
_NAME: Final = re.compile(r"sb-[0-9a-f]{16}")


def default_root() -> Path:
    """Return the root that is used where none is configured: one per user in the folder for temporary files."""
    return Path(tempfile.gettempdir()) / f"nemo_gym-sandboxes-{os.getuid()}"


def prepare_root(root: Path) -> Path:
    """Return `root` with links resolved, made and private. Blocks.

    Raises:
        SandboxCreateError: When it can't be made, or is not this user's own.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o077:
            root.chmod(0o700)
    except OSError as error:
        raise SandboxCreateError(f"the folder for sandboxes, {root}, can't be made: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise SandboxCreateError(
            f"the folder for sandboxes, {root}, is not a folder of this user; set root_dir of the local provider"
        )
    return root.resolve()


def create_folder(root: Path) -> tuple[Path, int]:
    """Return a new folder below `root`, and a descriptor that holds its lock. Blocks.

    Raises:
        SandboxCreateError: When it can't be made.
    """
    path = root / f"sb-{secrets.token_hex(8)}"
    try:
        with _locked(root, fcntl.LOCK_SH):  # a sweep never sees it without its lock
            path.mkdir(mode=0o700)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("work", "home", "tmp"):
            (path / name).mkdir(mode=0o700)
    except OSError as error:
        raise SandboxCreateError(f"a sandbox's folder, {path}, can't be made: {error}") from error
    return path, lock


@functools.cache
def sweep_once(root: Path) -> None:
    """Remove what killed guards left below `root`, once per process. Blocks."""
    for path in sweep(root):
        logger.warning("removed a sandbox that an earlier run left: %s", path)


def sweep(root: Path) -> list[Path]:
    """Kill the processes and remove the folders of sandboxes that have lost their guard; return them. Blocks."""
    with _locked(root, fcntl.LOCK_EX):
        candidates = [path for path in sorted(root.iterdir()) if _NAME.fullmatch(path.name)]
        stale = [(path, lock) for path in candidates if (lock := _take(path)) is not None]
    for path, lock in stale:
        try:
            remove_leftovers(path)
        finally:
            os.close(lock)
    return [path for path, _ in stale]


def remove_leftovers(path: Path) -> None:
    """Kill the processes of the sandbox whose folder is `path`, which has no guard any more, and remove it. Blocks."""
    # Supervisors that have lost the guard end by themselves, after what they know of beside those with a mark.
    deadline = time.monotonic() + SUPERVISORS_END_S
    while marked(path.name) and time.monotonic() < deadline:
        time.sleep(0.01)
    deadline = time.monotonic() + 5
    while (pids := marked(path.name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    try:
        remove_tree(str(path))
    except OSError as error:
        logger.warning("what is left of the sandbox %s can't be removed: %s", path, error)


def marked(sandbox_id: str) -> list[int]:
    """Return the living processes that were started in the sandbox and kept its marker in their environment."""
    mark = f"{MARKER}={sandbox_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _take(path: Path) -> int | None:
    """Return a descriptor that holds the lock of `path`, or None where another holds it."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
