"""A collector of spans in the test's own process: OTLP over HTTP, protobuf."""

from __future__ import annotations

import gzip
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, with ids as hex and attributes as plain values."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    kind: int
    status: int
    attributes: dict[str, Any]
    service: str


class OTLPReceiver:
    """Listens on a free port."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, message: ExportTraceServiceRequest) -> None:
        """Keep the spans of one export."""
        for resource in message.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    times = (span.start_time_unix_nano, span.end_time_unix_nano)
                    own = (span.kind, span.status.code, _values(span.attributes), service)
                    self.spans.append(ReceivedSpan(span.name, *ids, *times, *own))

    def wait_for(self, count: int) -> list[ReceivedSpan]:
        """The spans, once there are as many."""
        deadline = time.monotonic() + 30
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.spans) >= count, self.spans
        return self.spans

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
