"""The output of `python -m unittest -v`, and of what builds on it, such as Django's test runner."""

import re
from typing import Final

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status, clean_lines

_STATUSES: Final = {
    "ok": Status.PASSED,
    "FAIL": Status.FAILED,
    "ERROR": Status.ERROR,
    "skipped": Status.SKIPPED,
    "expected failure": Status.XFAILED,
    "unexpected success": Status.XPASSED,
}
_WORD: Final = r"(?P<status>ok|FAIL|ERROR|skipped|expected failure|unexpected success)(?: ['\"].*)?"
_TEST: Final = r"(?P<test>[^\W\d]\w*) \((?P<where>[\w.<>]+)\)"

_BEGUN: Final = re.compile(rf"{_TEST}(?P<rest>| \.\.\..*)")
_ENDED: Final = re.compile(rf"(?:.* \.\.\. ?)?{_WORD}")
_PROBLEM: Final = re.compile(rf"(?P<kind>FAIL|ERROR|UNEXPECTED SUCCESS): {_TEST}.*")
_RAN: Final = re.compile(r"Ran \d+ tests? in [\d.]+s")
_VERDICT: Final = re.compile(r"OK(?: \(.*\))?|FAILED \((?P<counts>.*)\)")
_COUNT: Final = re.compile(r"(?:^|, )(?:failures|errors)=(\d+)")


def canonical_unittest(name: str) -> str:
    """Return "test (module.Class)"; since Python 3.11 the test's name stands in the brackets once more."""
    match = re.fullmatch(_TEST, name.strip())
    return _name(match["test"], match["where"]) if match else name.strip()


def _name(test: str, where: str) -> str:
    return f"{test} ({where.removesuffix(f'.{test}')})"


class _Run:
    """The tests of one run, up to its verdict."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.unsettled: list[str] = []
        self.problems: list[str] = []
        self.ran = False

    def begin(self, name: str) -> None:
        self.unsettled.append(name)

    def end(self, status: Status) -> None:
        if self.unsettled:
            self.results.record(self.unsettled.pop(), status)

    def problem(self, name: str, status: Status) -> None:
        self.results.record(name, status)
        self.problems.append(name)

    def settle(self, expected_problems: int) -> None:
        """At the verdict, a test whose status was lost in other output has passed, if all problems are known."""
        if expected_problems == len(self.problems):
            for name in self.unsettled:
                self.results.record(name, Status.PASSED)


def parse_unittest(log: str) -> dict[str, Status]:
    """Read a log of unittest in its verbose form.

    A test's output, its docstring and its status may come on lines of their own. The list of failures and the verdict
    at the end settle what was lost between.
    """
    results = Results()
    run = _Run(results)
    for line in clean_lines(log):
        if match := _PROBLEM.fullmatch(line):
            status = Status.FAILED if match["kind"] == "FAIL" else Status.ERROR
            status = Status.XPASSED if match["kind"].startswith("UNEXPECTED") else status
            run.problem(_name(match["test"], match["where"]), status)
        elif match := _BEGUN.fullmatch(line):
            run.begin(_name(match["test"], match["where"]))
            if ended := re.fullmatch(rf" \.\.\. {_WORD}", match["rest"]):
                run.end(_STATUSES[ended["status"]])
        elif _RAN.fullmatch(line):
            run.ran = True
        elif run.ran and (match := _VERDICT.fullmatch(line)):
            run.settle(sum(int(count) for count in _COUNT.findall(match["counts"] or "")))
            run = _Run(results)
        elif match := _ENDED.fullmatch(line):
            run.end(_STATUSES[match["status"]])
    return dict(results)


UNITTEST: Final = LogParser("unittest", parse_unittest, canonical_unittest)
