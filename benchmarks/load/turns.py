"""Which workers may run: all but one are stopped for a moment, so that this one accepts the next connections."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import psutil

_LOOK_S: Final = 0.001


async def let_only_run(chosen: int, workers: Sequence[int]) -> None:
    """Return when `chosen` runs and the other workers stand still; `let_all_run` has to follow."""
    let_all_run([chosen])
    for worker in workers:
        if worker != chosen:
            os.kill(worker, signal.SIGSTOP)
            while psutil.Process(worker).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110, nobody else would tell
                await asyncio.sleep(_LOOK_S)


def let_all_run(workers: Iterable[int]) -> None:
    """Let those go on that were stopped; others are not disturbed."""
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
