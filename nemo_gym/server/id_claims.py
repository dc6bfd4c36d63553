"""Ids that callers make, each claimed by one worker: no two workers begin a session of the same id.

A claim is a symbolic link in the workers' socket directory, made in one step, which fails where there is one: its name
stands for the id, its target is the worker. A claim whose worker no longer listens may be taken over. The directory
goes with the server, and the claims with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nemo_gym.session_routing import is_listening, worker_socket_path

_FOLDER: Final = "ids"
_LOCK: Final = "lock"


class IdClaims:
    """The claims as one worker makes and sees them.

    Args:
        socket_dir: The directory of the workers' sockets.
        worker_id: This worker.
    """

    def __init__(self, socket_dir: Path, worker_id: str) -> None:
        self._socket_dir = socket_dir
        self._folder = socket_dir / _FOLDER
        self._worker_id = worker_id
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def take(self, name: str) -> bool:
        """Claim `name` for this worker; False where another one has it.

        Args:
            name: A file name that stands for the id.
        """
        claim = self._folder / name
        if self._make(claim):
            return True
        with self._locked():
            if self.holder(name) is not None:
                return False
            # Its worker is dead. Whoever wants it removes it under the lock, and nobody's new one instead.
            claim.unlink(missing_ok=True)
            return self._make(claim)

    def release(self, name: str) -> None:
        """Give up a claim; one that is not this worker's stays."""
        with self._locked():
            if self._owner(name) == self._worker_id:
                (self._folder / name).unlink()

    def holder(self, name: str) -> str | None:
        """Return the worker that has claimed `name` and still runs."""
        owner = self._owner(name)
        alive = owner is not None and (
            owner == self._worker_id or is_listening(worker_socket_path(self._socket_dir, owner))
        )
        return owner if alive else None

    def _owner(self, name: str) -> str | None:
        try:
            return str((self._folder / name).readlink())
        except OSError:
            return None

    def _make(self, claim: Path) -> bool:
        try:
            claim.symlink_to(self._worker_id)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude the other workers, for as long as two or three system calls take."""
        descriptor = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
