"""How work looks while it goes on: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.output import plain_table
from nemo_gym.config_types import ServerInstance
from nemo_gym.deployment import ServerEvent
from nemo_gym.rollouts.events import (
    CollectionStarted,
    RolloutEvent,
    RolloutFailed,
    RolloutFinished,
    RolloutRunAgain,
)

SECONDS_BETWEEN_LINES: Final = 10.0
SHOWN_FAILURES: Final = 3
SHOWN_REASON_LENGTH: Final = 400

_STYLE_OF_EVENT: Final = {"ready": "green", "failed": "bold red"}


class ServerDisplay:
    """Shows each server becoming ready: a line per server on a terminal, which changes; lines in order elsewhere.

    It is live from the first event until all servers are ready or the first one failed or is stopped.

    Args:
        console: Where to write.
        count: How many servers there are.
    """

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._waiting_for = count
        self._stopping = False
        self._lines: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[state]}"),
            _SecondsColumn(),
            TextColumn("{task.fields[url]}", style="dim", markup=False),
            console=console,
        )

    def __call__(self, event: ServerEvent) -> None:
        """Show an event."""
        if event.kind in ("stopping", "stopped"):
            if self._progress.live.is_started:
                self._progress.stop()
            if not self._stopping:
                self._stopping = True
                self._console.print("Stopping the servers", style="dim")
        elif self._console.is_terminal and self._waiting_for:
            self._show_live(event)
        elif event.kind != "starting":
            self._console.print(_server_line(event))

    def _show_live(self, event: ServerEvent) -> None:
        name = event.instance.name
        if event.kind == "starting":
            self._lines[name] = self._progress.add_task(
                name, total=1, state="starting", url=event.instance.url, seconds=None
            )
            self._progress.start()
            return
        state = f"[{_STYLE_OF_EVENT[event.kind]}]{event.kind}[/]"
        self._progress.update(self._lines[name], completed=1, state=state, seconds=event.seconds)
        self._waiting_for = 0 if event.kind == "failed" else self._waiting_for - 1
        if not self._waiting_for:
            self._progress.stop()


def _server_line(event: ServerEvent) -> Text:
    style = _STYLE_OF_EVENT[event.kind]
    return Text.assemble(
        event.instance.name, " ", (event.kind, style), f" after {event.seconds:.1f} s at {event.instance.url}"
    )


class _SecondsColumn(ProgressColumn):
    """Seconds since the line began, or those that the event told."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["seconds"]
        return Text(f"{task.elapsed or 0.0 if seconds is None else seconds:5.1f} s")


class RolloutDisplay:
    """Shows the progress of a collection: a bar on a terminal, a line every ten seconds elsewhere.

    Args:
        console: Where to write.
        clock: Seconds, for tests.
        seconds_between_lines: The shortest time between two lines when the console is no terminal.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds_between_lines: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        self._console = console
        self._clock = clock
        self._interval = seconds_between_lines
        self._total = self._before = self._finished = self._failed = self._again = 0
        self._reward_sum = 0.0
        self._began = self._last_line = clock()
        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._refresh()
            self._progress.stop()

    def __call__(self, event: RolloutEvent) -> None:
        """Show an event."""
        match event:
            case CollectionStarted():
                self._start(event)
                return
            case RolloutFinished():
                self._finished += 1
                self._reward_sum += event.reward
            case RolloutFailed():
                self._failed += 1
                self._show_failure(event)
            case RolloutRunAgain():
                self._again += 1
            case _:
                return
        self._show_progress()

    def _start(self, event: CollectionStarted) -> None:
        self._total, self._before = event.total, event.already_done
        self._began = self._last_line = self._clock()
        if event.already_done:
            self._console.print(f"{event.already_done} of {event.total} rollouts were finished by an earlier run")
        if self._console.is_terminal and event.already_done < event.total:
            self._task = self._progress.add_task("rollouts", total=event.total, completed=event.already_done, state="")
            self._progress.start()

    def _show_failure(self, event: RolloutFailed) -> None:
        if self._failed <= SHOWN_FAILURES:
            where = f"row {event.task_index}, rollout {event.rollout_index}"
            reason = event.reason
            if len(reason) > SHOWN_REASON_LENGTH:
                reason = f"{reason[:SHOWN_REASON_LENGTH]} ..."
            self._console.print(Text(f"failed: {where}: {reason}", style="red"), soft_wrap=True)
        if self._failed == SHOWN_FAILURES:
            self._console.print("(more failures go to the failures file alone)", style="dim")

    def _show_progress(self) -> None:
        if self._task is not None:
            self._refresh()
            return
        now = self._clock()
        if now - self._last_line >= self._interval:
            self._last_line = now
            self._console.print(f"rollouts {self._done}/{self._total}  {self.state()}")

    def _refresh(self) -> None:
        assert self._task is not None
        self._progress.update(self._task, completed=self._done, state=self.state())

    @property
    def _done(self) -> int:
        return self._before + self._finished + self._failed

    def state(self) -> str:
        """Return rate, mean reward, what went wrong and the time that is left, in one line."""
        elapsed = self._clock() - self._began
        ended = self._finished + self._failed
        rate = ended / elapsed if elapsed > 0 else 0.0
        parts = [f"{rate:.1f}/s"]
        if self._finished:
            parts.append(f"mean reward {self._reward_sum / self._finished:.3f}")
        if self._failed:
            parts.append(f"{self._failed} failed")
        if self._again:
            parts.append(f"{self._again} run again")
        remaining = self._total - self._done
        if remaining and rate:
            parts.append(f"{duration(remaining / rate)} left")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return a length of time as people write it: `0.8 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 0.1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def server_table(instances: Iterable[ServerInstance]) -> Table:
    """Return the table of servers that `gym env start` shows once they run."""
    return plain_table(
        ("server", "implementation", "workers", "address"),
        ((one.name, f"{one.kind}/{one.implementation}", str(one.num_workers), one.url) for one in instances),
    )
