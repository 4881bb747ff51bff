"""The experts of a layer: which kernels compute them, and how they are cut. Both MoE backends of Triton call this."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels import experts_grouped, experts_matvec
from server.engine.kernels.expert_weights import Stack
from server.engine.kernels.runtime import INTERPRETED, launch, power_of_two

SORT_BLOCK = 1024


@dataclass(frozen=True)
class Cut:
    """How a product is cut into programs."""

    tokens: int
    outputs: int
    """Rows of the weight; matrix-vector products keep them, of each half, within one block of fp8 scales."""
    inputs: int
    """Columns that are read at once, at least 32; grouped products keep them within one block of fp8 scales."""
    warps: int
    stages: int
    shares: int = 1
    """Programs that share the tiles of one expert's tokens."""


@dataclass(frozen=True)
class Packed:
    """The experts of one layer."""

    gate_up: Stack
    down: Stack


def experts_forward(x: Tensor, packed: Packed, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts; see `MoEBackend.forward`."""
    if not len(x):
        return torch.empty_like(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    if len(x) <= most_matvec_tokens(packed.gate_up):
        return by_pairs(x, packed, ids, weights)
    return by_groups(x, packed, ids, weights, group_cuts(x, packed, ids))


def most_matvec_tokens(stack: Stack) -> int:
    """Up to how many tokens each pair is computed by itself.

    Beyond it too many experts have several tokens, and their weights would be read several times.
    """
    return {"fp4": 8, "fp8": 2, "fp8_block": 2}.get(stack.kind, 4)


def matvec_cuts(packed: Packed) -> tuple[Cut, Cut]:
    """Of the two products of a pair; measured by `benchmarks/kernels.py --sweep` on an H200."""
    cuts = []
    for stack, outputs, most in ((packed.gate_up, 8, 2048), (packed.down, 4, 1024)):
        cuts.append(Cut(1, outputs, min(max(64, power_of_two(stack.columns)), most), 4, 1))
    return cuts[0], cuts[1]


def group_cuts(x: Tensor, packed: Packed, ids: Tensor) -> tuple[Cut, Cut]:
    """Of the two grouped products, by the pairs that an expert has on average; measured as `matvec_cuts`."""
    each = ids.numel() / len(packed.gate_up.codes)
    if x.dtype == torch.float32:
        cut = Cut(16, 32, 32, 4, 2)
    elif each <= 16:
        cut = Cut(16, 64, 128, 4, 3)
    elif each <= 64:
        cut = Cut(64, 128, 64, 4, 4, shares=4)
    else:
        cut = Cut(128, 256, 64, 8, 3, shares=4)
    if packed.gate_up.kind == "fp8_block":
        # The largest power of two that divides the columns of a block.
        inputs = min(cut.inputs, packed.gate_up.group & -packed.gate_up.group)
        cut = dataclasses.replace(cut, inputs=inputs)
    if packed.gate_up.codes.dtype == torch.uint8 and cut.outputs > 128:
        cut = Cut(128, 128, 64, 8, 3, shares=4)  # unpacking takes registers
    return cut, cut


def by_pairs(x: Tensor, packed: Packed, ids: Tensor, weights: Tensor, cuts: tuple[Cut, Cut] | None = None) -> Tensor:
    """Each (token, expert) pair by itself."""
    up, down = cuts or matvec_cuts(packed)
    pairs, top_k = ids.numel(), ids.shape[1]
    gate_up, last = packed.gate_up, packed.down
    hidden = torch.empty((pairs, gate_up.rows // 2), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), last.rows), dtype=x.dtype, device=x.device)
    experts_matvec.gate_up_pairs[(triton.cdiv(gate_up.rows, up.outputs), pairs)](
        x,
        *parts(gate_up),
        ids,
        hidden,
        x.stride(0),
        TOP_K=top_k,
        **constants(gate_up),
        BLOCK_N=up.outputs,
        BLOCK_K=up.inputs,
        num_warps=up.warps,
        **launch(x.device),
    )
    experts_matvec.down_tokens[(triton.cdiv(last.rows, down.outputs), len(x))](
        hidden,
        *parts(last),
        ids,
        weights,
        out,
        TOP_K=top_k,
        **constants(last),
        BLOCK_N=down.outputs,
        BLOCK_K=down.inputs,
        num_warps=down.warps,
        **launch(x.device),
    )
    return out


def by_groups(x: Tensor, packed: Packed, ids: Tensor, weights: Tensor, cuts: tuple[Cut, Cut]) -> Tensor:
    """The pairs of each expert together."""
    up, down = cuts
    pairs, top_k = ids.numel(), ids.shape[1]
    gate_up, last = packed.gate_up, packed.down
    experts = len(gate_up.codes)
    device = x.device
    sorted_pairs, starts = sort_pairs(ids, experts)
    hidden = torch.empty((pairs, gate_up.rows // 2), dtype=x.dtype, device=device)
    each = torch.empty((pairs, last.rows), dtype=x.dtype, device=device)
    out = torch.empty((len(x), last.rows), dtype=x.dtype, device=device)
    compute = compute_type(x.dtype)
    for cut, stack in ((up, gate_up), (down, last)):
        grid = (triton.cdiv(stack.rows, cut.outputs), experts, cut.shares)
        options: dict[str, Any] = {
            **constants(stack),
            "BLOCK_M": cut.tokens,
            "BLOCK_N": cut.outputs,
            "BLOCK_K": cut.inputs,
            "COMPUTE": compute,
            "LOOPS": triton.cdiv(pairs, cut.tokens) if INTERPRETED else 0,
            "num_warps": cut.warps,
            "num_stages": cut.stages,
            **launch(device),
        }
        if stack is gate_up:
            experts_grouped.gate_up_grouped[grid](
                x, *parts(stack), sorted_pairs, starts, hidden, x.stride(0), TOP_K=top_k, **options
            )
        else:
            experts_grouped.down_grouped[grid](hidden, *parts(stack), sorted_pairs, starts, weights, each, **options)
    columns = 1024
    experts_grouped.add_pairs[(len(x), triton.cdiv(last.rows, columns))](
        each, out, TOP_K=top_k, SIZE=last.rows, COLUMNS=columns, **launch(device)
    )
    return out


def sort_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Expert ids [T, k] -> int32 [T * k] pairs in the order of their experts, int32 [experts + 1] where each begins."""
    sorted_pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    block = min(SORT_BLOCK, max(32, power_of_two(ids.numel())))
    experts_grouped.sort_pairs[(experts,)](
        ids,
        sorted_pairs,
        starts,
        ids.numel(),
        LOOPS=triton.cdiv(ids.numel(), block) if INTERPRETED else 0,
        BLOCK=block,
        **launch(ids.device),
    )
    return sorted_pairs, starts


def parts(stack: Stack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, fine scales, shifts and coarse scales; a kernel that does not read one gets the codes."""
    codes = stack.codes
    return (
        codes,
        codes if stack.fine is None else stack.fine,
        codes if stack.shifts is None else stack.shifts,
        codes if stack.coarse is None else stack.coarse,
    )


def constants(stack: Stack) -> dict[str, Any]:
    """What the kernels know of a weight when they are compiled."""
    half_blocks = 0
    if stack.block_rows:
        assert stack.fine is not None
        half_blocks = stack.fine.shape[2]
    return {
        "IN": stack.columns,
        "OUT": stack.rows,
        "KIND": stack.kind,
        "GROUP": stack.group,
        "BLOCK_ROWS": stack.block_rows,
        "HALF_BLOCKS": half_blocks,
        "SHIFTED": stack.shifts is not None,
        "COARSE": 0 if stack.coarse is None else stack.coarse.shape[1],
    }


def compute_type(dtype: torch.dtype) -> object:
    """The type of the products' operands."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return tl.float32  # the interpreter's bf16 product reads the bits as integers
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
