"""Turning tracing on, and off at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from server.errors import UserError


@dataclass(frozen=True)
class Traced:
    """An application whose requests leave spans."""

    app: ASGIApp
    close: Callable[[], None]
    """Send what is left; blocks, some seconds when the collector does not answer."""


def traced(app: ASGIApp, endpoint: str, model: str, version: str) -> Traced:
    """Wrap `app` so that each request's span goes to the collector at `endpoint`.

    Raises:
        UserError: the packages of the extra `otel` are not installed.
    """
    try:
        from server.tracing.app import TracedApp
        from server.tracing.export import tracer_provider
    except ModuleNotFoundError as error:
        raise UserError(
            f"--otlp-traces-endpoint: {error.name} is not installed. Run: pip install 'outrider[otel]'"
        ) from None
    provider = tracer_provider(endpoint, version)
    return Traced(TracedApp(app, provider, model), provider.shutdown)
