"""The draft vocabulary: the tokens that the target really says most often."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.train_draft.hidden import HiddenStates, Place


def frequent_tokens(
    sequences: Sequence[tuple[HiddenStates, Place]], vocab_size: int, size: int
) -> tuple[Tensor, float]:
    """The most frequent tokens of answers; ids that never occur fill up from the lowest, which BPE made first.

    Args:
        sequences: to count in.
        vocab_size: V.
        size: Vd.

    Returns:
        int64 [Vd], rising, and the share of the answers' tokens among them.
    """
    answers = [states.tokens[place.start + place.prompt : place.start + place.length] for states, place in sequences]
    counts = torch.cat(answers).cpu().bincount(minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size]
    return chosen.sort().values, float(counts[chosen].sum() / counts.sum().clamp(min=1))
