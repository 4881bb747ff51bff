"""The largest entries of each row, with ties broken by position."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row, descending; of equal ones, that of the lower id comes first.

    `torch.topk` picks freely among equal entries, and equal logits are common in bf16; here the answer is a function
    of the row alone. Only the best blocks of 64 entries are looked into: an entry outside the `count` best blocks has
    at least `count` block maxima before it.

    Args:
        values: [R, V], fp32, without NaN, V < 2**31.
        count: 1 to V.

    Returns:
        Values [R, count] and ids [R, count] int64.
    """
    rows, vocab_size = values.shape
    blocks = -(-vocab_size // _BLOCK)
    if count * 2 >= blocks:
        return _largest(values, torch.arange(vocab_size, device=values.device).expand(rows, -1), count)
    if vocab_size % _BLOCK:
        values = pad(values, (0, blocks * _BLOCK - vocab_size), value=float("-inf"))
    blocked = values.view(rows, blocks, _BLOCK)
    _, best = _largest(blocked.amax(-1), torch.arange(blocks, device=values.device).expand(rows, -1), count)
    inside = torch.arange(_BLOCK, device=values.device)
    ids = (best[:, :, None] * _BLOCK + inside).view(rows, -1)
    members = blocked.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).view(rows, -1)
    return _largest(members, ids, count)


def _largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same for entries that carry their ids, by one integer key per entry that no other entry of its row has."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are one value and must be one key
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    chosen = ((ordered.to(torch.int64) << 32) - ids).topk(count).indices
    return values.gather(1, chosen), ids.gather(1, chosen)
