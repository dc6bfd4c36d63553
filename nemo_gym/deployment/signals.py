"""Ctrl-C, SIGTERM and SIGHUP as the cancellation of one task, so that `async with` blocks end in their order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

from nemo_gym.errors import Interrupted, ServerStoppedError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Cancels the task that entered it at every stop signal; raises `Interrupted` at the end of its block.

    What stands inside treats the first cancellation as "stop in good order" and one that comes while it is
    stopping as "stop now"; so the second Ctrl-C needs no code of its own. A signal that the process was started
    with ignored (`nohup`) stays ignored. Needs the main thread.

    Args:
        on_signal: Called at each of them, before anything is stopped.
    """

    def __init__(self, on_signal: Callable[[signal.Signals], object] = lambda _: None) -> None:
        self._on_signal = on_signal
        self._received: list[signal.Signals] = []
        self._installed: list[signal.Signals] = []
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._receive, signum)
                self._installed.append(signum)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for signum in self._installed:
            loop.remove_signal_handler(signum)
        if not self._received:
            return
        assert self._task is not None
        for _ in self._received:
            self._task.uncancel()
        # Who stops a whole group of processes (a service manager) stops the servers with it: they did not fail.
        if exc is None or isinstance(exc, asyncio.CancelledError | ServerStoppedError):
            raise Interrupted(self._received[0]) from None

    def _receive(self, signum: signal.Signals) -> None:
        self._received.append(signum)
        self._on_signal(signum)
        assert self._task is not None
        self._task.cancel()
