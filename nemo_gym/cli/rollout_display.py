"""How a run of rollouts looks while it goes on: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.rendering import duration, one_line
from nemo_gym.rollouts.events import CollectionStarted, RolloutEvent, RolloutFailed
from nemo_gym.rollouts.tally import RunTally
from nemo_gym.rollouts.ticker import Ticker

SECONDS_BETWEEN_LINES: Final = 10.0
LONGEST_BETWEEN_LINES: Final = 60.0
SHOWN_FAILURES: Final = 3
SHOWN_REASON_LENGTH: Final = 400

_SECONDS_BETWEEN_FRAMES: Final = 0.25
_SECONDS_BETWEEN_ESTIMATES: Final = 1.0
_LINES_OF_A_RUN: Final = 30
_OLD_S: Final = 10.0
_BAR_WIDTH: Final = 30
_NARROWEST_WITH_BAR: Final = 60


class RolloutDisplay:
    """Shows the progress of a run: from the first event on, to the end of the `with` block.

    What is shown is written by a thread of its own, so that a terminal or pipe that takes nothing stops no rollouts.

    Args:
        console: Where to write.
        tally: What the run has come to; it is told of events by others.
        seconds_between_lines: The shortest time between two lines where the console is no terminal; long runs tell
            less often, once a minute at last. A terminal that can't move its cursor (TERM=dumb) is none.
    """

    def __init__(
        self, console: Console, tally: RunTally, *, seconds_between_lines: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self._console = console
        self._tally = tally
        self._interval = seconds_between_lines
        self._last_line = self._estimated_at = 0.0
        self._left: float | None = None
        self._messages: deque[Text] = deque()
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._started = self._over = False
        seconds = _SECONDS_BETWEEN_FRAMES if self._is_live else min(_SECONDS_BETWEEN_ESTIMATES, self._interval)
        self._ticker = Ticker(self.show, seconds, "the display of progress")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if self._started:
            self._ticker.stop()

    def __call__(self, event: RolloutEvent) -> None:
        """Take notice of an event."""
        if isinstance(event, RolloutFailed):
            self._take_failure(event)
        elif isinstance(event, CollectionStarted):
            if event.already_done:
                told = f"{event.already_done} of {event.total} rollouts were finished by an earlier run"
                self._messages.append(Text(told))
            self._started = True
            self._ticker.start()

    def show(self) -> None:
        """Write what is to be seen by now."""
        self._estimate()
        if self._is_live:
            self._show_live()
        while self._messages:
            self._console.print(self._messages.popleft(), soft_wrap=True)
        if not self._is_live:
            self._show_line()

    def state(self) -> str:
        """Return how far the run is, in one line."""
        tally = self._tally
        done = tally.already_done + tally.ended
        left = [] if self._left is None else [f"about {duration(self._left)} left"]
        return "  ".join([f"rollouts {done}/{tally.total}", *self._pace(), *self._trouble(), *left])

    def _estimate(self) -> None:
        seconds = self._tally.seconds
        if seconds - self._estimated_at >= _SECONDS_BETWEEN_ESTIMATES:
            self._estimated_at = seconds
            self._left = self._tally.seconds_left() if self._tally.remaining else None

    def _show_line(self) -> None:
        seconds = self._tally.seconds
        interval = max(self._interval, min(LONGEST_BETWEEN_LINES, seconds / _LINES_OF_A_RUN))
        if not self._over and seconds - self._last_line >= interval:
            self._last_line = seconds
            self._console.print(self.state(), soft_wrap=True)

    def _show_live(self) -> None:
        if self._live is None:
            if not self._tally.remaining:
                return
            # Results are no part of what is live: standard output may be a file.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        over = self._over  # it may end while a terminal takes this frame, which is then not the last
        self._live.update(self._frame(), refresh=True)
        if over:
            self._live.stop()

    def _frame(self) -> RenderableType:
        tally = self._tally
        done = tally.already_done + tally.ended
        facts = [f"{done}/{tally.total}", f"{100 * done / max(1, tally.total):.0f} %"]
        if self._left is not None and not self._over:
            facts.append(f"about {duration(self._left)} left")
        lines: list[RenderableType] = [Text("  ".join(["rollouts", *facts]))]
        if self._console.width >= _NARROWEST_WITH_BAR:  # where it is narrower a table would cut numbers off
            width = min(_BAR_WIDTH, self._console.width // 3)
            bar = ProgressBar(total=max(1, tally.total), completed=done, width=width)
            lines[0] = grid = Table.grid(padding=(0, 2))
            grid.add_row(Text("rollouts"), bar, Text("  ".join(facts)))
        lines.append(Text("  ".join(self._pace())))
        if trouble := self._trouble():
            lines.append(Text("  ".join(trouble), style="yellow"))
        return Group(*lines)

    def _pace(self) -> list[str]:
        tally = self._tally
        parts = [f"{tally.rate_per_s():.3g}/s"]
        if (mean := tally.mean_reward) is not None:
            parts.append(f"mean reward {mean:.3f}")
        if tally.running:
            oldest = tally.oldest_s()
            parts.append(f"{tally.running} running" + (f", for {duration(oldest)} at most" if oldest > _OLD_S else ""))
        return parts

    def _trouble(self) -> list[str]:
        tally = self._tally
        parts = [f"{tally.failed} failed"] if tally.failed else []
        if tally.run_again:
            lost = f" ({tally.lost_sessions} for a lost session)" if tally.lost_sessions else ""
            parts.append(f"{tally.run_again} run again{lost}")
        return parts

    def _take_failure(self, event: RolloutFailed) -> None:
        shown = self._tally.failed
        if shown <= SHOWN_FAILURES:
            where = f"row {event.task_index}, rollout {event.rollout_index}"
            reason = one_line(event.reason, SHOWN_REASON_LENGTH)
            self._messages.append(Text(f"failed: {where}: {reason}", style="red"))
        if shown == SHOWN_FAILURES:
            self._messages.append(Text("(more failures go to the failures file alone)", style="dim"))
