"""From checked request fields to the complete parameters that the engine takes."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TypeVar

from server.api.errors import ApiError, invalid
from server.api.generation_defaults import GenerationDefaults
from server.api.schemas.sampling import SamplingFields
from server.api.tokenising import TextCodec
from server.messages import Grammar, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class TokenLimit:
    """How many tokens a request may generate: what it asked for, by which field, and the default."""

    asked: int | None
    param: str
    default: int | None
    """None: all that the context has left."""

    def resolve(self, prompt_tokens: int, max_model_len: int, prompt_param: str) -> int:
        """Tokens to generate after this prompt. Raises `ApiError` 400 that names the numbers."""
        left = max_model_len - prompt_tokens
        if self.asked is not None and self.asked <= left:
            return self.asked
        if self.asked is None and left >= 1:
            return left if self.default is None else min(self.default, left)
        asked = 1 if self.asked is None else self.asked
        raise ApiError(
            400,
            f"The prompt has {prompt_tokens} tokens and {self.param} is {'unset' if self.asked is None else asked}: "
            f"that needs at least {prompt_tokens + asked} tokens, but the context length of this model is "
            f"{max_model_len}. Shorten the prompt or lower {self.param}.",
            param=prompt_param if left < 1 else self.param,
            code="context_length_exceeded",
            rejection="invalid",
        )


def check_token_fields(fields: SamplingFields, codec: TextCodec) -> None:
    """Every token id that the request names must lie inside the vocabulary. Raises `ApiError` 400."""
    codec.check_ids(list(fields.logit_bias), "logit_bias")
    codec.check_ids(fields.stop_token_ids, "stop_token_ids")
    codec.check_ids(fields.allowed_token_ids or [], "allowed_token_ids")


def build_sampling_params(
    fields: SamplingFields,
    defaults: GenerationDefaults,
    *,
    codec: TextCodec,
    bad_words: tuple[tuple[int, ...], ...],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """All but `max_tokens` and `seed`, which differ by sequence (0 here). An explicit value wins over the model's."""
    eos = () if fields.ignore_eos else codec.files.eos_token_ids
    top_k = _given(fields.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=0,
        seed=0,
        min_tokens=fields.min_tokens,
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=0 if top_k >= codec.vocab_size else top_k,
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=fields.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=None if fields.allowed_token_ids is None else tuple(dict.fromkeys(fields.allowed_token_ids)),
        stop_token_ids=tuple(dict.fromkeys((*eos, *fields.stop_token_ids))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        most_drafted=_most_drafted(fields),
        grammar=grammar,
    )


def _most_drafted(fields: SamplingFields) -> int | None:
    if not fields.speculative_decoding:
        return 0
    return None if fields.speculative is None else fields.speculative.num_speculative_tokens


def check_draft_length(fields: SamplingFields, server_most: int) -> None:
    """Raise `ApiError` 400 when a request wants longer drafts than the server makes."""
    if fields.speculative is not None and fields.speculative.num_speculative_tokens > server_most:
        raise invalid(
            f"speculative.num_speculative_tokens: {fields.speculative.num_speculative_tokens} is more than the "
            f"{server_most} tokens that this server drafts at a time; it can only be lowered.",
            param="speculative.num_speculative_tokens",
        )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raise `ApiError` 400 when the least is more than the most."""
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens: {min_tokens} is more than the {max_tokens} tokens allowed.", param="min_tokens")


def choice_seed(seed: int | None, choice: int) -> int:
    """The seed of one of n choices: the request's own for the first, so that it does not depend on n."""
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
