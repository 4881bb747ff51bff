"""The final distribution of a row, as integer weights: temperature, min_p, top_k and top_p, in this order.

Integers, because their sums do not depend on the order of addition: a row's nucleus and the token that a random
number picks are the same whatever the batch, the number of threads or the way a device adds up. A weight is
exp((logit - maximum) / temperature) in fp32, in units of 2**-44: a token less probable than that, relative to the
best one, is never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.engine.sampling.ranking import largest

_UNIT = 2.0**44
_WEIGHTLESS = -40.0
"""exp of it is far less than half a unit, so that it becomes 0."""
MAX_VOCAB_SIZE = 2**19 - 1
"""The sum of more weights could leave int64."""

_SORTED_AT_ONCE = 256
"""Tokens a row that are not worth another look before the sort."""


@dataclass(frozen=True)
class Candidates:
    """Per row, tokens and their weights; a token's probability is its weight over the sum of the row's."""

    weights: Tensor
    """[R, C] int64, not negative, each row's sum positive."""
    ids: Tensor | None
    """[R, C] int64; None: column i is token i."""

    def draw(self, uniforms: Tensor | None) -> Tensor:
        """Tokens [R] int64 by inverse transform, for uniforms [R] float64 in [0, 1).

        Where a row has a single candidate, no number is needed, and uniforms may be None.
        """
        if self.ids is not None and self.ids.shape[1] == 1:
            return self.ids.squeeze(1)
        if uniforms is None:
            raise ValueError("a choice among several candidates needs a random number per row")
        sums = self.weights.cumsum(-1)
        # Below the sum even after rounding, since no uniform is above 1 - 2**-53.
        point = (uniforms * sums[:, -1]).to(torch.int64)
        column = torch.searchsorted(sums, point[:, None], right=True)
        return (column if self.ids is None else self.ids.gather(1, column)).squeeze(1)

    def probabilities(self, vocab_size: int) -> Tensor:
        """[R, vocab_size] float64: exactly what `draw` draws from."""
        shares = self.weights / self.weights.sum(-1, keepdim=True).to(torch.float64)
        if self.ids is None:
            return shares
        # Padding columns repeat an id with weight 0, hence the sum.
        return shares.new_zeros(len(shares), vocab_size).scatter_add_(1, self.ids, shares)


@dataclass(frozen=True)
class Shaping:
    """The parameters of R rows, as [R, 1] tensors on the device of the logits."""

    temperature: Tensor
    """fp32, above 0."""
    min_p: Tensor | None
    """fp32; None: no row asks."""
    top_p: Tensor | None
    """float64, 1 is off; None: no row asks."""
    top_k: Tensor | None
    """int64, 1 to V; None: no row asks."""
    limited: bool
    """Whether many logits are -inf; the weights are the same whatever is said here."""


def greedy(logits: Tensor) -> Candidates:
    """All weight on the best token [R, V] (the first of equal ones)."""
    best = logits.max(-1, keepdim=True).indices  # on the CPU several times quicker than argmax
    return Candidates(torch.ones_like(best), best)


def unranked(logits: Tensor, shaping: Shaping) -> Candidates:
    """Temperature and min_p only: no order among the tokens is needed."""
    return Candidates(_weigh(logits, logits.amax(-1, keepdim=True), shaping), None)


def best_k(logits: Tensor, shaping: Shaping, most: int) -> Candidates:
    """Rows that all have a top_k, of at most `most`: exactly top_k tokens, fewer only by min_p and top_p."""
    if shaping.top_k is None:
        raise ValueError("best_k needs top_k")
    values, ids = largest(logits, most)
    weights = _weigh(values, values[:, :1], shaping)
    weights.masked_fill_(torch.arange(most, device=logits.device) >= shaping.top_k, 0)
    if shaping.top_p is not None:
        weights = _shortest_prefix(weights, _needed(weights.sum(-1, keepdim=True), shaping.top_p))
    return Candidates(weights, ids)


def nucleus(logits: Tensor, shaping: Shaping) -> Candidates:
    """Rows that all have a top_p and no top_k."""
    if shaping.top_p is None:
        raise ValueError("nucleus needs top_p")
    weights = _weigh(logits, logits.amax(-1, keepdim=True), shaping)
    total = weights.sum(-1, keepdim=True)
    needed = _needed(total, shaping.top_p)
    if weights.device.type == "cpu":
        weights, ids = _without_tail(weights, total - needed)
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    else:  # the size of the tail is known on the device only, and asking for it would make the host wait
        weights, ids = weights.sort(dim=-1, descending=True, stable=True)
    return Candidates(_shortest_prefix(weights, needed), ids)


def _weigh(logits: Tensor, maximum: Tensor, shaping: Shaping) -> Tensor:
    """Weights [R, C] after temperature and min_p, for logits [R, C] fp32 and their rows' maxima [R, 1].

    A row of nothing but -inf gets its weight on the first column.
    """
    hopeless = maximum == float("-inf")
    scores = logits - maximum.clamp(min=torch.finfo(torch.float32).min)
    scores.div_(shaping.temperature)
    if shaping.limited:
        # What lies below weighs nothing either way, and torch takes ten times as long for exp(-inf).
        scores.clamp_(min=_WEIGHTLESS)
    scores.exp_()
    if shaping.min_p is not None:
        scores.masked_fill_(scores < shaping.min_p, 0)
    weights = scores.mul_(_UNIT).to(torch.int64)
    weights[:, :1] += hopeless
    return weights


def _needed(total: Tensor, top_p: Tensor) -> Tensor:
    """The weight that a nucleus must reach: top_p of the total, rounded up, at least 1, and exactly all for 1."""
    share = torch.minimum((total * top_p).ceil().to(torch.int64), total).clamp(min=1)
    return torch.where(top_p < 1, share, total)


def _shortest_prefix(weights: Tensor, needed: Tensor) -> Tensor:
    """Descending weights [R, C] with all zero after the shortest prefix that weighs at least `needed` [R, 1]."""
    before = weights.cumsum(-1) - weights
    return weights.masked_fill(before >= needed, 0)


def _without_tail(weights: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row that can be in its nucleus: weights [R, C] and ids [R, C], by ascending id, on the CPU.

    Rows are padded with weight 0. `spare` [R, 1] is the part of a row's sum [R, V] that the nucleus can do without.
    C tokens of weight spare / C and less weigh no more than that together, so all of them can go; what is then left
    of spare lets more go from the fewer that remain. In a usual distribution few remain to be sorted.
    """
    ids: Tensor | None = None
    total = weights.sum(-1, keepdim=True)
    while True:
        rows, width = weights.shape
        mask = weights > spare // width
        flat = torch.from_numpy(np.flatnonzero(mask.numpy()))  # torch's nonzero takes several times as long
        row = flat // width
        sizes = torch.bincount(row, minlength=rows)
        column = torch.arange(len(flat)) - (sizes.cumsum(0) - sizes)[row]
        kept = weights.new_zeros(rows, int(sizes.max()))
        kept_ids = torch.zeros_like(kept)
        kept[row, column] = weights.view(-1)[flat]
        kept_ids[row, column] = flat - row * width if ids is None else ids.view(-1)[flat]
        weights, ids = kept, kept_ids
        if weights.shape[1] * 2 > width or weights.shape[1] < _SORTED_AT_ONCE:
            return weights, ids
        left = weights.sum(-1, keepdim=True)
        spare, total = spare - (total - left), left
