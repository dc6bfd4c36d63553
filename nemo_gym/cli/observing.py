"""What a command that runs servers or rollouts does to be seen: its own log lines, and its part of the traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from omegaconf import DictConfig

from nemo_gym.global_config import secrets_in
from nemo_gym.logs import command_log
from nemo_gym.server.tracing import Tracing, start_tracing

COLLECTOR_SERVICE: Final = "collector"


@contextmanager
def observed(config: DictConfig) -> Iterator[Tracing | None]:
    """Have warnings written as the configuration says, and yield what records traces, where it asks for that.

    Raises:
        MissingExtraError: It asks for traces, and the packages are missing.
    """
    tracing = start_tracing(config, COLLECTOR_SERVICE)
    with command_log(config, secrets_in(config)):
        try:
            yield tracing
        finally:
            if tracing is not None:
                tracing.stop()
