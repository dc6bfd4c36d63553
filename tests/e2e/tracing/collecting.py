"""A collector that takes OTLP over HTTP, and keeps the spans it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """One span, with what the tests look at."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What has come in.

    Attributes:
        url: Where it listens.
        spans: The spans.
        bodies: What was sent, as it was.
    """

    url: str
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        """Take one export request."""
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (it.value.string_value for it in resource.resource.attributes if it.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {it.key: it.value.string_value or it.value.int_value for it in span.attributes}
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    self.spans.append(Span(service, span.name, *ids, span.status.code == 2, values))


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield collector
        server.shutdown()
        thread.join()
