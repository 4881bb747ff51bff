"""One client connection: what a request's head may hold, and how long a client may let the server wait."""

from __future__ import annotations

import asyncio
import logging
import uuid
from asyncio import TimerHandle
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.api.errors import ApiError

_log = logging.getLogger(__name__)

_LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one connection. Sizes are bytes, times are seconds."""

    url: int = 8 * 1024
    head: int = 64 * 1024
    """Request line and headers together, trailers included."""
    headers: int = 128
    head_seconds: float = 30.0
    """From the opening of a connection, or a request's first byte, to the end of the head."""
    send_seconds: float = 60.0
    """How long a client may read nothing while more waits for it than the operating system buffers."""


class _RefusedError(Exception):
    """Leaves the parser when a head is over a limit."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits; each refusal is an answer in the shape of all errors, then the end of it.

    uvicorn lets heads grow without bound, waits for ever, and keeps what a client does not read until it does.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._refusal: ApiError | None = None
        self._in_head = True
        self._in_body = False
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._send_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request under way that its client is gone."""
        self._stop_head_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; answer what is no HTTP or over a limit."""
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data) if self._in_head else 0
        try:
            self.parser.feed_data(data)
            if self._in_head and self._head_bytes > self._limits.head:
                self._check_head(self._head_bytes)  # one endless header, of which the parser has told nothing yet
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here; the request itself is answered
        except (httptools.HttpParserError, _RefusedError):
            self._refuse(self._refusal or ApiError(400, "This is not a valid HTTP request.", code="invalid_http"))

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        super().on_message_begin()
        self._seen = 0
        if not self._in_head:
            self._begin_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        super().on_url(url)
        if len(self.url) > self._limits.url:
            self._fail(ApiError(414, f"The URL is longer than {self._limits.url} bytes.", code="url_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._seen += len(name) + len(value)
        self._check_head(self._seen)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._in_head = False
        self._in_body = True
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to: it has some time to catch up."""
        super().pause_writing()
        if self._send_timer is None:
            self._expect_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_head(self, size: int) -> None:
        if size > self._limits.head or len(self.headers) >= self._limits.headers:
            self._fail(
                ApiError(
                    431,
                    f"The request's head is larger than {self._limits.head} bytes or {self._limits.headers} headers.",
                    code="head_too_large",
                )
            )

    def _fail(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _head_too_slow(self) -> None:
        if self._head_bytes:
            seconds = self._limits.head_seconds
            self._refuse(ApiError(408, f"The request's head took more than {seconds:g} seconds.", code="too_slow"))
        else:
            self.transport.close()

    def _refuse(self, refusal: ApiError) -> None:
        self._refusal = refusal
        cycle = self.cycle
        if cycle is not None and self._in_body and cycle.response_complete:
            self.transport.close()  # answered without its body; one request gets one answer
            return
        if cycle is not None and not cycle.response_complete:
            if not self._in_body or cycle.response_started or self.pipeline:
                self.transport.abort()  # an answer is under way, to this request or an earlier one
                return
            self.flow.resume_reading()
            cycle.disconnected = True  # whoever reads its body hears no more of it, and may say nothing
            cycle.message_event.set()
        body = refusal.body()
        self.transport.write(
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nx-request-id: {uuid.uuid4().hex}\r\n\r\n"
            "".encode("ascii")
            + body
        )
        # What still comes is read and dropped: closing on unread data would take the answer back.
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _expect_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._limits.send_seconds, self._check_reading, waiting)

    def _check_reading(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() < waited:  # slow, but it reads
            self._expect_reading()
            return
        _log.info("a client read nothing for %g seconds; its connection is closed", self._limits.send_seconds)
        self.transport.abort()
