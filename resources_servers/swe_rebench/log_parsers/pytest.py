"""The output of pytest: verbose lines (also of xdist), and the short summary of `-rA`."""

import re
from typing import Final

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status, clean_lines

_STATUSES: Final = {
    "PASSED": Status.PASSED,
    "FAILED": Status.FAILED,
    "ERROR": Status.ERROR,
    "SKIPPED": Status.SKIPPED,
    "XFAIL": Status.XFAILED,
    "XPASS": Status.XPASSED,
}
_WORD: Final = "(?P<status>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
_FILE: Final = r"\S[^:\[\]]*\.\w+"
_PERCENT: Final = r"\s+\[\s*\d+%\]"

_VERBOSE: Final = re.compile(rf"(?P<name>{_FILE}::.*?) {_WORD}(?: \(.*\))?(?:{_PERCENT})?")
_WORKER: Final = re.compile(rf"\[gw\d+\]{_PERCENT} {_WORD} (?P<name>{_FILE}::.*)")
_BEGUN: Final = re.compile(rf"(?P<name>{_FILE}::(?:[^\s\[]|\[.*?\](?=\s|$))+)(?:\s.*)?")
_STATUS_ALONE: Final = re.compile(rf"{_WORD}(?: \(.*\))?(?:{_PERCENT})?|.*{_WORD.replace('status', 'late')}{_PERCENT}")
_SUMMARY_BEGINS: Final = re.compile(r"=+ short test summary info =+")
_SECTION: Final = re.compile(r"={3,} .+ ={3,}|={10,}")
_SUMMARY: Final = re.compile(rf"{_WORD} (?P<rest>{_FILE}(?:::.*|(?: - .*)?))")
_SUBTEST: Final = re.compile(rf"SUBFAIL(?:ED)?(?:[\[(].*[\])])? (?P<rest>{_FILE}::.*)")


def parse_pytest(log: str) -> dict[str, Status]:
    """Read a log of pytest.

    Lines of the summary count inside a summary only, if there is one: tests may print what looks like them.
    Skipped tests have no names there, so they are known from verbose lines only. A file that could not be collected
    is an error under the file's name.
    """
    lines = clean_lines(log)
    has_summary = any(_SUMMARY_BEGINS.fullmatch(line) for line in lines)
    in_summary = not has_summary
    results = Results()
    begun: str | None = None
    for line in lines:
        if _SECTION.fullmatch(line):
            in_summary = _SUMMARY_BEGINS.fullmatch(line) is not None or not has_summary
            begun = None
        elif match := _VERBOSE.fullmatch(line) or _WORKER.fullmatch(line):
            results.record(match["name"].rstrip(), _STATUSES[match["status"]])
            begun = None
        elif match := _SUBTEST.fullmatch(line):
            results.record(_without_reason(match["rest"]), Status.FAILED)
        elif in_summary and (match := _SUMMARY.fullmatch(line)):
            _record_summary(results, match["status"], match["rest"])
        elif match := _BEGUN.fullmatch(line):
            begun = match["name"]
        elif begun is not None and (match := _STATUS_ALONE.fullmatch(line)):
            # What the test printed stands between its name and its status.
            results.record(begun, _STATUSES[match["status"] or match["late"]])
            begun = None
    return dict(results)


def _record_summary(results: Results, word: str, rest: str) -> None:
    name = rest if word == "PASSED" else _without_reason(rest)
    if "::" in name or word == "ERROR":
        results.record(name, _STATUSES[word])


def _without_reason(text: str) -> str:
    """Return what stands before " - reason"; a parameter in brackets may hold that as well."""
    places = [match.start() for match in re.finditer(r" - ", text)]
    heads = [text[:place] for place in places]
    balanced = [head for head in heads if head.count("[") == head.count("]")]
    closed = [head for head in heads if head.endswith("]")]
    if "[" not in text.partition(" - ")[0]:
        return heads[0] if heads else text
    return next(iter(balanced or closed), text)


PYTEST: Final = LogParser("pytest", parse_pytest)
