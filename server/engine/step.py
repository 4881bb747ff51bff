"""A step as data: what the scheduler planned and what the runner made of it."""

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
    """New tokens: a prefill chunk, 1 when decoding, or 1 + k when k drafted tokens are verified."""
    completes: bool
    """Whether all of the sequence's tokens are in the cache after the step, so that its logits give the next one."""
    drafts: tuple[int, ...] = ()
    """The last of the new tokens, assumed and not yet certain."""

    @property
    def end(self) -> int:
        """Tokens in the cache after the step, drafts included."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether a next token is wanted (not for a request that only scores its prompt)."""
        return self.completes and self.end - len(self.drafts) < self.request.max_len

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [*self.request.tokens[self.start : self.end - len(self.drafts)], *self.drafts]


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

    token_ids: tuple[int, ...] = ()
    """The accepted drafts and the token after them; empty for rows that do not sample."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of them, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens that this chunk's logits predict."""
    broken: bool = False
    """Whether the model made NaN or infinity of the row; then nothing else counts."""
    stuck: str | None = None
    """Why no token can follow `token_ids`, which are accepted drafts then; the sequence ends with this error."""

    @property
    def accepted(self) -> int:
        """Leading drafts that the target confirmed."""
        return len(self.token_ids) if self.stuck is not None else max(0, len(self.token_ids) - 1)


@dataclass(frozen=True)
class DraftRow:
    """One request after a step, as a proposer sees it."""

    request: Request
    start: int
    """Position of the first token whose hidden state the step computed."""
    end: int
    """Tokens whose keys and values are right: rejected drafts are not among them."""
    first: int
    """Index of that first token among the step's tokens."""
    limit: int
    """Tokens to draft now; 0 while a prompt is under way, near a limit, or when the request has ended."""

    @property
    def in_prompt(self) -> bool:
        """Whether the step computed tokens of the prompt."""
        return self.start < self.request.num_prompt
