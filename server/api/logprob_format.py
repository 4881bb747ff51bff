"""Log-probabilities in the shapes of the endpoints. What is not finite becomes null."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from server.api.choice import Token
from server.api.responses import ChatLogprob, ChatLogprobs, LegacyLogprobs, PromptLogprob, PromptLogprobs, TopLogprob
from server.checkpoint.token_bytes import TokenBytes
from server.messages import TokenLogprobs


def legacy_logprobs(tokens: Sequence[Token], top: int, token_bytes: TokenBytes) -> LegacyLogprobs:
    """`top_logprobs` holds the `top` most probable tokens and always the one that stands there.

    Keys are the tokens' own texts, or their bytes where they are no text, so that two tokens seldom share one.
    """
    return LegacyLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens],
        top_logprobs=[
            None if token.logprobs is None else _alternatives(token.token_id, token.logprobs, top, token_bytes)
            for token in tokens
        ],
        text_offset=[token.offset for token in tokens],
    )


def chat_logprobs(tokens: Iterable[Token], top: int, token_bytes: TokenBytes) -> ChatLogprobs:
    """One entry per token, with `top` alternatives."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=token_bytes.text(token.token_id),
                logprob=_finite(token.logprobs.logprob),
                bytes=list(token.data),
                top_logprobs=[
                    TopLogprob(token_bytes.text(top_id), _finite(logprob), list(token_bytes[top_id]))
                    for top_id, logprob in zip(
                        token.logprobs.top_ids[:top], token.logprobs.top_logprobs[:top], strict=True
                    )
                ],
            )
            for token in tokens
            if token.logprobs is not None
        ]
    )


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], top: int, token_bytes: TokenBytes
) -> PromptLogprobs:
    """For each prompt token the `top` most probable tokens and the one that stands there, by id."""
    result: PromptLogprobs = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            result.append(None)
            continue
        position = {
            str(top_id): PromptLogprob(_finite(logprob), rank, token_bytes.text(top_id))
            for rank, (top_id, logprob) in enumerate(
                zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True), start=1
            )
        }
        position[str(token_id)] = PromptLogprob(_finite(entry.logprob), entry.rank, token_bytes.text(token_id))
        result.append(position)
    return result


def _alternatives(token_id: int, entry: TokenLogprobs, top: int, token_bytes: TokenBytes) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for top_id, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True):
        found.setdefault(token_bytes.label(top_id), _finite(logprob))
    found.setdefault(token_bytes.label(token_id), _finite(entry.logprob))
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
