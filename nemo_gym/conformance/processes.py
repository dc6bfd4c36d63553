"""Which process of a server holds a connection, as the Linux kernel tells; elsewhere nobody does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def holder_of(group: int, server_port: int, client_port: int) -> str | None:
    """Return the id of the process at the server's end of a TCP connection, or None where it can't be found.

    Args:
        group: The process group to look in.
        server_port: The port at the server's end.
        client_port: The port at the other end.
    """
    inode = _inode(server_port, client_port)
    if inode is None:
        return None
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            if os.getpgid(int(process.name)) == group and _holds(process, inode):
                return process.name
    return None


def _inode(server_port: int, client_port: int) -> str | None:
    """Return the inode of the server's socket; the table's format is told in proc_pid_net(5)."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                ends = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
                if ends == [server_port, client_port]:
                    return fields[9]
    return None


def _holds(process: Path, inode: str) -> bool:
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # it may have been closed
            if str(descriptor.readlink()) == f"socket:[{inode}]":
                return True
    return False
