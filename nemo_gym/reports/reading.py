"""The lines of a rollouts file of any origin: what can't be read is told and passed over, not fatal.

`rollouts.io` reads what a collector wrote, strictly, because results are continued from it. A report only shows, and
it is asked for when something is wrong: after a kill, of a half-copied file, of a file that another tool wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.errors import DatasetError

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank.

    Args:
        number: Its place in the file, from 1.
        record: Its JSON object; None where it holds none.
        problem: Why it holds none.
    """

    number: int
    record: dict[str, Any] | None
    problem: str = ""


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a JSONL file that are not blank, one in memory at a time.

    NaN and infinities, which JSON has not but Python writes, become the strings "NaN", "Infinity" and "-Infinity".

    Raises:
        DatasetError: The file can't be read, or its first line is no JSON object: then it is another kind of file.
    """
    try:
        with path.open("rb") as file:
            first = True
            for number, raw in enumerate(file, start=1):
                text = raw.removeprefix(_BOM).strip() if number == 1 else raw.strip()
                if not text:
                    continue
                line = _parse(number, text, cut_off=not raw.endswith(b"\n"))
                if first and line.record is None:
                    raise DatasetError(
                        f"{path}, line {number}: {line.problem}; expected a rollouts file: one JSON object a line, "
                        "as `gym eval run` writes it"
                    )
                first = False
                yield line
    except OSError as error:
        raise DatasetError(f"can't read {path}: {error.strerror}") from error


def _parse(number: int, text: bytes, *, cut_off: bool) -> Line:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            value = json.loads(text, parse_constant=str)
        except (ValueError, RecursionError):
            if text.startswith(_GZIP):
                return Line(number, None, "compressed (unpack it with gunzip)")
            return Line(number, None, "cut off in mid-write" if cut_off else f"invalid JSON ({error.msg})")
    if not isinstance(value, dict):
        return Line(number, None, "JSON that is no object")
    return Line(number, value)
