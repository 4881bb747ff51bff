"""What the HTTP side reports to the metrics; `server.metrics` implements it without importing this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from server.messages import FinishReason

RejectionReason = Literal["queue_full", "key_limit", "loading", "draining", "engine_dead", "invalid", "unauthorized"]


@dataclass(frozen=True)
class FinishedSequence:
    """One sequence (one choice of one prompt) that has ended. Times are `time.monotonic()` seconds.

    `first_scheduled` and `first_token` are None when the sequence ended before it got there.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    arrived: float
    finished: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def total_seconds(self) -> float:
        """From the arrival of the request to the end of the sequence."""
        return self.finished - self.arrived

    @property
    def queue_seconds(self) -> float | None:
        """From the arrival to the first step that held the sequence."""
        return None if self.first_scheduled is None else max(0.0, self.first_scheduled - self.arrived)

    @property
    def prefill_seconds(self) -> float | None:
        """From the first step to the first token."""
        if self.first_scheduled is None or self.first_token is None:
            return None
        return max(0.0, self.first_token - self.first_scheduled)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token


class Recorder(Protocol):
    """Called on the event loop, so every method must be quick and must not raise."""

    def prompt_tokens(self, count: int) -> None:
        """A prompt of `count` tokens has been read by the engine (once per prompt, as `usage.prompt_tokens` counts)."""

    def generation_tokens(self, count: int) -> None:
        """`count` more tokens were delivered, after the cut of a stop string: the sum of `usage.completion_tokens`."""

    def time_to_first_token(self, seconds: float) -> None:
        """From the arrival of the request to the first token of one sequence."""

    def token_intervals(self, seconds: float, count: int) -> None:
        """`count` tokens came, each `seconds` after the one before: `count` samples of this value."""

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        """One choice has ended, for whatever reason ("abort": the client went away)."""

    def request_finished(self, longest: int) -> None:
        """All choices of a request have ended, for whatever reason; the longest has so many tokens."""

    def rejected(self, reason: RejectionReason) -> None:
        """A request was refused before it reached the engine."""

    def http_request(self, route: str, method: str, status: int) -> None:
        """An HTTP answer is complete. `route` is a route template or "other", `method` a known method or "other"."""
