"""The inputs of one forward pass, for whichever model: ids, positions, and where keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import StepMetadata


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one sequence."""

    blocks: list[int]
    start: int
    """Position of the first of them."""
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """The spans of one forward pass as tensors on the device."""

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    step: StepMetadata


def make_batch(spans: Sequence[Span], block_size: int, page_size: int, device: torch.device) -> Batch:
    """Lay spans out one after the other.

    Args:
        spans: at least one, each with at least one token.
        block_size: tokens a block.
        page_size: tokens a kernel page, a divisor of `block_size`; a block's pages follow each other.
        device: where the tensors go.
    """
    lengths = [len(span.token_ids) for span in spans]
    total = sum(lengths)
    ids = np.empty(total, np.int64)
    positions = np.empty(total, np.int64)
    slots = np.empty(total, np.int64)
    seq_lens = [span.start + length for span, length in zip(spans, lengths, strict=True)]
    tables = np.zeros((len(spans), max(-(-end // block_size) for end in seq_lens)), np.int64)
    query_start = [0]
    for i, span in enumerate(spans):
        at, to = query_start[-1], query_start[-1] + lengths[i]
        query_start.append(to)
        used = -(-seq_lens[i] // block_size)
        tables[i, :used] = span.blocks[:used]
        if lengths[i] == 1:
            ids[at], positions[at] = span.token_ids[0], span.start
            slots[at] = span.blocks[span.start // block_size] * block_size + span.start % block_size
        else:
            places = np.arange(span.start, seq_lens[i])
            ids[at:to], positions[at:to] = span.token_ids, places
            slots[at:to] = tables[i, places // block_size] * block_size + places % block_size
    ratio = block_size // page_size
    if ratio > 1:
        tables = (tables[:, :, None] * ratio + np.arange(ratio)).reshape(len(spans), -1)
    step = StepMetadata(query_start, seq_lens, _to(tables, device), _to(slots, device))
    return Batch(_to(ids, device), _to(positions, device), step)


def _to(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
