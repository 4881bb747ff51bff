"""Clients that note for each request how it ended, so that none is lost unseen."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

RETRY_SECONDS = 0.05


@dataclass
class Ledger:
    """How requests ended. Each is in exactly one of these counts.

    whole: answered as asked. told: ended with an error that the client was told (a status, an event, a refused or
    closed connection before any answer). left: the client went away itself. cut: an answer that just stopped.
    """

    whole: int = 0
    told: Counter[str] = field(default_factory=Counter)
    left: int = 0
    cut: list[str] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    """Of requests that the server took in, as far as their clients know."""


class ChaosClients:
    """Clients in a thread, each sending one request after the other to one of `urls` until `stop`.

    Args:
        urls: servers; a client moves on to the next when it retries.
        seed: of all that is drawn.
        clients: how many at once.
        leaving: chance that a client goes away in the middle.
        retries: whether refusals (503, no connection) are tried again, as the OpenAI clients do.
        vocabulary: token ids of prompts lie below it.
    """

    def __init__(
        self,
        *urls: str,
        seed: int = 0,
        clients: int = 8,
        leaving: float = 0.0,
        retries: bool = False,
        vocabulary: int = 250,
    ) -> None:
        self.ledger = Ledger()
        self._urls = urls
        self._leaving = leaving
        self._retries = retries
        self._vocabulary = vocabulary
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(seed, clients)), daemon=True)
        self._thread.start()

    def stop(self, patience: float = 60) -> Ledger:
        """Let the requests under way end, and tell how all ended."""
        self._over.set()
        self._thread.join(patience)
        assert not self._thread.is_alive(), "a client still waits for an answer"
        return self.ledger

    async def _run(self, seed: int, clients: int) -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, random.Random(seed * 1000 + i), i) for i in range(clients)))

    async def _client(self, http: httpx.AsyncClient, draw: random.Random, number: int) -> None:
        while not self._over.is_set():
            body = {
                "prompt": [draw.randrange(self._vocabulary) for _ in range(draw.choice((1, 16, 60)))],
                "max_tokens": draw.randint(1, 40),
                "n": draw.choice((1, 1, 1, 2)),
                "ignore_eos": True,
                "stream": draw.random() < 0.5,
            }
            leaves = draw.uniform(0, 0.3) if draw.random() < self._leaving else None
            for attempt in range(400):
                url = self._urls[(number + attempt) % len(self._urls)]
                again = await self._once(http, url, body, leaves)
                if again is None:
                    break
                self.ledger.retries[again] += 1
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.ledger.told["gave up"] += 1

    async def _once(self, http: httpx.AsyncClient, url: str, body: dict[str, Any], leaves: float | None) -> str | None:
        """One attempt; what it was refused with when it may be tried again."""
        begun: list[str] = []
        try:
            async with asyncio.timeout(leaves):
                refused = await self._ask(http, url, body, begun)
        except TimeoutError:
            self.ledger.left += 1
            return None
        except httpx.TransportError as error:
            refused = type(error).__name__
            if begun:
                self.ledger.cut.append(f"{refused} after {begun[-1][:80]}")
                return None
        if refused is None or self._retries:
            return refused
        self.ledger.told[refused] += 1
        return None

    async def _ask(self, http: httpx.AsyncClient, url: str, body: dict[str, Any], begun: list[str]) -> str | None:
        async with http.stream("POST", url + "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                return f"{answer.status_code} {error['code']}"
            self.ledger.sequences += body["n"]
            begun.append("head")
            if not body["stream"]:
                choices = json.loads(await answer.aread())["choices"]
                assert [choice["finish_reason"] for choice in choices] == ["length"] * body["n"]
            else:
                begun += [line async for line in answer.aiter_lines() if line]
                if begun[-1] != "data: [DONE]":
                    self.ledger.cut.append(f"ended after {begun[-1][:80]}")
                    return None
                last = json.loads(begun[-2].removeprefix("data: "))
                if "error" in last:
                    self.ledger.told[f"event {last['error']['code']}"] += 1
                    return None
        self.ledger.whole += 1
        return None
