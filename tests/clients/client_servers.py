"""How the servers of these tests are started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

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
