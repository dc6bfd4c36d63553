"""How servers look while they start: live on a terminal, plain lines elsewhere; and times for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from nemo_gym.cli.output import plain_table
from nemo_gym.config_types import ServerInstance
from nemo_gym.deployment import ServerEvent
from nemo_gym.logs.redaction import Redactor

_REDACT: Final = Redactor()
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


def one_line(text: str, limit: int) -> str:
    """Return what others have written (a server, a model) for a line on a terminal.

    Args:
        text: It may be long, of several lines, and hold secrets and what controls a terminal.
        limit: So many characters are kept.
    """
    words = _REDACT("".join(char if char.isprintable() else " " for char in text)).split()
    line = " ".join(words)
    return line if len(line) <= limit else f"{line[:limit]} ..."


def server_table(instances: Iterable[ServerInstance]) -> Table:
    """Return the table of servers that `gym env start` shows once they run."""
    return plain_table(
        ("server", "implementation", "workers", "address"),
        ((one.name, f"{one.kind}/{one.implementation}", str(one.num_workers), one.url) for one in instances),
    )
