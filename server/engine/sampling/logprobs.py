"""Log-probabilities of the model's own distribution, for generated and for prompt tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from server.engine.sampling.ranking import largest
from server.messages import TokenLogprobs

LOWEST = -9999.0
"""Stands for a log-probability of -inf, which JSON cannot carry; no finite one is lower."""
_CHUNK = 2**21
"""fp32 values at a time: 8 MiB, so that a long prompt takes no more memory than a short one."""


def token_logprobs(logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
    """Log-softmax of raw logits at the tokens that stand there, with ranks and the best alternatives.

    Args:
        logits: [R, V], any float dtype, before penalties and temperature.
        token_ids: R ids below V.
        top: alternatives per row, best first, of equal ones the lower id first; 0 for none, at most V are given.

    Returns:
        R entries, every number finite (`LOWEST` at least). A rank is 1 plus the tokens that come before in that order.
    """
    rows, vocab_size = logits.shape
    step = max(1, _CHUNK // vocab_size)
    answers = []
    for start in range(0, rows, step):
        part = logits[start : start + step]
        answers += _score(part, token_ids[start : start + step], min(top, vocab_size))
    return answers


def _score(logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
    scores = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = scores.gather(1, ids)
    before = (scores > own).sum(-1)
    before += ((scores == own) & (torch.arange(scores.shape[1], device=logits.device) < ids)).sum(-1)
    best, best_ids = largest(scores, top) if top else (scores[:, :0], ids[:, :0])
    return [
        TokenLogprobs(logprob, rank + 1, top_ids, top_logprobs)
        for logprob, rank, top_ids, top_logprobs in zip(
            _finite(own).squeeze(1).tolist(), before.tolist(), best_ids.tolist(), _finite(best).tolist(), strict=True
        )
    ]


def _finite(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=LOWEST, neginf=LOWEST).clamp(min=LOWEST)
