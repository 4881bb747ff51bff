"""How the servers of these tests are started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import openai

from tests.e2e.live_server import LiveServer

KEY = "sk-of-a-test"


@contextlib.contextmanager
def serve(folder: Path, *arguments: str, wait: bool = True) -> Iterator[LiveServer]:
    """A server, ready unless nobody waits for that; gone afterwards."""
    server = LiveServer(folder, *arguments)
    try:
        yield server.ready() if wait else server
    finally:
        server.kill()


def make_client(server: LiveServer, key: str = KEY, retries: int = 0) -> openai.AsyncOpenAI:
    """Of the openai package, for this server alone."""
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=retries)
