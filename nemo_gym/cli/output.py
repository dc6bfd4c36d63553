"""Where the command line writes: results to standard output, everything about the work to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNFOLDED_WIDTH: Final = 1000


def result_console() -> Console:
    """Return the console for results: what a pipe or file should get."""
    return _console(sys.stdout)


def work_console() -> Console:
    """Return the console for progress, notes and errors."""
    return _console(cast("TextIO", _Unheeded(sys.stderr)))


class _Unheeded:
    """A stream whose reader may go away: what is told about the work is then lost, and the work goes on.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as much of a text as is taken."""
        self._tolerate(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush as much as is taken."""
        self._tolerate(self._stream.flush)

    def _tolerate(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BlockingIOError:  # a terminal that another program has set to O_NONBLOCK: there is more room later
            pass
        except OSError:
            # A pipe without a reader, a terminal that was closed: what is left in buffers must have somewhere to go.
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def _console(stream: TextIO) -> Console:
    # What is not read on a screen must not be folded to the width of one.
    return Console(file=stream, highlight=False, width=None if stream.isatty() else UNFOLDED_WIDTH)


def write_line(text: str = "") -> None:
    """Write one line of a result, as it is."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write a result for a program: one JSON value, indented."""
    write_line(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def shown_path(path: Path) -> str:
    """Return a path as people read it: relative when it is below the working directory."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def note(text: str, style: str = "") -> None:
    """Write a line about the work."""
    work_console().print(Text(text, style=style), soft_wrap=True)


def show_error(text: str) -> None:
    """Write an error: its first line stands out, the rest explains it."""
    first, _, rest = text.partition("\n")
    message = Text.assemble(("error: ", "bold red"), (first, "bold"))
    if rest:
        message.append(f"\n{rest}")
    work_console().print(message, soft_wrap=True)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table without lines, whose first column is never folded; numbers are for the caller to format."""
    table = Table(box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=position == 0)
    for row in rows:
        # As text, for what stands in brackets would be taken for markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
