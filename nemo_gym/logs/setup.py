"""What a process does to have a log: one handler at the root of `logging`, and hooks for what nobody catches.

A server process writes to its standard error by the descriptor, each record in one piece: the processes of a server
share a file, and pieces of their lines must not mix. A command writes to `sys.stderr`, which a progress display may
have taken over.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from nemo_gym.logs.lines import Content, Origin, json_line, text_line
from nemo_gym.logs.redaction import Redactor, secrets_of_environment
from nemo_gym.logs.repeats import FIRST_WINDOW_S, RepeatCounter, Repeats

LOGGING_KEY_NAME: Final = "logging"
FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
SETTINGS: Final = ("format", "level", "count_repeats")

_STDERR: Final = 2
_FORMAT_LINE: Final = {"text": text_line, "json": json_line}

logger = logging.getLogger(__name__)


class ProcessHandler(logging.Handler):
    """Writes a process's records: as one line each, without secrets, repeated ones counted.

    Args:
        origin: Which process it is.
        write: Takes a record's text, with its line break.
        form: `text` or `json`.
        redact: Takes secrets out of a text; those that are known by their looks when None.
        repeats: Counts repeated troubles, which are then not written; None to write them all.
    """

    def __init__(
        self,
        origin: Origin,
        write: Callable[[str], None],
        *,
        form: str = "text",
        redact: Redactor | None = None,
        repeats: RepeatCounter | None = None,
    ) -> None:
        super().__init__()
        self.origin = origin
        self._write = write
        self._format_line = _FORMAT_LINE[form]
        self._redact = redact or Redactor()
        self._repeats = repeats
        self._timer: threading.Timer | None = None
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        try:
            self._know_process()
            is_written, told = (True, []) if self._repeats is None else self._repeats.admits(record)
            self._tell(told)
            if is_written:
                self._put(record)
            else:
                self._see_to_timer()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - a log that can't be written breaks nothing else
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in `logging`
        """Leave a record out that can't be written: to a full disk, or a reader that is gone."""

    def close(self) -> None:
        """Say what was counted."""
        self.tell_repeats()
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        super().close()

    def tell_repeats(self) -> None:
        """Say what was counted so far."""
        with self._locked(), contextlib.suppress(Exception):
            self._know_process()
            if self._repeats is not None:
                self._tell(self._repeats.all())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _know_process(self) -> None:
        """In a process that the user's code has forked, leave to its parent what was counted there."""
        if self._process != os.getpid():
            self._process = os.getpid()
            # Its thread is not here.
            self._timer = None
            if self._repeats is not None:
                self._repeats.forget()

    def _put(self, record: logging.LogRecord) -> None:
        self._write(f"{self._format_line(record, self.origin, Content.of(record, self._redact))}\n")

    def _tell(self, told: Iterable[Repeats]) -> None:
        for found in told:
            record = logging.LogRecord(found.logger, found.level, "", 0, found.message, None, None)
            # What is being served just then has nothing to do with it.
            contextvars.Context().run(self._put, record)

    def _see_to_timer(self) -> None:
        """Have what is counted told in time, also when nothing is logged any more."""
        assert self._repeats is not None
        if self._timer is not None:
            return
        wait = self._repeats.next_due_in()
        if wait is None:
            return
        # Another kind, with a shorter window, may come in between.
        timer = threading.Timer(min(wait, FIRST_WINDOW_S), self._tell_due)
        timer.daemon = True
        timer.name = "log-repeats"
        timer.start()
        self._timer = timer

    def _tell_due(self) -> None:
        assert self._repeats is not None
        with self._locked(), contextlib.suppress(Exception):
            self._timer = None
            self._tell(self._repeats.due())
            self._see_to_timer()


def set_up_process_log(server: str, worker: str | None, config: Mapping[str, Any], secrets: Iterable[str]) -> None:
    """Give a server process its log, unless it has that already; what is uncaught goes there, too.

    Handlers that libraries and the user's code have added stay, save those that write to the same place: this log's
    writes instead of them. To be called again where the user's code may have added some.

    Args:
        server: The server instance.
        worker: Which of its processes, where it has several.
        config: The resolved configuration, of which `logging` is read.
        secrets: The secrets in it.
    """
    root = logging.getLogger()
    own = next(iter(_process_handlers()), None)
    if own is None:
        settings = config.get(LOGGING_KEY_NAME) or {}
        own = _handler(Origin(server, worker), _write_to_stderr, settings, secrets)
        root.addHandler(own)
        root.setLevel(_level(settings))
    for log in [root, *root.manager.loggerDict.values()]:
        if isinstance(log, logging.Logger):
            _write_instead(own, log)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_uncaught_in_thread


def name_worker(worker: str) -> None:
    """Have the lines of this process say that they are of this worker."""
    for handler in _process_handlers():
        handler.origin.worker = worker


def end_process_log() -> None:
    """Say what was counted and not told: a process that ends by a signal has no later occasion."""
    for handler in _process_handlers():
        handler.tell_repeats()


@contextmanager
def command_log(config: Mapping[str, Any], secrets: Iterable[str]) -> Iterator[None]:
    """Have a command's own warnings and errors written as the servers' are, within the block.

    Args:
        config: The resolved configuration, of which `logging` is read.
        secrets: The secrets in it.
    """
    settings = config.get(LOGGING_KEY_NAME) or {}
    handler = _handler(Origin("gym"), _write_to_terminal, settings, secrets)
    # What a command does it shows by itself.
    handler.setLevel(max(_level(settings), logging.WARNING))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _handler(
    origin: Origin, write: Callable[[str], None], settings: Mapping[str, Any], secrets: Iterable[str]
) -> ProcessHandler:
    redact = Redactor({*secrets, *secrets_of_environment()})
    repeats = None if settings.get("count_repeats") is False else RepeatCounter(redact)
    return ProcessHandler(origin, write, form=settings.get("format") or FORMATS[0], redact=redact, repeats=repeats)


def _level(settings: Mapping[str, Any]) -> int:
    return logging.getLevelNamesMapping()[(settings.get("level") or "info").upper()]


def _process_handlers() -> list[ProcessHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, ProcessHandler)]


def _write_instead(own: ProcessHandler, log: logging.Logger) -> None:
    """Have a logger's records written by `own` alone, where they went to the same place without it."""
    for handler in [it for it in log.handlers if it is not own and _writes_to_terminal(it)]:
        log.removeHandler(handler)
        if not log.propagate:
            log.addHandler(own)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    if isinstance(handler, ProcessHandler):
        return True
    # A subclass is something else, and its owner's.
    return type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.stdout)


def _write_to_stderr(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(_STDERR, data) :]


def _write_to_terminal(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        logger.warning("Interrupted")
    else:
        logger.critical("This process ends by an exception", exc_info=(kind, error, trace))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    if found.exc_value is not None:
        about = found.err_msg or "Exception ignored in"
        exc_info = (found.exc_type, found.exc_value, found.exc_traceback)
        logger.error("%s: %r", about, found.object, exc_info=exc_info)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        logger.error(
            "The thread %s ends by an exception", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
        )
