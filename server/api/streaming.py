"""Server-sent events, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LINE_ENDS = tuple((character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029")
"""No line ends of SSE, but of Unicode: many clients (httpx among them) would cut an event there."""


class EventEncoder:
    """Encodes structs as `data:` events."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    def __call__(self, body: msgspec.Struct) -> bytes:
        """One event."""
        return _event(self._encoder.encode(body))


def error_event(body: bytes) -> bytes:
    """An error inside a stream, as one event; `body` is JSON without line breaks."""
    return _event(body)


def _event(body: bytes) -> bytes:
    for character, escape in _LINE_ENDS:
        if character in body:
            body = body.replace(character, escape)
    return b"data: " + body + b"\n\n"


@contextlib.asynccontextmanager
async def on_disconnect(receive: Receive, call: Callable[[], None]) -> AsyncIterator[None]:
    """While inside, `call` is called when the client goes away."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call()

    watcher = asyncio.create_task(watch(), name="disconnect-watch")
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends events as they come; `close` is called at the end, whatever the end is."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], None],
        keep_alive: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a comment after each `keep_alive` seconds of silence; 0 is never."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._keep_alive = keep_alive
        self._last_sent = 0.0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head at once, then each event."""
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            self._close()

        try:
            async with contextlib.aclosing(self._events) as events, on_disconnect(receive, leave):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with self._comments(send):
                    async for event in events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                        self._last_sent = time.monotonic()
                if not gone:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            raise ClientDisconnect from None
        finally:
            self._close()

    @contextlib.asynccontextmanager
    async def _comments(self, send: Send) -> AsyncIterator[None]:
        """While inside, silence is broken by comments: proxies close connections on which nothing happens."""

        async def keep_alive() -> None:
            while True:
                silent = time.monotonic() - self._last_sent
                if silent >= self._keep_alive:
                    await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                    self._last_sent = time.monotonic()
                    silent = 0.0
                await asyncio.sleep(self._keep_alive - silent)

        self._last_sent = time.monotonic()
        keeper = asyncio.create_task(keep_alive(), name="sse-keep-alive") if self._keep_alive else None
        try:
            yield
        finally:
            if keeper is not None:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
