"""The output of `go test`: the text of `-v`, the events of `-json`, or both in one log."""

import json
import re
from typing import Any, Final

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status, clean_lines

_TEXT_STATUSES: Final = {"PASS": Status.PASSED, "FAIL": Status.FAILED, "SKIP": Status.SKIPPED}
_EVENT_STATUSES: Final = {"pass": Status.PASSED, "fail": Status.FAILED, "skip": Status.SKIPPED}

# Not at the line's start only: what a test printed without a newline stands before it.
_ENDED: Final = re.compile(r"--- (?P<status>PASS|FAIL|SKIP): (?P<name>\S+) \(\d+(?:\.\d+)?s\)$")


def parse_go(log: str) -> dict[str, Status]:
    """Read a log of go's tests. Names are those of tests and subtests; tests of one name in two packages are one."""
    results = Results()
    for line in clean_lines(log):
        event = _event(line)
        if event is not None:
            status = _EVENT_STATUSES.get(event["Action"])
            if status is not None and isinstance(event.get("Test"), str):
                results.record(event["Test"], status)
        elif match := _ENDED.search(line):
            results.record(match["name"], _TEXT_STATUSES[match["status"]])
    return dict(results)


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("Action"), str) else None


GO: Final = LogParser("go", parse_go)
