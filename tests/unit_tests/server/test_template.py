"""The main process's end of its template, whatever that answers."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.server.template import TemplateGoneError, WorkerTemplate
from nemo_gym.server.worker_env import TemplateEnv

if not hasattr(os, "memfd_create"):
    pytest.skip("workers are forked on Linux alone", allow_module_level=True)


@pytest.fixture
def ends() -> Iterator[tuple[WorkerTemplate, socket.socket]]:
    control, inner = socket.socketpair()
    reading, life = os.pipe()
    # No process has this id.
    template = WorkerTemplate(control, life, 2**31 - 1)
    with inner:
        yield template, inner
    template.close()
    # Who watches it is told.
    assert os.read(reading, 1) == b""
    os.close(reading)


def work(argument: object, descriptors: list[int]) -> None:
    """Stand in for a worker's work."""


def test_a_fork_that_fails_is_an_error_of_the_system_and_leaves_no_descriptor(
    ends: tuple[WorkerTemplate, socket.socket],
) -> None:
    template, inner = ends
    inner.send(struct.pack("qq", 0, errno.EAGAIN))
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(BlockingIOError, match="The template can't fork"):
        template.fork(work, None, [])
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_template_that_has_ended_is_gone(ends: tuple[WorkerTemplate, socket.socket]) -> None:
    template, inner = ends
    inner.close()
    with pytest.raises(TemplateGoneError, match="has ended"):
        template.fork(work, None, [])


def test_a_worker_that_can_t_be_watched_for_want_of_a_descriptor_is_an_error_of_the_system(
    ends: tuple[WorkerTemplate, socket.socket],
) -> None:
    template, inner = ends
    inner.send(struct.pack("qq", 17, 0))
    with pytest.raises(OSError, match="Too many open files"):
        template.fork(work, None, [])


def test_a_template_whose_socket_the_program_has_closed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    monkeypatch.setenv("NEMO_GYM_WORKER_TEMPLATE", "")
    TemplateEnv(process=os.getpid(), control=reading, life=writing, pid=2**31 - 1).leave()
    assert WorkerTemplate.take() is None
