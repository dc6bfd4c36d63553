"""Traces by OpenTelemetry, sent over OTLP/HTTP in batches by a thread of their own.

What the standard variables (`OTEL_EXPORTER_OTLP_*`, `OTEL_BSP_*`, `OTEL_TRACES_SAMPLER`, `OTEL_RESOURCE_ATTRIBUTES`)
say holds where the configuration says nothing else. Spans carry names, ids and statuses: no body, no query, no header
and no exception's text, for any of these may hold what is nobody else's.

Failure policy: what can't be sent is dropped, and the log says so. Nothing waits for the collector, save `stop` for at
most `_STOP_S` seconds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_NAMESPACE, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.logs import rollout_id, session_id, trace_id
from nemo_gym.server.tracing import TracedCall, TracedRollout, Tracing, TracingSettings

ROLLOUT: Final = "nemo_gym.rollout"
SESSION: Final = "nemo_gym.session"
WORKER: Final = "nemo_gym.worker"
OWNER: Final = "nemo_gym.owner"
AGENT: Final = "nemo_gym.agent"
ATTEMPT: Final = "nemo_gym.attempt"
FAILURE: Final = "nemo_gym.failure"

_METHOD: Final = "http.request.method"
_ROUTE: Final = "http.route"
_PATH: Final = "url.path"
_STATUS: Final = "http.response.status_code"
_PEER: Final = "peer.service"
_ERROR_TYPE: Final = "error.type"

_TRACES_PATH: Final = "/v1/traces"
_DEFAULT_ENDPOINT: Final = "http://localhost:4318"
_TRACEPARENT: Final = b"traceparent"
_TRACE_HEADERS: Final = frozenset({_TRACEPARENT, b"tracestate"})
_UNTRACED_PATHS: Final = frozenset({"/health", "/workers", "/metrics"})
_SHORT_ID: Final = 8
_STOP_S: Final = 5.0
# The library's own 2,048 are what a hundred rollouts make.
_QUEUE: Final = 16_384


class OtelTracing(Tracing):
    """Records spans and sends them; see `Tracing`.

    Args:
        settings: Where to, and how many.
        service: The name of this process's part.
    """

    def __init__(self, settings: TracingSettings, service: str) -> None:
        self._endpoint = _traces_url(settings.endpoint)
        queue = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else _QUEUE
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=self._endpoint), max_queue_size=queue)
        self._provider = TracerProvider(
            resource=Resource.create(
                {
                    SERVICE_NAME: service,
                    SERVICE_NAMESPACE: "nemo_gym",
                    SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}",
                }
            ),
            sampler=_sampler(settings.sample),
            id_generator=_Ids(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("nemo_gym")
        self._propagator = TraceContextTextMapPropagator()
        self._worker: dict[str, str] = {}
        self._is_stopped = False

    def name_worker(self, worker: str) -> None:
        """Have what is recorded from here on say which worker this process is."""
        self._worker = {WORKER: worker}

    @contextmanager
    def rollout(self, rollout: str, agent: str) -> Iterator[TracedRollout]:
        """Begin the trace of a rollout."""
        with self._span("rollout", SpanKind.INTERNAL, {ROLLOUT: rollout, AGENT: agent}) as span:
            yield _Rollout(span)

    @contextmanager
    def attempt(self, index: int) -> Iterator[TracedRollout]:
        """Record an attempt at the rollout that is under way."""
        with self._span("attempt", SpanKind.INTERNAL, {ATTEMPT: index}) as span:
            yield _Rollout(span)

    @contextmanager
    def call(self, server: str, method: str, path: str) -> Iterator[TracedCall]:
        """Record a request to another server, until the head of its reply is there."""
        path = path.partition("?")[0]
        attributes = {_METHOD: method, _PATH: path, _PEER: server, **self._worker}
        with self._span(f"{method} {server}", SpanKind.CLIENT, attributes) as span:
            yield _Call(span, self.headers())

    def headers(self) -> dict[str, str]:
        """Return what has to be sent with a request."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    @contextmanager
    def hop(self, owner: str, scope: Scope) -> Iterator[None]:
        """Record that a request is forwarded, until its reply has been passed on."""
        with self._span("hop", SpanKind.CLIENT, {OWNER: owner[:_SHORT_ID], **self._worker}):
            others = [header for header in scope["headers"] if header[0] not in _TRACE_HEADERS]
            scope["headers"] = [*others, *((name.encode(), value.encode()) for name, value in self.headers().items())]
            yield

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with each of its requests recorded."""
        return _TracingMiddleware(app, self)

    def stop(self) -> None:
        """Send what was recorded, within a limit."""
        if self._is_stopped:
            return
        self._is_stopped = True
        # A thread that does not hold up the process: the library would wait for half a minute.
        stopping = threading.Thread(target=self._send_the_rest, name="stop-tracing", daemon=True)
        stopping.start()
        stopping.join(_STOP_S)

    def _send_the_rest(self) -> None:
        # The library tries again and again where nobody listens.
        if _is_there(self._endpoint):
            self._provider.shutdown()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Record one request."""
        method = scope["method"]
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
                   if name in _TRACE_HEADERS}  # fmt: skip
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        attributes = {_METHOD: method, _PATH: scope["path"], **self._worker}
        parent = self._propagator.extract(carrier)
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            if span.is_recording():
                trace_id.set(trace.format_trace_id(span.get_span_context().trace_id))
            try:
                await app(scope, receive, noting_send)
            finally:
                _describe(span, scope, status)

    @contextmanager
    def _span(self, name: str, kind: SpanKind, attributes: Mapping[str, str | int]) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name, None, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                # The type alone: the text may hold anything.
                span.set_attribute(_ERROR_TYPE, type(error).__name__)
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise


