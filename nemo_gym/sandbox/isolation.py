"""Bubblewrap: whether it works on this machine, and the command line that puts a sandbox's server into it."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nemo_gym.sandbox.hidden import hidden_folders, seen_at

SUPERVISOR: Final = Path(__file__).with_name("process_supervisor.py")
PYTHON: Final[str] = getattr(sys, "_base_executable", sys.executable)
"""The interpreter itself, not a virtual environment's link to it."""

INSIDE_SUPERVISOR: Final = "/run/nemo_gym_sandbox"
INSIDE_HOME: Final = "/home/sandbox"
INSIDE_WORKDIR: Final = "/workspace"
INSIDE_TMP: Final = "/tmp"  # noqa: S108 - the sandbox's own
INSIDE_SHM: Final = "/dev/shm"  # noqa: S108
SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
OPTIONS: Final = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--cap-drop", "ALL", "--die-with-parent"),
)
PROBE_TIMEOUT_S: Final = 20
PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
"""Errors that say nothing about bubblewrap."""
_PROBING: Final = threading.Lock()


@dataclass(frozen=True)
class Mounts:
    """The folders of one sandbox on this machine, side by side in its own, and where the workdir is seen inside."""

    work: Path
    home: Path
    tmp: Path
    workdir: str

    @property
    def root(self) -> Path:
        """The folder of all sandboxes."""
        return self.work.parent.parent


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap that was tried and works.

    Attributes:
        program: Its path.
        options: What it takes on this machine beside the mounts.
    """

    program: str
    options: tuple[str, ...]

    def command(
        self, mounts: Mounts, inside: Sequence[str], *, network: bool, shm_bytes: int, visible: Sequence[Path] = ()
    ) -> list[str]:
        """Return the command line that runs `inside` isolated.

        Args:
            mounts: The sandbox's own folders.
            inside: A program and its arguments.
            network: Whether it shares this machine's network.
            shm_bytes: The size of /dev/shm, which is memory.
            visible: More paths of this machine that may be read.
        """
        argv = [self.program, *self.options, *([] if network else ["--unshare-net"]), *_system_mounts()]
        argv += ["--ro-bind", str(SUPERVISOR.parent), INSIDE_SUPERVISOR]
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm_bytes), "--tmpfs", INSIDE_SHM]
        argv += ["--bind", str(mounts.tmp), INSIDE_TMP, "--symlink", f"..{INSIDE_TMP}", f"/var{INSIDE_TMP}"]
        argv += ["--bind", str(mounts.home), INSIDE_HOME]
        # After /tmp, for Python's own environment may be below it.
        argv += _visible_mounts([Path(sys.base_prefix), Path(sys.prefix), *visible], hidden_folders(mounts.root))
        argv += ["--bind", str(mounts.work), mounts.workdir]
        # What bubblewrap builds is memory too: nobody writes to it.
        argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--", *inside]
        return argv


def find_bubblewrap() -> Bubblewrap | str:
    """Return the bubblewrap of this machine, tried once per process, or why there is none. Blocks.

    Raises:
        OSError: When the machine or this process has no room to try it.
    """
    with _PROBING:
        return _probe()


@functools.cache
def _probe() -> Bubblewrap | str:
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap (bwrap) is not installed"
    reason = ""
    for extra in (("--disable-userns",), ()):  # from 0.8 on: no user namespaces inside, and so less of the kernel
        candidate = Bubblewrap(program, (*OPTIONS, *extra))
        reason = _try(candidate)
        if not reason:
            return candidate
    return f"bubblewrap does not work here: {reason}"


def _try(bubblewrap: Bubblewrap) -> str:
    """Return why a sandbox can't be started with it, as text; empty when it can."""
    with tempfile.TemporaryDirectory(prefix="nemo_gym-bwrap-") as folder:
        path = Path(folder)
        argv = bubblewrap.command(
            Mounts(path, path, path, INSIDE_WORKDIR), [PYTHON, "-I", "-S", "-c", ""], network=False, shm_bytes=1 << 20
        )
        try:
            done = subprocess.run(  # noqa: S603 - a list, no shell
                argv, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            return str(error)
        if not done.returncode:
            return ""
        return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"


@functools.cache
def _system_mounts() -> tuple[str, ...]:
    """Return the mounts of what programs need of this machine to run, all read-only."""
    argv: list[str] = []
    for folder in SYSTEM_FOLDERS:
        path = Path(folder)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), folder]
        elif path.is_dir():
            argv += ["--ro-bind", folder, folder]
    argv += ["--ro-bind", "/etc", "/etc", *_masks()]
    resolver = Path("/etc/resolv.conf").resolve()
    if resolver.is_file() and not resolver.is_relative_to("/etc"):
        argv += ["--ro-bind", str(resolver), str(resolver)]
    return tuple(argv)


def _masks() -> list[str]:
    """Return the mounts that hide what in /etc is not for everybody: a worker may run as root."""
    argv: list[str] = []
    for folder, folders, files in os.walk("/etc"):
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
                argv += ["--tmpfs", str(path), "--remount-ro", str(path)]
                folders.remove(name)
            elif stat.S_ISREG(mode) and not mode & stat.S_IROTH:
                argv += ["--ro-bind", "/dev/null", str(path)]
    return argv


def _visible_mounts(visible: Sequence[Path], hidden: Sequence[Path]) -> list[str]:
    """Return the mounts of more visible paths, and of nothing over what is to be hidden in them and in the system's.

    The outer ones come first: so a visible path below a hidden folder is seen, and a hidden one below a visible is not.
    """
    shown = {str(path.absolute()) for path in visible if str(path) != "/"}
    empty = seen_at(hidden, [*SYSTEM_FOLDERS, "/etc", *shown]) - shown
    argv: list[str] = []
    for path in sorted(shown | empty, key=lambda path: path.count("/")):
        if path in empty:
            argv += ["--tmpfs", path]
        elif not Path(path).is_relative_to("/usr") or any(Path(path).is_relative_to(above) for above in empty):
            argv += ["--ro-bind", path, path]
    for path in sorted(empty):
        argv += ["--remount-ro", path]
    return argv
