"""The output of jest (`--verbose`), mocha (its "spec" reporter) and vitest: a tree of suites, drawn by indentation."""

import re
from typing import Final

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status, clean_lines

SEPARATOR: Final = " > "
_JEST_SEPARATOR: Final = " › "  # noqa: RUF001

_MARKS: Final = {
    **dict.fromkeys("✓✔√", Status.PASSED),
    **dict.fromkeys("✕✗✘×✖", Status.FAILED),  # noqa: RUF001
    **dict.fromkeys("○↓✎◌", Status.SKIPPED),
}
_MARKED: Final = re.compile(rf"(?P<indent>\s*)(?P<mark>[{''.join(_MARKS)}])\s+(?P<title>\S.*)")
_PENDING: Final = re.compile(r"(?P<indent>\s+)- (?P<title>\S.*)")
_NUMBERED: Final = re.compile(r"(?P<indent>\s+)\d+\) (?P<title>\S.*)")
_FILE: Final = re.compile(r"\s*(?P<word>PASS|FAIL) +(?:\S+ +)?(?P<path>\S*[./]\S+)(?: \([^)]*\))*")
_JEST_FAILURE: Final = re.compile(rf"\s*● (?P<path>.+{_JEST_SEPARATOR}.+)")
_MOCHA_COUNTS: Final = re.compile(r"\s+\d+ (?:passing|failing|pending)(?: \(.*\))?")
_SUITE: Final = re.compile(r"(?P<indent>\s+)(?P<title>\S.*)")
_DECORATION: Final = re.compile(
    r"\s+(?:\(\d+(?:\.\d+)? ?(?:ms|s|m)\)|\d+(?:\.\d+)?ms|\(\d+ tests?(?: \|.*)?\)(?: \d+ms)?)$"
)


def canonical_javascript(name: str) -> str:
    """Return the name without its duration."""
    return _DECORATION.sub("", name.strip())


class _Tree:
    """The suites around the current line; each holds what is indented deeper."""

    def __init__(self) -> None:
        self._suites: list[tuple[int, str]] = []

    def clear(self) -> None:
        self._suites.clear()

    def enter(self, indent: int, title: str) -> None:
        self._leave(indent)
        self._suites.append((indent, title))

    def name(self, indent: int, title: str) -> str:
        self._leave(indent)
        return SEPARATOR.join([*(suite for _, suite in self._suites), canonical_javascript(title)])

    def _leave(self, indent: int) -> None:
        while self._suites and self._suites[-1][0] >= indent:
            self._suites.pop()


def parse_javascript(log: str) -> dict[str, Status]:
    """Read a log of jest, mocha or vitest.

    A test's name is its suites' titles and its own, joined with " > "; a file's is its path, as jest names it.
    """
    results = Results()
    tree = _Tree()
    in_details = False  # mocha's numbered list of failures, after the counts
    for line in clean_lines(log):
        if match := _FILE.fullmatch(line):
            tree.clear()
            in_details = False
            results.record(match["path"], Status.PASSED if match["word"] == "PASS" else Status.FAILED)
        elif match := _MARKED.fullmatch(line):
            results.record(tree.name(len(match["indent"]), match["title"]), _MARKS[match["mark"]])
        elif match := _JEST_FAILURE.fullmatch(line):
            results.record(canonical_javascript(match["path"].replace(_JEST_SEPARATOR, SEPARATOR)), Status.FAILED)
        elif _MOCHA_COUNTS.fullmatch(line):
            in_details = True
            tree.clear()
        elif match := _NUMBERED.fullmatch(line):
            if not in_details:
                results.record(tree.name(len(match["indent"]), match["title"]), Status.FAILED)
        elif not in_details and (match := _PENDING.fullmatch(line)):
            results.record(tree.name(len(match["indent"]), match["title"]), Status.SKIPPED)
        elif match := _SUITE.fullmatch(line):
            indent = len(match["indent"])
            # The suites at the left begin another run.
            in_details = in_details and indent > 2
            if not in_details:
                tree.enter(indent, match["title"])
    return dict(results)


JAVASCRIPT: Final = LogParser("javascript", parse_javascript, canonical_javascript, SEPARATOR)
