"""The ASGI application inside a span."""

from __future__ import annotations

import time

from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.generation import Generation
from server.tracing.attributes import outcome_attributes, phases, request_attributes

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class _HeaderGetter(Getter[Headers]):
    """Reads a request's headers."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        """All values of one header."""
        return carrier.getlist(key) or None

    def keys(self, carrier: Headers) -> list[str]:
        """The names of all headers."""
        return list(carrier.keys())


class TracedApp:
    """Wraps the whole application; makes a span for each request to an endpoint that generates.

    The span belongs to the trace of the request's `traceparent`, or begins one. Its children queue, prefill and decode
    are made at the end, with the times that were measured anyway.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider, model: str) -> None:
        self._app = app
        self._tracer = provider.get_tracer("outrider")
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._headers = _HeaderGetter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        route = next((r for r in OPERATIONS if scope["type"] == "http" and scope["path"].endswith(r)), None)
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        span = self._tracer.start_span(
            f"{OPERATIONS[route]} {self._model}",
            context=self._propagator.extract(headers, getter=self._headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": OPERATIONS[route],
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "http.request.method": "POST",
                "http.route": route,
            },
        )
        status = 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("outrider.request_id", Headers(raw=message["headers"]).get("x-request-id", ""))
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            self._finish(span, status, scope.get("state", {}).get("generation"))

    def _finish(self, span: Span, status: int, generation: Generation | None) -> None:
        now_wall, now = time.time_ns(), time.monotonic()
        if status:
            span.set_attribute("http.response.status_code", status)
        error = str(status) if status >= 500 else ""
        if generation is not None and span.is_recording():
            span.set_attributes({**request_attributes(generation), **outcome_attributes(generation)})
            if any(sequence.finish_reason == "error" for sequence in generation.sequences):
                error = error or "engine_error"
            context = set_span_in_context(span)
            for name, begin, end in phases(generation):
                began, ended = (now_wall - int((now - moment) * 1e9) for moment in (begin, end))
                self._tracer.start_span(name, context=context, start_time=began).end(ended)
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(now_wall)
