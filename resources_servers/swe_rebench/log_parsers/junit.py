"""JUnit's XML reports, as a command printed them, with other output around and between."""

import contextlib
import re
from collections.abc import Iterator
from typing import Final
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from resources_servers.swe_rebench.log_parsers.base import LogParser, Results, Status

SEPARATOR: Final = "::"

_TAG: Final = re.compile(r"<\?xml|<(?P<end>/?)testsuites?(?=[\s>/])(?:[^>]*?(?P<empty>/?)>)?")
_INVALID: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STATUSES: Final = {"failure": Status.FAILED, "error": Status.ERROR, "skipped": Status.SKIPPED}


def parse_junit(log: str) -> dict[str, Status]:
    """Read all reports in a log. A test's name is "classname::name", or its name where it has no class.

    Of a report that breaks off, the test cases that are complete count.
    """
    results = Results()
    for report in _reports(log):
        for case in _cases(report):
            name = " ".join((case.get("name") or "").split())
            if name:
                owner = case.get("classname")
                results.record(f"{owner}{SEPARATOR}{name}" if owner else name, _status(case))
    return dict(results)


def _reports(log: str) -> Iterator[str]:
    """Yield the parts of a log from the outermost element's beginning to its end, or to the next report's beginning."""
    begin, depth = 0, 0
    for tag in _TAG.finditer(log):
        if tag["end"] is None:
            if depth:
                yield log[begin : tag.start()]
            depth = 0
        elif tag["end"]:
            depth -= 1
            if depth == 0:
                yield log[begin : tag.end()]
            depth = max(depth, 0)
        else:
            if depth == 0:
                begin = tag.start()
            depth += 0 if tag["empty"] else 1
    if depth:
        yield log[begin:]


def _cases(text: str) -> Iterator[Element]:
    """Yield the complete test cases, but none of a report with a document type: its entities could explode."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        return
    parser = XMLPullParser(["end"])
    # After the report comes other output, or its end is missing: what came before was read.
    with contextlib.suppress(ParseError):
        parser.feed(_INVALID.sub("", text))
    for _, element in _events(parser):
        if element.tag.rpartition("}")[2] == "testcase":
            yield element


def _events(parser: XMLPullParser) -> Iterator[tuple[str, Element]]:
    try:
        for event, element in parser.read_events():
            if isinstance(element, Element):
                yield str(event), element
    except ParseError:
        return


def _status(case: Element) -> Status:
    kinds = [child.tag.rpartition("}")[2] for child in case]
    found = [_STATUSES[kind] for kind in kinds if kind in _STATUSES]
    for status in (Status.ERROR, Status.FAILED, Status.SKIPPED):
        if status in found:
            return status
    return Status.FAILED if case.get("status") in ("failed", "fail") else Status.PASSED


JUNIT: Final = LogParser("junit", parse_junit, separator=SEPARATOR)
