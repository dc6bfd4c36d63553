"""A record as one line, in text or in JSON, and such a line read back.

In text a line is the time, the level, the server and its worker, the process, the session and the rollout where there
are such, the logger, and the message; an exception's type, text and place end it. Its traceback follows, each line
behind `TRACEBACK_MARK`, which no record begins with. In JSON all of it is one object on one line.

Control characters, line breaks among them, are written as escapes: what comes from outside can't break a line, forge
another, or speak to a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from nemo_gym.logs.context import rollout_id, session_id, trace_id

TRACEBACK_MARK: Final = "    | "

_SHORT_ID: Final = 8
_LONGEST_ROLLOUT_ID: Final = 64
_LONGEST_MESSAGE: Final = 8_000
_LONGEST_TRACEBACK: Final = 30_000
_LONGEST_SUMMARY: Final = 500
# Controls, separators of lines, what turns the direction of writing, and halves of surrogate pairs.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NOT_IN_ID: Final = re.compile(r"[^\w.\-:]", re.ASCII)

_LEVELS: Final = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_TEXT_LINE: Final = re.compile(
    rf"^\d{{4}}-\S+ \S+ (?P<level>{_LEVELS}) \S+ \d+ (?:(?:session|rollout)=\S+ )*[^\s:]+: (?P<message>.*)"
)
_JSON_LINE: Final = re.compile(
    rf'^{{"time": "[^"]*", "level": "(?P<level>{_LEVELS})", .*?"message": "(?P<message>(?:[^"\\]|\\.)*)'
    r'(?:", "exception": "(?P<exception>(?:[^"\\]|\\.)*))?'
)


@dataclass(slots=True)
class Origin:
    """Which process writes.

    Attributes:
        server: The server instance; `gym` for a command.
        worker: Which of its processes, where it has several.
    """

    server: str
    worker: str | None = None

    def __str__(self) -> str:
        return self.server if self.worker is None else f"{self.server}/{self.worker}"


@dataclass(frozen=True, slots=True)
class Content:
    """What a record says, without secrets.

    Attributes:
        message: The message.
        summary: Of its exception the type, text and place; None where there is none.
        traceback: The traceback, or the stack; None where there is none.
    """

    message: str
    summary: str | None = None
    traceback: str | None = None

    @classmethod
    def of(cls, record: logging.LogRecord, redact: Callable[[str], str]) -> Content:
        """Return what `record` says."""
        message = _shortened(redact(message_of(record)), _LONGEST_MESSAGE)
        error = record.exc_info[1] if record.exc_info else None
        trace = "".join(traceback.format_exception(error)).rstrip() if error is not None else None
        if record.stack_info:
            trace = record.stack_info if trace is None else f"{trace}\n{record.stack_info}"
        summary = None if error is None else summary_of(error, redact)
        return cls(message, summary, None if trace is None else _shortened(redact(trace), _LONGEST_TRACEBACK))


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line that was read back.

    Attributes:
        level: Its level's name.
        message: Its message, and its exception's summary.
    """

    level: str
    message: str


def text_line(record: logging.LogRecord, origin: Origin, content: Content) -> str:
    """Return `record` as one line of text, and its traceback as further, indented ones, without a line break."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    about = "".join(f"{name}={value} " for name, value in _served().items() if name != "trace")
    told = content.message if content.summary is None else f"{content.message}: {content.summary}"
    name = escaped(record.name).replace(" ", "_") or "root"
    line = (
        f"{when},{int(record.msecs):03d} {record.levelname} {escaped(str(origin))} {record.process} "
        f"{about}{name}: {escaped(told)}"
    )
    if content.traceback is None:
        return line
    # Split at line feeds alone; what else breaks a line is escaped.
    return "\n".join([line, *(f"{TRACEBACK_MARK}{escaped(part)}" for part in content.traceback.split("\n"))])


def json_line(record: logging.LogRecord, origin: Origin, content: Content) -> str:
    """Return `record` as one JSON object in ASCII, without a line break."""
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields: dict[str, Any] = {"time": when, "level": record.levelname, "server": origin.server}
    if origin.worker is not None:
        fields["worker"] = origin.worker
    fields |= {"pid": record.process, **_served(), "logger": record.name, "message": content.message}
    if content.summary is not None:
        fields["exception"] = content.summary
    if content.traceback is not None:
        fields["traceback"] = content.traceback
    return json.dumps(fields)


def read_line(line: str) -> ReadLine | None:
    """Return the level and the message of a line that was written here, in either form; None for any other text.

    Args:
        line: The line; its end may have been cut off.
    """
    if found := _TEXT_LINE.match(line):
        return ReadLine(found["level"], found["message"])
    if found := _JSON_LINE.match(line):
        told = [_unquoted(part) for part in (found["message"], found["exception"]) if part is not None]
        return ReadLine(found["level"], ": ".join(told))
    return None


def message_of(record: logging.LogRecord) -> str:
    """Return the message; where its arguments don't fit it, that is no reason to lose it."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - whatever an argument's own `__str__` raises
        return f"{record.msg!s} (its arguments could not be written: {type(error).__name__})"


def summary_of(error: BaseException, redact: Callable[[str], str]) -> str:
    """Return an exception's type, its text in short, and where it was raised, without secrets."""
    # Cut off only then: half of a secret is not recognised.
    text = redact(text_of(error))
    told = f"{type(error).__name__}: {_shortened(text, _LONGEST_SUMMARY)}" if text else type(error).__name__
    place = place_of(error.__traceback__)
    return f"{told} ({place})" if place else told


def text_of(error: BaseException) -> str:
    """Return an exception's text, empty where it has none."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - whatever another's `__str__` raises
        return f"(its text can't be had: {type(problem).__name__})"


def place_of(trace: TracebackType | None) -> str | None:
    """Return the file, with its folder, and the line at which a traceback ends."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{trace.tb_lineno}"


def escaped(text: str) -> str:
    """Return `text` with its control characters as escapes."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def _served() -> dict[str, str]:
    """Return what is being served, as far as it is known: each value short and without a space."""
    found = {}
    if session := session_id.get():
        found["session"] = _NOT_IN_ID.sub("?", str(session)[:_SHORT_ID])
    if rollout := rollout_id.get():
        found["rollout"] = _NOT_IN_ID.sub("?", rollout[:_LONGEST_ROLLOUT_ID])
    if trace := trace_id.get():
        found["trace"] = trace
    return found


def _unquoted(text: str) -> str:
    """Return what the inside of a JSON string says; as it stands where its end was cut off within an escape."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _shortened(text: str, limit: int) -> str:
    """Return the beginning and the end of a text that is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters left out ... {text[-half:]}"
