"""Which files a git patch is about, read from its text alone."""

import fnmatch
import re
from collections.abc import Iterator
from typing import Final

_ESCAPE: Final = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_SINGLE: Final = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HUNK: Final = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NAMED: Final = (b"rename from ", b"rename to ", b"copy from ", b"copy to ")

_TEST_SETUP: Final = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "noxfile.py", "manage.py", "Makefile", "Cargo.toml", "build.rs"),
    *(
        "go.mod",
        "go.work",
        "package.json",
        "jest.config.*",
        "vitest.config.*",
        "vite.config.*",
        ".mocharc*",
        ".babelrc*",
    ),
)


def is_test_setup(path: str) -> bool:
    """Whether a file of this name says how tests are run, or is loaded before they are."""
    name = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEST_SETUP)


def patch_paths(patch: bytes) -> set[bytes]:
    """Return the paths of all files that a patch in git's format changes, makes, deletes or names as a source.

    Paths are bytes, as git has them. Lines of the changed text that look like a header don't count.
    """
    found: set[bytes] = set()
    for line in _header_lines(patch):
        if line.startswith(b"diff --git "):
            found.update(_of_diff_line(line.removeprefix(b"diff --git ")))
        elif line.startswith((b"--- ", b"+++ ")):
            path = _unquoted(line[4:].partition(b"\t")[0])
            if path != b"/dev/null":
                found.add(path.partition(b"/")[2])
        else:
            found.update(_unquoted(line.removeprefix(start)) for start in _NAMED if line.startswith(start))
    return found - {b""}


def _header_lines(patch: bytes) -> Iterator[bytes]:
    """Yield the lines outside of hunks, which say themselves how long they are."""
    old = new = 0
    for line in patch.split(b"\n"):
        if old > 0 or new > 0:
            old -= not line.startswith((b"+", b"\\"))
            new -= not line.startswith((b"-", b"\\"))
        elif match := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in match.groups())
        else:
            yield line


def _of_diff_line(text: bytes) -> Iterator[bytes]:
    """Yield the paths of "a/old b/new"; unquoted ones hold blanks as they are, and can be told if they are equal."""
    if text.startswith(b'"') or text.endswith(b'"'):
        quoted = _QUOTED.findall(text)
        rest = _QUOTED.sub(b"", text).strip()
        for path in [_unquoted(path) for path in quoted] + ([rest] if rest else []):
            yield path.partition(b"/")[2]
        return
    half, remainder = divmod(len(text) - 1, 2)
    first, second = text[:half].partition(b"/")[2], text[half + 1 :].partition(b"/")[2]
    if remainder == 0 and first == second:
        yield first
    elif text.count(b" ") == 1:
        yield from (path.partition(b"/")[2] for path in text.split(b" "))
    # Else the names differ, and other lines of the header have them.


def _unquoted(path: bytes) -> bytes:
    if not _QUOTED.fullmatch(path):
        return path
    return _ESCAPE.sub(lambda match: bytes([_SINGLE.get(match[1]) or int(match[1], 8)]), path[1:-1])
