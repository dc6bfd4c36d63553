"""A logger whose lines can be read back."""

from __future__ import annotations

import logging
from typing import Any

from nemo_gym.logs.lines import Origin
from nemo_gym.logs.setup import ProcessHandler


class Written:
    """A logger of its own with the handler that processes have, and what it has written.

    Args:
        form: `text` or `json`.
        **settings: Further ones of the handler.
    """

    def __init__(self, form: str = "text", **settings: Any) -> None:
        self.texts: list[str] = []
        self.handler = ProcessHandler(Origin("counter", "w1"), self.texts.append, form=form, **settings)
        # Of its own, with no parent and no name in the process.
        self.logger = logging.Logger("nemo_gym.test")  # noqa: LOG001
        self.logger.addHandler(self.handler)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def lines(self) -> list[str]:
        # At line feeds alone, as a file is read.
        return self.text.split("\n")[:-1]
