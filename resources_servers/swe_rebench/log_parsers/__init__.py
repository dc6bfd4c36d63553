"""Readers of test runners' output: from a log to each test's status.

A parser takes a log as it came, with colours, other output in between, lines twice, and its middle or end missing, and
returns what it is sure of. A test that the log does not settle is left out; whoever asks for it finds it missing.
"""

import difflib
import re
from typing import Final

from resources_servers.swe_rebench.log_parsers.base import (
    LogParser as LogParser,
    Status as Status,
)
from resources_servers.swe_rebench.log_parsers.cargo import CARGO
from resources_servers.swe_rebench.log_parsers.go import GO
from resources_servers.swe_rebench.log_parsers.javascript import JAVASCRIPT
from resources_servers.swe_rebench.log_parsers.junit import JUNIT
from resources_servers.swe_rebench.log_parsers.pytest import PYTEST
from resources_servers.swe_rebench.log_parsers.unittest import UNITTEST

LOG_PARSERS: Final[dict[str, LogParser]] = {
    "pytest": PYTEST,
    "unittest": UNITTEST,
    "django": UNITTEST,
    "go": GO,
    "gotest": GO,
    "go_test": GO,
    "cargo": CARGO,
    "cargo_test": CARGO,
    "rust": CARGO,
    "jest": JAVASCRIPT,
    "mocha": JAVASCRIPT,
    "vitest": JAVASCRIPT,
    "junit": JUNIT,
    "junit_xml": JUNIT,
}
"""The parsers by name. The public dataset's names (`parse_log_pytest`, `parse_log_pytest_v2`) mean the same."""

_DECORATION: Final = re.compile(r"^parse_log_|_v\d+$|_options$")


class UnknownLogParserError(ValueError):
    """Raised when a row names a parser that does not exist."""


def find_log_parser(name: str) -> LogParser:
    """Return the parser of that name.

    Raises:
        UnknownLogParserError: There is none; with those that exist.
    """
    plain = _DECORATION.sub("", _DECORATION.sub("", name.strip().lower().replace("-", "_")))
    found = LOG_PARSERS.get(plain)
    if found is None:
        near = difflib.get_close_matches(plain, LOG_PARSERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownLogParserError(
            f"there is no log parser {name[:80]!r}; there are: {', '.join(sorted(LOG_PARSERS))}{hint}"
        )
    return found
