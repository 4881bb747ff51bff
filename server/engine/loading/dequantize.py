"""GGUF block formats to numbers: the formulas of ggml, on whole tensors at once.

Each function takes blocks as uint8 [n, block_bytes] and returns float32 [n, block_size]. The order of operations is
that of gguf-py's reference, so that results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from server.checkpoint.gguf_types import GGUF_TYPES

_BLOCK = {kind.name: kind for kind in GGUF_TYPES.values()}


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Return the numbers in `data`: uint8 [any multiple of the block's bytes] to float32 [elements].

    Args:
        data: whole blocks, contiguous.
        type_name: one of `server.checkpoint.gguf_types.LOADABLE_TYPES`.
    """
    return DEQUANTIZERS[type_name](blocks_of(data, type_name)).view(-1)


def blocks_of(data: Tensor, type_name: str) -> Tensor:
    """uint8 [any multiple of the block's bytes] as [n, block_bytes]."""
    return data.view(-1, _BLOCK[type_name].block_bytes)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles, then high ones: uint8 [..., b] to uint8 [..., 2b]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the 8 groups of each Q4_K block, float32 [n, 8] each; minimums are subtracted."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return _half(blocks, 0) * scale.float(), _half(blocks, 2) * minimum.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = q4_k_scales(blocks)
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32).float()
    return values.mul_(scales.unsqueeze(2)).sub_(minimums.unsqueeze(2)).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    # Two halves of 128 elements, each four runs of 32: run k takes nibble k // 2 of ql and bits 2k, 2k+1 of qh.
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    packed_high = blocks[:, 128:192].view(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (packed_high >> shifts) & 3
    values = (low | (high << 4)).float().sub_(32).view(-1, 16, 16)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return values.mul_(scales.unsqueeze(2)).view(-1, 256)


DEQUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
