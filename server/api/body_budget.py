"""A bound on the memory of all request bodies together, whoever sends them and however slowly."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.body import MAX_BODY_BYTES
from server.api.errors import busy

MAX_OPEN_BYTES = 4 * MAX_BODY_BYTES


class BodyBudget:
    """ASGI middleware that counts the bytes of bodies whose answers have not begun.

    The read that would go over the budget raises `ApiError` 429.
    """

    def __init__(self, app: ASGIApp, most: int = MAX_OPEN_BYTES) -> None:
        self._app = app
        self._most = most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        own = 0

        async def counted_receive() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            if self._open + size > self._most:
                raise busy("The bodies of open requests are too large together; wait until some are answered.")
            self._open += size
            own += size
            return message

        def release() -> None:
            nonlocal own
            self._open -= own
            own = 0

        async def releasing_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                release()
            await send(message)

        try:
            await self._app(scope, counted_receive, releasing_send)
        finally:
            release()
