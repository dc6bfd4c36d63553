"""Which worker accepted a connection, as the system tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_PROC: Final = Path("/proc")
_TABLE: Final = _PROC / "net" / "tcp"
_ESTABLISHED: Final = "01"


def holders(server_port: int, pids: Sequence[int]) -> dict[int, int]:
    """Return which of the processes holds the server's end of each connection, by the port at the client's end.

    On Linux the kernel's table (proc_pid_net(5)) is read once for all: it is long after many short connections.
    """
    if not _TABLE.exists():
        return {port: pid for pid in pids for port in _client_ports(server_port, pid)}
    by_inode = _client_ports_by_inode(server_port)
    return {by_inode[inode]: pid for pid in pids for inode in _socket_inodes(pid) if inode in by_inode}


def _client_ports_by_inode(server_port: int) -> dict[str, int]:
    end = f":{server_port:04X} "
    found = {}
    for line in _TABLE.read_text().splitlines():
        if end not in line:
            continue
        _, local, remote, state, *others = line.split()
        if state == _ESTABLISHED and f"{local} ".endswith(end):
            found[others[5]] = int(remote.rpartition(":")[2], 16)
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):  # the process may have ended
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it may have been closed
                yield str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")


def _client_ports(server_port: int, pid: int) -> Iterator[int]:
    with suppress(psutil.Error):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.raddr and connection.laddr.port == server_port:
                yield connection.raddr.port
