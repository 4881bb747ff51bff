"""Training-time test (arXiv 2503.01840): a head is unrolled over its own hidden states, as when it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_draft.batches import TrainingBatch
from tools.train_draft.chain_attention import Past
from tools.train_draft.eagle3_head import Eagle3Head
from tools.train_draft.fused import cross_entropy
from tools.train_draft.mtp_head import MTPHead

Head = Eagle3Head | MTPHead


@dataclass(frozen=True)
class TargetEnds:
    """What the target embeds and scores with, fixed."""

    embedding: Tensor
    """bf16 [V, H]."""
    head: Tensor
    """bf16 [Vd, H], the rows of the draft vocabulary."""


@dataclass(frozen=True)
class Unrolled:
    """What came of one batch."""

    loss: Tensor
    accepted: list[int]
    """By step, when the head is not in training: anchors whose draft and all before it foresaw the text."""
    anchors: list[int]
    """Of how many."""


def unroll(head: Head, batch: TrainingBatch, ends: TargetEnds, weights: Sequence[float]) -> Unrolled:
    """Run `len(weights)` steps and compare with the target.

    The loss is the cross-entropy to the target's distribution among the draft vocabulary. Step s counts `weights[s]`.
    """
    past = Past()
    window = batch.window()
    hidden = head.begin(batch)
    tokens = batch.tokens
    teacher, place = _teacher(batch, ends)
    losses, accepted, anchors = [], [0] * len(weights), [0] * len(weights)
    alive = torch.ones_like(window.positions, dtype=torch.bool)
    for step, weight in enumerate(weights):
        following = F.pad(tokens[:, step + 1 :], (0, step + 1))
        embedded = F.embedding(following if step == 0 else window.of(following), ends.embedding)
        output, hidden = head.step(hidden, embedded, window, step, past)
        b, w = batch.rows(step)
        a = window.positions[b, w]
        logits = head.logits(output[b, w])
        losses.append(weight * cross_entropy(logits, teacher[place[b, a + step + 1]]))
        if not head.training:
            alive[b, w] &= head.vocab[logits.argmax(-1)] == tokens[b, a + step + 2]
            accepted[step], anchors[step] = int(alive[b, w].sum()), len(b)
    return Unrolled(torch.stack(losses).sum(), accepted, anchors)


@torch.no_grad()
def _teacher(batch: TrainingBatch, ends: TargetEnds) -> tuple[Tensor, Tensor]:
    """The target's probabilities of draft tokens, [R, Vd] in bf16, and each position's row of them, [B, L]."""
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    inside = (at >= batch.first[:, None]) & (at < batch.lengths[:, None] - 1)
    place = inside.flatten().cumsum(0).view(inside.shape) - 1
    chosen = F.linear(batch.final[inside], ends.head)
    return chosen.softmax(-1), place
