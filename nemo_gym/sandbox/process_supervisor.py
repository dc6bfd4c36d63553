"""The process that owns a local sandbox's processes and folder, and outlives the worker just long enough to clean up.

It runs by itself, with the standard library and the folder `supervision` beside it, also inside bubblewrap:
`python -I -S process_supervisor.py guard|serve <descriptor of a Unix socket>`. Three roles, each a process:

- The **guard** (one per sandbox, outside of the isolation) fills the folder, starts the server, and waits for the
  first end: of the worker (its socket or its process), of the server, or a signal. Then it kills all descendants,
  removes the folder and exits. It is a subreaper, so no descendant gets away from it by daemonising. It holds a lock
  on the folder; a folder without one is left by a guard that was killed, and the next start removes it.
  Where nothing isolates the server, it outlives a killed guard just long enough to end what the guard would have.
- The **server** (one per sandbox, inside) forks a process for every request, for which the worker sends a socket.
- A **request's own process** runs one command, or reads or writes one file, and replies over its own socket. It too
  is a subreaper: what the command leaves in the background stays its descendant, and can be counted and killed.
  When the worker closes that socket early, the command is killed.

Failure policy: a request's process reports what it can and dies alone; a server that dies takes the sandbox with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import types
from typing import Any, Final, NoReturn

if __name__ == "__main__":  # by itself: the package's own __init__ would need what is not installed here
    for _name, _path in (("nemo_gym", ""), ("nemo_gym.sandbox", os.path.dirname(__file__))):  # noqa: PTH120
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].__path__ = [_path]

from nemo_gym.sandbox.supervision.command import TERM_GRACE_S
from nemo_gym.sandbox.supervision.frames import receive_frame, send_frame
from nemo_gym.sandbox.supervision.processes import (
    KILL_WAIT_S,
    PR_SET_CHILD_SUBREAPER,
    Wake,
    die_with_parent,
    kill_descendants,
    prctl,
    reap,
)
from nemo_gym.sandbox.supervision.server import Server
from nemo_gym.sandbox.supervision.tree import remove_tree

DEFAULT_CLEANUP_TIMEOUT: Final = 15.0
"""Seconds a caller gives the supervisor, beyond what a command may take, to reply."""


def exec_timeout(timeout_s: float, cleanup_timeout_s: float = DEFAULT_CLEANUP_TIMEOUT) -> float:
    """Return the seconds after which the caller of a command with `timeout_s` may take the supervisor for dead."""
    return timeout_s + TERM_GRACE_S + KILL_WAIT_S + cleanup_timeout_s


def guard(control: socket.socket) -> None:
    """Start the sandbox that the first frame describes; clean up at its end."""
    config, _ = receive_frame(control)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = os.fork()
    if not server:
        _start_server(control, config)
    wake = Wake()
    poll = select.poll()
    poll.register(wake.fd, select.POLLIN)
    poll.register(control, select.POLLRDHUP)
    with contextlib.suppress(OSError):  # its end also when a forked copy of it still holds the socket
        poll.register(os.pidfd_open(config["worker"]), select.POLLIN)
    codes: dict[int, int | None] = {server: None}
    while not reap(codes) and codes[server] is None:
        ready = {fd for fd, _ in poll.poll()}
        if ready - {wake.fd} or wake.take() - {signal.SIGCHLD}:
            break
    with contextlib.suppress(OSError):
        control.setblocking(False)
        send_frame(control, {"ending": True})
    kill_descendants(codes)
    remove_tree(config["folder"])


def _start_server(control: socket.socket, config: dict[str, Any]) -> NoReturn:
    try:
        die_with_parent()
        os.setsid()  # apart from the guard's group, which is not to be killed with it
        for fd in config["keep_from_server"]:
            os.close(fd)
        if config["copy_from"] is not None:
            _copy(config["copy_from"], config["copy_to"])
        if config["isolate"]:
            os.set_inheritable(control.fileno(), True)
            argv = _with_hidden_options(config["isolate"])
            os.execv(argv[0], argv)  # noqa: S606 - a list, no shell
        serve(control)
    except (OSError, EOFError) as error:
        with contextlib.suppress(OSError):
            send_frame(control, {"error": str(error)})
    finally:
        os._exit(1)


def _with_hidden_options(argv: list[str]) -> list[str]:
    """Return the command line of bubblewrap with its options in a file: programs inside see it, and not these paths."""
    end = argv.index("--")
    options = os.memfd_create("options", 0)
    with open(os.dup(options), "wb") as file:  # noqa: PTH123
        file.write(b"\0".join(map(os.fsencode, argv[1:end])))
    os.lseek(options, 0, os.SEEK_SET)
    return [argv[0], "--args", str(options), *argv[end:]]


def _copy(source: str, target: str) -> None:
    """Copy a folder's content with permissions, times and links; shares blocks where the file system can."""
    argv = ["cp", "-a", "--", f"{source}/.", target]
    status = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawnp("cp", argv, os.environ), 0)[1])
    if status:
        raise OSError(f"copying {source} to {target} failed: {' '.join(argv)} exited with {status}")


def serve(control: socket.socket) -> None:
    """Be the server of the sandbox that the next frame describes."""
    config, _ = receive_frame(control)
    Server(control, config).run()


def main() -> None:
    """Run one role: `guard` or `serve`, and the descriptor of the socket to the worker."""
    role, descriptor = sys.argv[1:]
    {"guard": guard, "serve": serve}[role](socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
