"""What all log parsers share: statuses, the cleaning of lines, and how results are collected and looked up."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Status(StrEnum):
    """What became of one test."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"

    @property
    def is_pass(self) -> bool:
        """Whether a test that has to pass may end so: a failure that was expected may."""
        return self in (Status.PASSED, Status.XFAILED, Status.XPASSED)


_SEVERITY: Final = (Status.SKIPPED, Status.XFAILED, Status.XPASSED, Status.PASSED, Status.FAILED, Status.ERROR)

# Colours and cursor movements (CSI), window titles and links (OSC), and the other two-byte escapes.
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_BREAKS: Final = re.compile(r"\r\n|\r|\n")
_LINE_LIMIT: Final = 10_000


def clean_lines(log: str) -> list[str]:
    """Return the lines of a log without escape sequences, NULs and trailing blanks; a lone CR ends a line too.

    Of a very long line the beginning and the end remain.
    """
    lines = _BREAKS.split(_ESCAPES.sub("", log).replace("\0", ""))
    return [_shortened(line).rstrip() for line in lines]


def _shortened(line: str) -> str:
    if len(line) <= _LINE_LIMIT:
        return line
    return line[: _LINE_LIMIT // 2] + line[-_LINE_LIMIT // 2 :]


class Results(dict[str, Status]):
    """Statuses by test name. A test reported twice keeps the worse report: a failure is never made good by a pass."""

    def record(self, name: str, status: Status) -> None:
        """Add one report."""
        known = self.get(name)
        if known is None or _SEVERITY.index(status) > _SEVERITY.index(known):
            self[name] = status


def _as_is(name: str) -> str:
    return name


@dataclass(frozen=True, slots=True)
class LogParser:
    """Reads the output of one kind of test runner.

    Args:
        name: The runner.
        parse: From a log to the statuses by canonical test name.
        canonical: From a test's name, as a dataset or the runner writes it, to its canonical form.
        separator: What separates the parts of a full name, where datasets also use the last part alone.
    """

    name: str
    parse: Callable[[str], dict[str, Status]]
    canonical: Callable[[str], str] = _as_is
    separator: str | None = None

    def look_up(self, results: Mapping[str, Status], name: str) -> Status | None:
        """Return the status of the test that a dataset calls `name`, or None if it is not in `results`.

        Where a dataset uses the last part of names and several tests share it, the worst of them counts.
        """
        wanted = self.canonical(name)
        found = results.get(wanted)
        if found is not None or self.separator is None:
            return found
        ending = self.separator + wanted
        alike = [status for full, status in results.items() if full.endswith(ending)]
        return max(alike, key=_SEVERITY.index) if alike else None
