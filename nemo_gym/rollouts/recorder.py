"""Writes how far a run is, once a second, to where the dashboard looks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from nemo_gym.errors import Interrupted
from nemo_gym.rollouts.progress_record import COMPLETED, FAILED, INTERRUPTED, ProgressRecord, RunProgress
from nemo_gym.rollouts.tally import REWARD_BOUNDS, RunTally
from nemo_gym.rollouts.ticker import Ticker

SECONDS_BETWEEN_RECORDS: Final = 1.0
MAX_HISTORY: Final = 300


class RunRecorder:
    """Keeps the record of one run while it lasts; nothing here raises or waits for a disk.

    Args:
        tally: What is recorded.
        agent: The agent that makes the rollouts; empty where each row names its own.
        output: The rollouts file.
        head_url: The head server of the deployment that is asked; None where none is known.
    """

    def __init__(self, tally: RunTally, *, agent: str, output: Path, head_url: str | None) -> None:
        self._tally = tally
        self._record = ProgressRecord()
        self._agent = agent
        self._output = str(output.absolute())
        self._head_url = head_url
        self._started_at = time.time()
        self._began = time.monotonic()
        self._finished: str | None = None
        self._history = History()
        self._ticker = Ticker(self._write, SECONDS_BETWEEN_RECORDS, "the record of the run's progress")

    def start(self) -> None:
        """Begin to write the record."""
        self._ticker.start()

    def finish(self, error: BaseException | None) -> None:
        """Write the record for the last time.

        Args:
            error: What ended the run, where it did not come to its end.
        """
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt | Interrupted)
        self._finished = COMPLETED if error is None else INTERRUPTED if stopped else FAILED
        self._ticker.stop()
        self._record.close()

    def progress(self) -> RunProgress:
        """Return the record as it is now, and note it in the history."""
        tally, finished = self._tally, self._finished
        # The wall clock may be set while the run lasts, and the history must not go back with it.
        now = self._started_at + time.monotonic() - self._began
        reward_sum = tally.finite_reward_sum()
        self._history.add(now, tally.finished, tally.failed, reward_sum)
        return RunProgress(
            run_id=self._record.run_id,
            pid=self._record.pid,
            head_url=self._head_url,
            agent=self._agent,
            output=self._output,
            started_at=self._started_at,
            updated_at=now,
            finished=finished,
            total=tally.total,
            already_done=tally.already_done,
            done=tally.finished,
            failed=tally.failed,
            run_again=tally.run_again,
            running=0 if finished else tally.running,
            lost_sessions=tally.lost_sessions,
            reward_sum=reward_sum,
            reward_count=tally.finished,
            reward_bounds=list(REWARD_BOUNDS),
            reward_histogram=list(tally.reward_histogram),
            rate_per_s=tally.rate_per_s(),
            history=self._history.points(),
        )

    def _write(self) -> None:
        self._record.write(self.progress())


class History:
    """Points in time, thinned out: from `MAX_HISTORY` on every other is dropped and they are taken half as often."""

    def __init__(self) -> None:
        self._kept: list[list[float]] = []
        self._last: list[float] | None = None
        self._step = 0.0

    def add(self, at: float, *values: float) -> None:
        """Add a point, which stands at the end until a later one does."""
        point = [at, *values]
        if self._kept and at - self._kept[-1][0] < self._step:
            self._last = point
            return
        self._last = None
        self._kept.append(point)
        if len(self._kept) >= MAX_HISTORY:
            self._kept = self._kept[::2]
            self._step = 2 * self._step or (self._kept[-1][0] - self._kept[0][0]) / (len(self._kept) - 1)

    def points(self) -> list[list[float]]:
        """Return the points, at most `MAX_HISTORY`."""
        return [*self._kept, *([self._last] if self._last else [])]
