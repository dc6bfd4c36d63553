"""Removing a folder that a hostile program filled."""

from __future__ import annotations

import contextlib
import os
import stat


def remove_tree(path: str) -> None:
    """Remove a folder whatever is in it: any depth (it is flattened first), any permissions. Follows no link."""
    with contextlib.suppress(FileNotFoundError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(top, 0o700)
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(path)  # noqa: PTH106


def _empty(top: int) -> None:
    counter = 0
    while folders := [name for name in os.listdir(top) if not _unlinked(name, top)]:
        for name in folders:
            os.chmod(name, 0o700, dir_fd=top)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in os.listdir(folder):  # noqa: PTH208
                    if not _unlinked(inner, folder):
                        os.chmod(inner, 0o700, dir_fd=folder)
                        counter += 1
                        os.rename(inner, f".{os.getpid()}.{counter}", src_dir_fd=folder, dst_dir_fd=top)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _unlinked(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:  # a folder: EISDIR, EPERM on some systems
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return False
        raise
    return True
