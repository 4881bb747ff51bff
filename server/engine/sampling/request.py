"""What the sampler keeps of one request, and one row of a sampling batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.engine.sampling.counts import Occurrences, TokenCounts
from server.engine.sampling.grammar import GrammarError, GrammarState, Mask, mask_of, remove
from server.messages import SamplingParams

GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: scores differ by less than their own rounding long before."""
BAN_AT = -100.0
"""A `logit_bias` of this or less bans the token; any other is added, as the OpenAI API documents."""


class RequestSampling:
    """One request's sampling parameters, made ready once, and its token counts.

    Ids outside the vocabulary are left aside: a model's EOS ids may hold some that its embedding lacks.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ) -> None:
        """Prepare.

        Args:
            params: validated parameters.
            prompt_token_ids: the prompt, for the repetition penalty.
            vocab_size: ids below it can be sampled.
            grammar: where the request stands in its grammar, if it has one.

        Raises:
            ValueError: `allowed_token_ids` holds no id of the vocabulary.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.greedy = params.temperature < GREEDY_BELOW
        self.allowed = _distinct(params.allowed_token_ids, vocab_size) if params.allowed_token_ids is not None else None
        if self.allowed is not None and len(self.allowed) == 0:
            raise ValueError(
                f"allowed_token_ids holds no id of the vocabulary (0 to {vocab_size - 1}): {params.allowed_token_ids}"
            )
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        added = {token: value for token, value in bias.items() if value > BAN_AT and value != 0}
        self.bias_ids = np.array(list(added), dtype=np.int64)
        self.bias_values = np.array(list(added.values()), dtype=np.float32)
        words = {word for word in params.bad_words if word and 0 <= word[-1] < vocab_size}
        self._phrases = tuple(word for word in words if len(word) > 1)
        self._banned = frozenset(word[0] for word in words if len(word) == 1)
        self._banned |= frozenset(token for token, value in bias.items() if value <= BAN_AT)
        self._stops = frozenset(_distinct(params.stop_token_ids, vocab_size).tolist())
        self._stops_banned_until = params.min_tokens if self._stops else 0
        self._counts: TokenCounts | None = None
        repeats = params.repetition_penalty != 1
        if repeats or params.presence_penalty or params.frequency_penalty:
            self._counts = TokenCounts(_distinct(prompt_token_ids if repeats else (), vocab_size), vocab_size)
        self.grammar = grammar
        self._unbanned: Mask | None = None
        if grammar is not None and (self.allowed is not None or self._banned):
            choices = np.arange(vocab_size) if self.allowed is None else self.allowed
            self._unbanned = mask_of(choices[~np.isin(choices, list(self._banned))], vocab_size)
        self._always_edited = bool(
            self.allowed is not None or added or self._banned or self._phrases or self._counts or grammar
        )

    @property
    def penalised(self) -> bool:
        """Whether any of the three penalties is on."""
        return self._counts is not None

    def edited(self, position: int) -> bool:
        """Whether any processor changes this request's logits at the output position."""
        return self._always_edited or position < self._stops_banned_until

    def banned(self, output: Sequence[int], draft: Sequence[int] = ()) -> frozenset[int]:
        """Ids that must not follow `output` and `draft`, apart from those that `allowed_token_ids` leaves out.

        If these and `allowed_token_ids` together left no token, `allowed_token_ids` alone holds, and without it
        nothing is banned: a contradiction must not become an impossible distribution.
        """
        position = len(output) + len(draft)
        banned = self._banned | self._phrase_ends(output, draft)
        if position < self._stops_banned_until:
            banned = banned | self._stops
        choices = self.vocab_size if self.allowed is None else len(self.allowed)
        if len(banned) >= choices and (self.allowed is None or banned.issuperset(self.allowed.tolist())):
            return frozenset()
        return banned

    def mask(self, output: Sequence[int], draft: Sequence[int] = ()) -> Mask | None:
        """Ids that may follow `output` and `draft`: what the grammar and every ban leave; None without a grammar.

        Where nothing but a stop id is left below `min_tokens`, it may come: the grammar's end is the answer's end.

        Raises:
            GrammarError: nothing is left.
        """
        if self.grammar is None:
            return None
        words = self.grammar.mask(output, draft)
        if self._unbanned is not None:
            words &= self._unbanned
        remove(words, self._phrase_ends(output, draft))
        if len(output) + len(draft) < self._stops_banned_until:
            lenient = words.copy()
            remove(words, self._stops)
            words = words if words.any() else lenient
        if not words.any():
            raise GrammarError(
                "No token is left to choose: the grammar of this request forbids every one that allowed_token_ids, "
                "logit_bias, bad_words and ignore_eos allow."
            )
        return words

    def _phrase_ends(self, output: Sequence[int], draft: Sequence[int]) -> frozenset[int]:
        """Last tokens of the `bad_words` of several tokens whose others were just generated."""
        if not self._phrases:
            return frozenset()
        longest = max(map(len, self._phrases)) - 1
        tail = (*output[max(0, len(output) - longest) :], *draft)
        return frozenset(word[-1] for word in self._phrases if tail[-len(word) + 1 :] == word[:-1])

    def occurrences(self, output: Sequence[int], draft: Sequence[int] = ()) -> Occurrences:
        """Token counts after exactly `output` and `draft`; only for a penalised request."""
        if self._counts is None:
            raise ValueError("this request has no penalty, so its tokens are not counted")
        return self._counts.follow(output, draft)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One position to sample: the request and the tokens it generated before that position."""

    request: RequestSampling
    output: Sequence[int]
    draft: Sequence[int] = ()
    """Tokens assumed after `output`, not yet certain. The same as appending them to `output`, without the copy."""
    mask: Mask | None = None
    """What the request's own `mask` says of this position; it stands for all bans."""

    @property
    def plainly_greedy(self) -> bool:
        """Whether the largest of the logits as they are is all that is wanted."""
        request = self.request
        return request.greedy and request.params.logprobs is None and not request.edited(self.position)

    @property
    def limited(self) -> bool:
        """Whether many tokens are forbidden here."""
        return self.mask is not None or self.request.allowed is not None

    @property
    def position(self) -> int:
        """Number of tokens generated before."""
        return len(self.output) + len(self.draft)


def _distinct(ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids inside the vocabulary, each once, ascending."""
    distinct = np.unique(np.array(ids, dtype=np.int64))
    return distinct[(distinct >= 0) & (distinct < vocab_size)]
