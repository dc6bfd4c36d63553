"""What a worker takes over from the process that it was not started by."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

if sys.platform != "linux":
    pytest.skip("workers are forked on Linux alone", allow_module_level=True)

from nemo_gym.server.process_state import ProcessState


@pytest.fixture(autouse=True)
def before() -> Iterator[ProcessState]:
    before = ProcessState.of_this_process()
    yield before
    before.adopt()


def test_a_process_puts_itself_into_the_state_of_another(before: ProcessState) -> None:
    other = replace(
        before,
        umask=0o027,
        blocked_signals=frozenset({signal.SIGUSR2}),
        processors=frozenset({max(before.processors)}),
    )
    other.adopt()
    assert ProcessState.of_this_process() == other
    before.adopt()
    assert ProcessState.of_this_process() == before


def test_what_takes_a_privilege_stays_as_it_is_but_a_user_does_not(before: ProcessState) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            present = ProcessState.of_this_process()
            replace(present, niceness=present.niceness - 5).adopt()
            try:
                replace(present, users=(0, 0, 0)).adopt()
            except PermissionError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
