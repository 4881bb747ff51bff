"""Where spans go: batched by the SDK in a thread of its own, over OTLP's HTTP."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

EXPORT_SECONDS = 5.0
"""That one export may take, tries included."""


def tracer_provider(endpoint: str, version: str) -> TracerProvider:
    """Make one that exports to `endpoint`; /v1/traces is added to a URL without a path.

    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS are honoured; the
    service is called outrider otherwise, and every request is sampled whose caller did not decide against it.
    """
    resource = {SERVICE_VERSION: version}
    if "OTEL_SERVICE_NAME" not in os.environ:
        resource[SERVICE_NAME] = "outrider"
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)))
    return provider
