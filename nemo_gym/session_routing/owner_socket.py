"""How an owner is connected to, and the ways in which a forwarded request can fail.

Failure policy: an owner is gone only if nothing of this user listens at its path. One that does not answer is
waited for as long as the client waits. A request is never sent twice.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nemo_gym.session_routing.private_socket import NOBODY_LISTENS, is_own_socket

_FIRST_RETRY: Final = 0.005  # seconds between attempts at a full backlog, doubled up to the last
_LAST_RETRY: Final = 0.1
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


class OwnerGoneError(Exception):
    """Raised when a session's owner no longer runs.

    Args:
        may_have_run: The request had been sent, so that its handler may have run.
    """

    def __init__(self, *, may_have_run: bool) -> None:
        super().__init__("the owner is gone")
        self.may_have_run = may_have_run


class NoReplyError(Exception):
    """Raised when an owner that still runs closed the connection before it replied."""


class OutOfDescriptorsError(Exception):
    """Raised when this process can't open another socket."""


class ReplyBrokenOffError(Exception):
    """Raised when the owner was lost in the middle of its reply.

    It must reach the server, which then breaks off the client's connection: a short reply must never look like a
    complete one.
    """


async def connect_to_owner(path: Path, is_wanted: Callable[[], bool] = lambda: True) -> socket.socket:
    """Return a socket that is connected to the owner whose socket stands at `path`.

    asyncio's own connect takes EAGAIN, which for a Unix socket means that the backlog is full, for a connection in
    progress, and goes on with a socket that is not connected. Here a full backlog is waited for.

    Args:
        path: The owner's socket.
        is_wanted: Tells whether to go on waiting.

    Raises:
        OwnerGoneError: Nothing of this user listens there.
        OutOfDescriptorsError: This process can't open another socket.
        NoReplyError: The connection failed otherwise, or was no longer wanted.
    """
    delay = _FIRST_RETRY
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise _connect_failure(error) from error
    try:
        sock.setblocking(False)
        while True:
            if not is_own_socket(path):
                raise OwnerGoneError(may_have_run=False)
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:
                if not is_wanted():
                    raise NoReplyError("the connection was no longer wanted") from None
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY)
            except OSError as error:
                raise _connect_failure(error) from error
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _connect_failure(error: OSError) -> Exception:
    if error.errno in _OUT_OF_DESCRIPTORS:
        return OutOfDescriptorsError(str(error))
    if error.errno in NOBODY_LISTENS:
        return OwnerGoneError(may_have_run=False)
    return NoReplyError(str(error))
