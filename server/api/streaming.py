"""Server-sent events, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Encodes structs as `data:` events."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    def __call__(self, body: msgspec.Struct) -> bytes:
        """One event."""
        return b"data: " + self._encoder.encode(body) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error inside a stream, as one event; `body` is JSON without line breaks."""
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
        self, events: AsyncGenerator[bytes], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
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
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                if not gone:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            raise ClientDisconnect from None
        finally:
            self._close()
