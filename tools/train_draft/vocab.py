"""The draft vocabulary: the tokens that the target really says most often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tools.train_draft.hidden import HiddenFolder, Place


def frequent_tokens(
    sequences: Sequence[tuple[HiddenFolder, Place]], vocab_size: int, size: int
) -> tuple[Tensor, float]:
    """The most frequent tokens of answers; ids that never occur fill up from the lowest, which BPE made first.

    Args:
        sequences: to count in.
        vocab_size: V.
        size: Vd.

    Returns:
        int64 [Vd], rising, and the share of the answers' tokens among them.
    """
    counts = np.zeros(vocab_size, np.int64)
    for folder, place in sequences:
        answer = folder.tokens[place.start + place.prompt : place.start + place.length]
        counts += np.bincount(answer, minlength=vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen)), float(counts[chosen].sum() / max(1, counts.sum()))
