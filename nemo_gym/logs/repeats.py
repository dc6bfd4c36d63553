"""Repeated troubles are counted, not written thousands of times.

Records of level WARNING and above are alike when they have the same logger, level, message before its arguments are put
in, and type and place of an exception. While alike records keep coming, the first few are written, and then one line a
window says how many more there were. Windows begin with ten seconds and double up to five minutes, and it is over when
one has passed without such a record.

Nothing different is hidden behind it: among alike records each new text is written, numbers and ids aside, up to a
limit per window which the window's line tells. Memory is bounded: what is alike least recently is summed up and
forgotten.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from nemo_gym.logs.lines import message_of, place_of, text_of
from nemo_gym.logs.redaction import beginning_of

WRITTEN_AT_FIRST: Final = 3
"""How many records with the same text are written before they are counted."""

TEXTS_PER_WINDOW: Final = 20
"""How many different texts of alike records are written in a window."""

FIRST_WINDOW_S: Final = 10.0
LONGEST_WINDOW_S: Final = 320.0
_MOST_KINDS: Final = 256
_MOST_TEXTS: Final = 128
_MOST_HIDDEN_TEXTS: Final = 500
_LONGEST_TEXT: Final = 2_000
_LONGEST_KEPT: Final = 16_384
_LONGEST_EXAMPLE: Final = 500
# Ids, addresses, ports, times, counts of four digits and more: not the status of a reply.
_VARYING: Final = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F-]{8,}|\d+[.:]\d+|\d{4,}")


@dataclass(frozen=True, slots=True)
class Repeats:
    """What was counted in a window.

    Attributes:
        logger: The records' logger.
        level: Their level.
        count: How many were not written.
        seconds: In how long.
        texts: How many different texts were among them that were not written at all, or `_MOST_HIDDEN_TEXTS`.
        last: The last one's message and exception.
    """

    logger: str
    level: int
    count: int
    seconds: float
    texts: int
    last: str

    @property
    def message(self) -> str:
        """What the window's line says."""
        more = " or more" if self.texts >= _MOST_HIDDEN_TEXTS else ""
        others = f", with {self.texts}{more} other texts" if self.texts else ""
        return f"{self.count:,} more like this in {self.seconds:.0f} s{others}; the last one: {self.last}"


@dataclass(slots=True)
class _Kind:
    """Alike records: what was counted of them in this window, and which texts are known."""

    logger: str
    level: int
    began: float
    window: float
    seen: int = 0
    hidden: int = 0
    new_texts: int = 0
    hidden_texts: set[int] = field(default_factory=set)
    last: str = ""
    texts: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def ends(self) -> float:
        return self.began + self.window

    def admits(self, text: str) -> bool:
        """Count a record, and tell whether it is written."""
        self.seen += 1
        key = hash(text)
        known = self.texts.pop(key, 0)
        if not known:
            self.new_texts += 1
            if self.new_texts > TEXTS_PER_WINDOW:
                if len(self.hidden_texts) < _MOST_HIDDEN_TEXTS:
                    self.hidden_texts.add(key)
                return False
        self.texts[key] = known + 1
        if len(self.texts) > _MOST_TEXTS:
            self.texts.popitem(last=False)
        return known < WRITTEN_AT_FIRST

    def turn(self, now: float, redact: Callable[[str], str]) -> Repeats | None:
        """Begin the next window; return what was counted in this one."""
        found = None
        if self.hidden:
            seconds = max(1.0, now - self.began)
            # Cut off only then: half of a secret is not recognised.
            last = redact(self.last)[:_LONGEST_EXAMPLE]
            found = Repeats(self.logger, self.level, self.hidden, seconds, len(self.hidden_texts), last)
            self.window = min(2 * self.window, LONGEST_WINDOW_S)
        self.began, self.seen, self.hidden, self.new_texts = now, 0, 0, 0
        self.hidden_texts.clear()
        return found


class RepeatCounter:
    """Decides which records are written, and counts the others. Its user sees to it that one thread at a time calls it.

    Args:
        redact: Takes secrets out of what is kept of a record.
        first_window_s: How long the first window is, in seconds.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        redact: Callable[[str], str] = str,
        *,
        first_window_s: float = FIRST_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redact = redact
        self._first_window_s = first_window_s
        self._clock = clock
        # In the order of their last use.
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def __len__(self) -> int:
        """How many kinds of records are known."""
        return len(self._kinds)

    def admits(self, record: logging.LogRecord) -> tuple[bool, list[Repeats]]:
        """Return whether `record` is written, and what has to be told before it."""
        if record.levelno < logging.WARNING:
            return True, []
        now = self._clock()
        error = record.exc_info[1] if record.exc_info else None
        message = message_of(record)
        text = message if error is None else f"{message}: {type(error).__name__}: {text_of(error)}"
        key = self._key(record, message, error)
        told = []
        kind = self._kinds.get(key)
        if kind is not None and now >= kind.ends:
            told = self._turned(key, kind, now)
            kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(record.name, record.levelno, now, self._first_window_s)
            told += self._forgotten(now)
        self._kinds.move_to_end(key)
        if kind.admits(_told_apart_by(text)):
            return True, told
        kind.hidden += 1
        kind.last = beginning_of(text, _LONGEST_KEPT)
        return False, told

    def due(self) -> list[Repeats]:
        """Return what was counted in windows that are over."""
        now = self._clock()
        over = [(key, kind) for key, kind in self._kinds.items() if now >= kind.ends]
        return [found for key, kind in over for found in self._turned(key, kind, now)]

    def all(self) -> list[Repeats]:
        """Return all that was counted, and begin anew."""
        now = self._clock()
        found = [kind.turn(now, self._redact) for kind in self._kinds.values()]
        self._kinds.clear()
        return [one for one in found if one is not None]

    def forget(self) -> None:
        """Begin anew, and tell nothing: in a forked process all that was counted is another's."""
        self._kinds.clear()

    def next_due_in(self) -> float | None:
        """Return the seconds until there is something to tell; None while there is nothing."""
        ends = [kind.ends for kind in self._kinds.values() if kind.hidden]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _key(self, record: logging.LogRecord, message: str, error: BaseException | None) -> Hashable:
        # A message that was put together by whoever logs it has no arguments: its text without what varies stands in.
        template = str(record.msg) if record.args else _told_apart_by(message)
        place = None if error is None else place_of(error.__traceback__)
        return record.name, record.levelno, hash(template), type(error).__name__, place

    def _turned(self, key: Hashable, kind: _Kind, now: float) -> list[Repeats]:
        was_quiet = not kind.seen
        found = kind.turn(now, self._redact)
        if was_quiet:
            del self._kinds[key]
        return [] if found is None else [found]

    def _forgotten(self, now: float) -> Iterator[Repeats]:
        while len(self._kinds) > _MOST_KINDS:
            _, oldest = self._kinds.popitem(last=False)
            found = oldest.turn(now, self._redact)
            if found is not None:
                yield found


def _told_apart_by(text: str) -> str:
    """Return the two ends of a text, without what varies."""
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT // 2] + text[-_LONGEST_TEXT // 2 :]
    return _VARYING.sub("#", text)
