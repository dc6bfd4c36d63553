"""The folder of a run: locked while the run lives, so that the next run can tell what a killed one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "b-"  # short, as the path of a socket has about 100 bytes
_LOCK: Final = "benchmark"


@contextmanager
def locked_folder() -> Iterator[Path]:
    """Give a new folder that is gone afterwards; what killed runs have left is removed first."""
    sweep_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        # It gets its name after it was locked, so that nobody ever sees it unlocked while this process lives.
        unnamed = folder / f".{_LOCK}"
        with unnamed.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_stale_folders() -> list[Path]:
    """Remove the folders of this user's runs that have ended without it, and return them."""
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another's, one in use, or no folder of a run: they stay.
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
            swept.append(folder)
    return swept
