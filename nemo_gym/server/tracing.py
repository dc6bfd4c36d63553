"""Traces of rollouts: one trace is a rollout's way through collector, agent, model, resources server and the hop.

Here is only what the code around it needs to know. Without `tracing` in the configuration there is no recorder, no
middleware and no import of OpenTelemetry; with it, `start_tracing` gives each process its recorder, which is in
`nemo_gym.server.otel` and needs the extra `otel`.

A recorder belongs to the process that made it: it has a thread, so it is made after a fork and never before.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

from starlette.applications import Starlette
from starlette.types import ASGIApp, Scope

from nemo_gym.configuration.observability import TRACING_KEY_NAME
from nemo_gym.errors import ConfigError, MissingExtraError
from nemo_gym.session_routing import SessionRoutingMiddleware

OTEL_EXTRA: Final = "otel"

_IMPLEMENTATION: Final = "nemo_gym.server.otel"
_DISABLED_ENV: Final = "OTEL_SDK_DISABLED"
_SHORT_ID: Final = 8
_VARIABLES: Final = "OTEL_"


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """What `tracing` in the configuration says.

    Attributes:
        endpoint: Where a collector takes OTLP over HTTP; None for what the `OTEL_EXPORTER_OTLP_*` variables say, and
            else this machine's port 4318.
        sample: The share of rollouts that are traced; None for what `OTEL_TRACES_SAMPLER` says, and else all.
    """

    endpoint: str | None = None
    sample: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the settings in a resolved configuration; None where nothing is to be traced."""
        found = config.get(TRACING_KEY_NAME)
        if found is None or found is False or os.environ.get(_DISABLED_ENV, "").strip().lower() == "true":
            return None
        if found is True:
            return cls()
        if found.get("enabled") is False:
            return None
        return cls(endpoint=found.get("endpoint"), sample=found.get("sample"))


class TracedCall(ABC):
    """A request to another server, while it is under way.

    Attributes:
        headers: What has to be sent with it, so that what the other server does stands below it.
    """

    headers: Mapping[str, str]

    @abstractmethod
    def answered(self, status: int) -> None:
        """Note the status of its reply."""


class TracedRollout(ABC):
    """A rollout, or one attempt at it, while it is under way."""

    @abstractmethod
    def failed(self, failure_class: str) -> None:
        """Mark it as an error; one word says which."""


class Tracing(ABC):
    """Records what a process does for rollouts."""

    @abstractmethod
    def rollout(self, rollout: str, agent: str) -> AbstractContextManager[TracedRollout]:
        """Begin the trace of a rollout; what happens within the block belongs to it."""

    @abstractmethod
    def attempt(self, index: int) -> AbstractContextManager[TracedRollout]:
        """Record an attempt at the rollout that is under way."""

    @abstractmethod
    def call(self, server: str, method: str, path: str) -> AbstractContextManager[TracedCall]:
        """Record a request to another server."""

    @abstractmethod
    def headers(self) -> dict[str, str]:
        """Return what has to be sent with a request, so that what the other server does stands below this."""

    @abstractmethod
    def hop(self, owner: str, scope: Scope) -> AbstractContextManager[object]:
        """Record that a request is forwarded to the worker `owner`, and have `scope` say so to that worker."""

    @abstractmethod
    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with each of its requests recorded; with its lifespan the recorder ends."""

    @abstractmethod
    def name_worker(self, worker: str) -> None:
        """Have what is recorded from here on say which worker this process is."""

    @abstractmethod
    def stop(self) -> None:
        """Send what was recorded, within a limit: a collector that is away holds up nothing for long. Blocks."""


class _Untraced(TracedRollout):
    def failed(self, failure_class: str) -> None:
        pass


class NoTracing:
    """Records no rollouts."""

    _none: Final = nullcontext(_Untraced())

    def rollout(self, rollout: str, agent: str) -> AbstractContextManager[TracedRollout]:
        """As `Tracing.rollout`."""
        return self._none

    def attempt(self, index: int) -> AbstractContextManager[TracedRollout]:
        """As `Tracing.attempt`."""
        return self._none


NO_TRACING: Final = NoTracing()


def start_tracing(config: Mapping[str, Any], service: str) -> Tracing | None:
    """Return this process's recorder; None where the configuration asks for none.

    Args:
        config: The resolved configuration.
        service: What the process's part of a trace is called: the server instance, or the collector.

    Raises:
        ConfigError: A variable of OpenTelemetry has a value that can't be.
        MissingExtraError: The packages of the extra `otel` are missing.
    """
    settings = TracingSettings.of(config)
    if settings is None:
        return None
    try:
        recorder: Tracing = importlib.import_module(_IMPLEMENTATION).OtelTracing(settings, service)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise MissingExtraError(OTEL_EXTRA, f"'{TRACING_KEY_NAME}' in the configuration") from error
    except ValueError as error:  # of the import, too, which reads some of the variables
        # Without their values, for those of headers are secrets.
        found = ", ".join(name for name in sorted(os.environ) if name.startswith(_VARIABLES))
        raise ConfigError(
            f"OpenTelemetry can't take its settings: {error}",
            key=TRACING_KEY_NAME,
            hint=f"Look at the environment variables {found}",
        ) from error
    return recorder


def trace_hops(app: Starlette, tracing: Tracing, worker_id: str | None) -> None:
    """Have the router in front of an application, where there is one, record what it forwards.

    Args:
        app: The application.
        tracing: The recorder.
        worker_id: This worker, where the server has several.
    """
    if worker_id is not None:
        tracing.name_worker(worker_id[:_SHORT_ID])
    routing = getattr(app.state, "session_routing", None)
    if isinstance(routing, SessionRoutingMiddleware):
        routing.observe_hops(tracing.hop)
