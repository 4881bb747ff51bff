"""One sequence inside the engine: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from server.engine.sampling.request import RequestSampling
from server.messages import EngineRequest, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow a sequence."""

    token_ids: tuple[int, ...] = ()
    probabilities: Tensor | None = None
    """[k, V], the distribution that each was drawn from; None when each was the proposer's only choice."""

    def cut(self, count: int) -> Draft:
        """Its first tokens."""
        if count >= len(self.token_ids):
            return self
        return Draft(self.token_ids[:count], None if self.probabilities is None else self.probabilities[:count])


NO_DRAFT = Draft()


@dataclass(eq=False)
class Request:
    """State that the scheduler owns; nobody else writes it."""

    source: EngineRequest
    sampling: RequestSampling
    max_len: int
    """Tokens, prompt included, at which the sequence ends with finish reason "length"."""
    tokens: list[int]
    """Prompt and output."""
    output: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the leading full blocks of `tokens`, made when asked for."""
    cached_blocks: int = 0
    """Leading blocks already registered in the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted."""
    first_scheduled: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Collected over the prompt's chunks."""
    draft: Draft = NO_DRAFT
    """Proposed for the next step."""
    draft_computed: int = 0
    """Leading tokens that are in the draft model's own cache, where it keeps one of its own."""
    started: bool = False
    """Whether an output was sent."""
    in_flight: int = 0
    """Steps under way whose tokens are not among `tokens` yet; each makes at least one."""

    @property
    def request_id(self) -> int:
        """The API process's id."""
        return self.source.request_id

    @property
    def params(self) -> SamplingParams:
        """How the sequence is continued."""
        return self.source.params

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.source.prompt_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens not computed yet: the rest of the prompt, or the one just sampled."""
        return len(self.tokens) - self.computed

    def grammatical(self, draft: Draft) -> Draft:
        """The draft up to the first token that the request's grammar forbids: the rest could never be accepted."""
        grammar = self.sampling.grammar
        return draft if grammar is None else draft.cut(grammar.admitted(self.output, draft.token_ids))
