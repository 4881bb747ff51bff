"""A step as data: what the scheduler planned and what the runner made of it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.request import Request
from server.messages import TokenLogprobs


@dataclass(frozen=True)
class StepRow:
    """One request's share of a step."""

    request: Request
    start: int
    """Position of its first new token."""
    count: int
    """New tokens: a prefill chunk, or 1 when decoding."""
    completes: bool
    """Whether the last new token is the sequence's last, so that its logits give the next one."""

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether a next token is wanted (not for a request that only scores its prompt)."""
        return self.completes and self.end < self.request.max_len


@dataclass(frozen=True)
class BlockCopy:
    """A block to copy before the step writes anything."""

    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """The step."""

    rows: tuple[StepRow, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens over all rows."""
        return sum(row.count for row in self.rows)


@dataclass(frozen=True)
class RowResult:
    """What came of one row."""

    token_id: int | None
    """The sampled token, for rows that sample."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens that this chunk's logits predict."""
