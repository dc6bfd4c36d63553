"""Fixtures of the session routing tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.session_routing import create_socket_dir, remove_socket_dir
from nemo_gym.session_routing.forwarding import HopName
from tests.session_workers import UnderTest, Worker, running_workers


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    path = create_socket_dir()
    yield path
    remove_socket_dir(path)


@pytest.fixture(scope="module", params=["frames", "aiohttp"])
def hop(request: pytest.FixtureRequest) -> Iterator[HopName]:
    """Each way in which requests are forwarded, for the modules that go through it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnderTest, "hop", request.param)
        yield request.param


@pytest.fixture(scope="module")
async def pair(hop: HopName) -> AsyncIterator[tuple[Worker, Worker]]:
    """The worker that receives and the worker that owns, for tests that need no routes of their own."""
    path = create_socket_dir()
    async with running_workers(path, limit=120) as (here, there):
        yield here, there
    remove_socket_dir(path)
