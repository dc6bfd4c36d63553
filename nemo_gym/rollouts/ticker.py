"""Calls a function every so often on a thread of its own: a terminal or disk that hangs must not stop rollouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_PATIENCE_S: Final = 2.0

logger = logging.getLogger(__name__)


class Ticker:
    """Calls `function` at once, then every `seconds`, and once more at the end.

    Args:
        function: What is called; where it raises, the log says so and it is not called again.
        seconds: Between two calls.
        name: What it is for; the name of the thread.
    """

    def __init__(self, function: Callable[[], None], seconds: float, name: str) -> None:
        self._function = function
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Have the function called for the last time, and wait for that, but not long."""
        self._stopped.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        try:
            self._function()
            while not self._stopped.wait(self._seconds):
                self._function()
            self._function()
        except Exception:  # what is shown or told of a run must not end it
            logger.warning("%s has stopped", self._thread.name, exc_info=True)
