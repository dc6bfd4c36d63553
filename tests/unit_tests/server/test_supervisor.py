"""The main process of a server whose system refuses it the first workers."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.supervisors.multiprocess import SIGNALS

from nemo_gym.server.supervisor import Supervisor
from nemo_gym.server.template import WorkerTemplate


class Refusing(WorkerTemplate):
    """A template of a system that has no room for another process."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_closed = False

    def fork(self, *_: Any) -> Any:
        self.asked += 1
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def template() -> Iterator[Refusing]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield Refusing()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_server_whose_first_workers_are_refused_has_failed_to_start(
    template: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(Config("app:app", workers=3, log_config=None), [], template)
    with caplog.at_level(logging.ERROR):
        supervisor.run()
    assert supervisor.startup_failed
    assert template.asked == 1
    assert template.is_closed
    assert "A worker could not be started: [Errno 11]" in caplog.text