class _TracingMiddleware:
    """Records requests; stands outside all others, a router included."""

    def __init__(self, app: ASGIApp, tracing: OtelTracing) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] == "lifespan":

            async def stopping_send(message: Message) -> None:
                # The process waits for nothing that comes after this message.
                if message["type"].startswith("lifespan.shutdown."):
                    await asyncio.to_thread(self._tracing.stop)
                await send(message)

            await self.app(scope, receive, stopping_send)
        elif scope["type"] != "http" or scope["path"] in _UNTRACED_PATHS:
            await self.app(scope, receive, send)
        else:
            await self._tracing.serve(self.app, scope, receive, send)


class _Call(TracedCall):
    def __init__(self, span: Span, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self._span = span

    def answered(self, status: int) -> None:
        self._span.set_attribute(_STATUS, status)
        if status >= 400:
            self._span.set_status(Status(StatusCode.ERROR, f"status {status}"))


class _Rollout(TracedRollout):
    def __init__(self, span: Span) -> None:
        self._span = span

    def failed(self, failure_class: str) -> None:
        self._span.set_attribute(FAILURE, failure_class)
        self._span.set_status(Status(StatusCode.ERROR, failure_class))


class _Ids(IdGenerator):
    """Ids from the system: environments seed `random`, and each worker would then make the same ones."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1


def _describe(span: Span, scope: Scope, status: int) -> None:
    """Note of a request what is known at its end."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.set_attribute(_ROUTE, route)
        span.update_name(f"{scope['method']} {route}")
    if rollout := rollout_id.get():
        span.set_attribute(ROLLOUT, rollout)
    if session := session_id.get():
        span.set_attribute(SESSION, str(session)[:_SHORT_ID])
    if status:
        span.set_attribute(_STATUS, status)
    # Of what a client has asked wrongly the server is not to blame, but a lost session is.
    if not status or status >= 500 or status == 410:
        span.set_status(Status(StatusCode.ERROR, f"status {status}" if status else "no reply"))


def _traces_url(endpoint: str | None) -> str:
    """Return the address that spans are posted to, as the library finds it where the configuration names none."""
    if endpoint is None:
        whole = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        if whole:
            return whole
        endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINT
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(_TRACES_PATH) else endpoint + _TRACES_PATH


def _is_there(url: str) -> bool:
    """Whether somebody listens at an address; taken for granted where a proxy stands in between."""
    try:
        parts = urlsplit(url)
        if parts.hostname is None or getproxies():
            return True
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname, port), timeout=_STOP_S):
            return True
    except (OSError, ValueError):
        return False


def _sampler(sample: float | None) -> Sampler | None:
    return None if sample is None else ParentBasedTraceIdRatio(sample)
