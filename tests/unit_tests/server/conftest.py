"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nemo_gym.server.client import close_client


@pytest.fixture
async def closed_client() -> AsyncIterator[None]:
    yield
    await close_client()
