"""Clients that keep a server busy in the background."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx


class SteadyLoad:
    """`clients` clients, each sending one request after the other until `stop`.

    `make_body(draw)` makes a request's body. `outcomes` counts statuses, and exceptions by name.
    """

    def __init__(self, url: str, make_body: Callable[[random.Random], dict[str, Any]], clients: int = 3) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._make_body = make_body
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(clients)), daemon=True)
        self._thread.start()

    async def _run(self, clients: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, random.Random(seed)) for seed in range(clients)))

    async def _client(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        while not self._over.is_set():
            try:
                answer = await http.post("/v1/completions", json=self._make_body(draw))
                self.outcomes[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                self.outcomes[type(error).__name__] += 1
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    def stop(self) -> Counter[str]:
        """Let the requests under way end."""
        self._over.set()
        self._thread.join(60)
        return self.outcomes
