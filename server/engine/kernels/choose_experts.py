"""The softmax router after its product: probabilities, the k largest, their weights, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import begin, launch, power_of_two, release


@triton.jit
def _softmax_topk(
    logits: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a token; of equal probabilities the first expert wins."""
    release(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PADDED)
    inside = expert < EXPERTS
    begin(CHAINED)
    score = tl.load(logits + token * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.exp(score - tl.max(score, axis=0))
    total = tl.sum(value, axis=0)
    left = tl.where(inside, value, -1.0)
    place = tl.arange(0, TOP_K_PADDED)
    best_ids = tl.zeros([TOP_K_PADDED], tl.int32)
    best = tl.zeros([TOP_K_PADDED], tl.float32)
    for j in tl.static_range(TOP_K):
        winner = tl.argmax(left, axis=0)
        best_ids = tl.where(place == j, winner, best_ids)
        best = tl.where(place == j, tl.max(left, axis=0), best)
        left = tl.where(expert == winner, -1.0, left)
    best = best / (tl.sum(best, axis=0) if RENORMALIZE else total)
    at = token * TOP_K + place
    tl.store(ids + at, best_ids.to(tl.int64), mask=place < TOP_K)
    tl.store(weights + at, best.to(weights.dtype.element_ty), mask=place < TOP_K)


def softmax_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Contiguous [T, experts] -> the k most probable ones' ids int64 [T, k] and probabilities [T, k] in their dtype.

    Args:
        logits: of the router.
        top_k: experts a token goes to.
        renormalize: whether the k probabilities are divided by their sum.
    """
    tokens, experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=logits.dtype, device=logits.device)
    if tokens:
        _softmax_topk[(tokens,)](
            logits,
            ids,
            weights,
            EXPERTS=experts,
            EXPERTS_PADDED=power_of_two(experts),
            TOP_K=top_k,
            TOP_K_PADDED=power_of_two(top_k),
            RENORMALIZE=renormalize,
            num_warps=1,
            **launch(logits.device),
        )
    return ids, weights
