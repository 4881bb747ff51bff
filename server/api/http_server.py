"""uvicorn as this server runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Generator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from server.api.connection import Connection, ConnectionLimits

_IDLE_SECONDS = 75
"""How long an unused connection stays open: longer than proxies keep theirs, which so never send into a closed one."""


class HTTPServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller, which drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture nothing."""
        yield


def http_server(app: ASGIApp, limits: ConnectionLimits, tls: ssl.SSLContext | None = None) -> HTTPServer:
    """A server of `app` that is yet to be started; with `tls` it speaks HTTPS."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Connection, limits=limits)),
        ws="none",
        loop="none",
        log_config=None,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl = tls
    return HTTPServer(config)
