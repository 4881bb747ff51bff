"""Clients that stay while a test does something to the server."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import httpx
from live_server import PATIENCE, LiveServer, finish_reasons, parse_event


class Stream(threading.Thread):
    """Reads one streamed answer; started when its first events are there."""

    def __init__(self, server: LiveServer, max_tokens: int, **body: Any) -> None:
        super().__init__(daemon=True)
        self.events: list[Any] = []
        self.ended_at = 0.0
        """time.monotonic() of the last event."""
        self._url = server.url + "/v1/completions"
        self._body = {"prompt": "a", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **body}
        self.start()
        server.wait_for(lambda: len(self.events) > 2)

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError):  # the server may be gone in mid-answer
            self._read()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE * 4, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(parse_event(line))
                    self.ended_at = time.monotonic()

    def end(self) -> list[Any]:
        """Wait for the end and return all events."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the stream never ended"
        return self.events

    @property
    def error(self) -> dict[str, Any]:
        """The error object before [DONE], once it has ended."""
        events = self.end()
        assert events[-1] == "[DONE]", events[-1]
        error: dict[str, Any] = events[-2]["error"]
        return error

    @property
    def finish_reason(self) -> str:
        """The only one of its choice, once it has ended."""
        events = self.end()
        assert events[-1] == "[DONE]", events[-1]
        (reason,) = finish_reasons(events)
        return reason
