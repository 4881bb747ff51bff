"""Head norms, rotation and the scatter into the KV cache, in one kernel over the projections' output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.engine.kernels.runtime import begin, launch, power_of_two, release
from server.engine.kernels.storable import storable

HEADS_A_PROGRAM = 4


@triton.jit
def _rotate(
    qkv: tl.tensor,
    out: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    head_norms: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    CACHED: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program a (token, PER_PROGRAM heads). Products and norms in fp32, rounded once, when stored.

    CACHED: keys and values go into the cache slots, and `out` is [T, HEADS, HEAD_DIM], the queries. Otherwise they
    follow the queries in `out`, [T, HEADS + 2 * KV_HEADS, HEAD_DIM].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    dim = tl.arange(0, DIM_PADDED)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    # The dimension that turns with each one: dimensions 0 and ROTARY_DIM / 2 are a pair, and so on.
    other = tl.where(dim < ROTARY_DIM // 2, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)
    turns = dim < ROTARY_DIM
    other = tl.where(turns, other, dim)
    begin(CHAINED)
    # Only now: attention, which comes next, reads lengths and tables while this kernel runs, and all that is further in
    # front has ended by then.
    release(CHAINED)
    at = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    plain = tl.load(at + dim[None, :], mask=inside, other=0.0)
    x = plain.to(tl.float32)
    partner = tl.load(at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        row = head_norms + tl.where(is_key, HEAD_DIM, 0)[:, None]
        x = x * scale * tl.load(row + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        partner = partner * scale * tl.load(row + other[None, :], mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * ROTARY_DIM + dim, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY_DIM + dim, mask=turns, other=0.0).to(tl.float32)
    turned = x * c[None, :] + partner * s[None, :]
    is_query = head < HEADS
    if CACHED:
        query_at = out + (token * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
        tl.store(query_at, turned.to(out.dtype.element_ty), mask=inside & is_query[:, None])
        slot = tl.load(slots + token)
        stored = inside & (slot >= 0)
        key_at = key_cache + (slot * KV_HEADS + head[:, None] - HEADS) * HEAD_DIM + dim[None, :]
        # Rounded to the model's dtype first, as where keys are rotated apart from the cache.
        rounded = turned.to(out.dtype.element_ty)
        tl.store(key_at, storable(rounded, key_cache), mask=stored & is_key[:, None])
        value_at = value_cache + (slot * KV_HEADS + head[:, None] - HEADS - KV_HEADS) * HEAD_DIM + dim[None, :]
        tl.store(value_at, storable(plain, value_cache), mask=stored & is_value[:, None])
    else:
        out_at = out + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * HEAD_DIM + dim[None, :]
        got = tl.where(is_value[:, None], x if not NORM else plain.to(tl.float32), turned)
        tl.store(out_at, got.to(out.dtype.element_ty), mask=inside)


def rotate_qkv(
    qkv: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Normalise and rotate query and key heads; store keys and values.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim]; rows may have any stride.
        head_norms: [2, head_dim], weights of the norms of query and key heads.
        eps: of the norms.
        cos: contiguous [T, 1, rotary_dim], in the order of `layers.rope.Angles`.
        sin: the same.
        heads: query heads.
        kv_heads: key heads, and value heads.
        cache: one layer's keys and values, contiguous [slots, kv_heads, head_dim], and int64 [T] slots, -1 for a
            token that is not stored; None to get keys and values back.

    Returns:
        [T, heads, head_dim], or without a cache [T, heads + 2 * kv_heads, head_dim].
    """
    total = heads + 2 * kv_heads
    tokens, head_dim = len(qkv), qkv.shape[1] // total
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    out = torch.empty((tokens, heads if cache else total, head_dim), dtype=qkv.dtype, device=qkv.device)
    keys, values, slots = cache or (out, out, out)
    if tokens:
        _rotate[(tokens, triton.cdiv(total, HEADS_A_PROGRAM))](
            qkv,
            out,
            keys,
            values,
            qkv if head_norms is None else head_norms,
            cos,
            sin,
            slots,
            qkv.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            DIM_PADDED=power_of_two(head_dim),
            ROTARY_DIM=cos.shape[-1],
            NORM=head_norms is not None,
            CACHED=cache is not None,
            PER_PROGRAM=HEADS_A_PROGRAM,
            num_warps=2,
            **launch(qkv.device),
        )
    return out
