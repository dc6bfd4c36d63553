"""The output of `cargo test`, and of `cargo nextest`."""

import re
from typing import Final

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status, clean_lines

_STATUSES: Final = {"ok": Status.PASSED, "FAILED": Status.FAILED, "ignored": Status.SKIPPED}
_WORD: Final = r"(?P<status>ok|FAILED|ignored)(?:, .*)?(?: <[\d.]+s>)?"

_ENDED: Final = re.compile(rf"test (?P<name>\S.*?) \.\.\. {_WORD}")
_BEGUN: Final = re.compile(r"test (?P<name>\S.*?) \.\.\. ?.*")
_STATUS_ALONE: Final = re.compile(_WORD)
_FAILURE: Final = re.compile(r"---- (?P<name>\S.*) stdout ----")
_NEXTEST: Final = re.compile(
    r"\s*(?P<word>PASS|FAIL|SIG[A-Z]+|ABORT|TIMEOUT|SKIP) \[\s*[\d.]*s?\](?: \(.*?\))? (?P<name>\S.*)"
)
_DECORATION: Final = re.compile(r" - (?:should panic|compile fail|compile)$")


def canonical_cargo(name: str) -> str:
    """Return the name without what the runner adds to it, such as " - should panic"."""
    return _DECORATION.sub("", name.strip())


def parse_cargo(log: str) -> dict[str, Status]:
    """Read a log of cargo's tests, also of documentation tests ("src/lib.rs - add (line 3)")."""
    results = Results()
    begun: str | None = None
    for line in clean_lines(log):
        if match := _ENDED.fullmatch(line):
            results.record(canonical_cargo(match["name"]), _STATUSES[match["status"]])
            begun = None
        elif match := _FAILURE.fullmatch(line):
            results.record(canonical_cargo(match["name"]), Status.FAILED)
        elif match := _NEXTEST.fullmatch(line):
            words = {"PASS": Status.PASSED, "SKIP": Status.SKIPPED}
            results.record(match["name"], words.get(match["word"], Status.FAILED))
        elif match := _BEGUN.fullmatch(line):
            begun = canonical_cargo(match["name"])
        elif begun is not None and (match := _STATUS_ALONE.fullmatch(line)):
            # With --nocapture a test's output stands between its name and its status.
            results.record(begun, _STATUSES[match["status"]])
            begun = None
    return dict(results)


CARGO: Final = LogParser("cargo", parse_cargo, canonical_cargo)
