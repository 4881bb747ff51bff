from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.api.body_budget import BodyBudget
from server.api.errors import ApiError


async def read_all(_: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    """Sends a body in pieces, the next one when told, and keeps what it is answered."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.answered: list[str] = []

    async def receive(self) -> Message:
        piece, more = await self.pieces.get()
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(self, message: Message) -> None:
        self.answered.append(message["type"])


async def test_open_bodies_share_a_budget_and_give_it_back() -> None:
    budget = BodyBudget(read_all, most=100)
    slow, quick = Client(), Client()
    first = asyncio.create_task(budget({"type": "http"}, slow.receive, slow.send))
    slow.pieces.put_nowait((b"x" * 80, True))
    await asyncio.sleep(0)
    quick.pieces.put_nowait((b"x" * 30, False))
    with pytest.raises(ApiError) as refused:
        await budget({"type": "http"}, quick.receive, quick.send)
    assert refused.value.status == 429
    quick.pieces.put_nowait((b"x" * 20, False))
    await budget({"type": "http"}, quick.receive, quick.send)
    slow.pieces.put_nowait((b"", False))
    await first
    for _ in range(3):
        quick.pieces.put_nowait((b"x" * 100, False))
        await budget({"type": "http"}, quick.receive, quick.send)
    assert quick.answered.count("http.response.start") == 4
