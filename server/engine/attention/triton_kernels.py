"""The Triton kernels of paged attention. Import this only where the backend is used: it imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from server.engine.kernels.storable import storable

TILE_FIELDS = tl.constexpr(4)
"""int32 numbers of a tile: its row, its first token, how many queries, the first one's position."""


@triton.jit
def store_kv(
    k: tl.tensor,
    v: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """Scatter each token's key and value into its slot, if it has one (not -1); one program a token.

    k and v are [T, NUM_KV_HEADS, HEAD_DIM] with any strides but the last, which is 1; the caches are contiguous
    [slots, NUM_KV_HEADS, HEAD_DIM].
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    inside = (head < NUM_KV_HEADS) & (dim < HEAD_DIM) & (slot >= 0)
    target = slot * NUM_KV_HEADS * HEAD_DIM + head * HEAD_DIM + dim
    key = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    tl.store(key_cache + target, storable(key, key_cache), mask=inside)
    tl.store(value_cache + target, storable(value, value_cache), mask=inside)


@triton.jit
def slots_of(
    table: tl.tensor, start: tl.tensor, end: tl.tensor, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Cache slots of the keys start … start + BLOCK_N of one row; those from `end` on mean nothing."""
    key = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        # The block lies within one page: one lookup, and addresses that follow each other.
        page = tl.load(table + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        page = tl.load(table + key // PAGE_SIZE, mask=key < end, other=0)
    return page * PAGE_SIZE + key % PAGE_SIZE


# The width of the block tables changes from step to step: specialising on it would compile in the middle of serving.
@triton.jit(do_not_specialize=["table_stride"])
def attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    LONGEST: tl.constexpr,
) -> None:
    """Causal attention of one tile of queries of one row over one KV head; one program a (tile, KV head).

    The M dimension holds (query, query head of the group), so that all heads that share a KV head read it once. Keys
    pass in blocks of BLOCK_N with an online softmax (Milakov and Gimelshein 2018, as in FlashAttention); the block is
    independent of the page, since each key looks its page up.

    q is [T, heads, HEAD_DIM], out the same and contiguous. PAGE_SIZE 0: keys and values are the step's own tokens and
    no row has any context. LONGEST, unless 0, is the end of the longest tile, and every tile passes as many blocks,
    masked: for an interpreter that takes no loop bound from memory (triton 3.6 with numpy 2.4). `scale` includes
    log2(e): the softmax is taken to base 2.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    kv_head = tl.program_id(1)
    row = tl.load(tile).to(tl.int64)
    first_token = tl.load(tile + 1).to(tl.int64)
    count = tl.load(tile + 2)
    first_position = tl.load(tile + 3)

    m = tl.arange(0, BLOCK_M)
    # Rows of M beyond the tile repeat its last query, so that no softmax is empty; they are not stored.
    query = tl.minimum(m // GROUP, count - 1)
    token = first_token + query
    head = kv_head * GROUP + m % GROUP
    position = first_position + query
    dim = tl.arange(0, DIM_PADDED)
    in_dim = dim < HEAD_DIM

    q_at = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    queries = tl.load(q_at, mask=in_dim[None, :], other=0.0).to(COMPUTE)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    end = first_position + count
    for start in range(0, LONGEST if LONGEST else end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Slots beyond the tile are not read: what lies there may be anything, and 0 * NaN is NaN.
        written = key < end
        if PAGE_SIZE:
            slot = slots_of(block_tables + row * table_stride, start, end, PAGE_SIZE, BLOCK_N)
        else:
            slot = first_token - first_position + key
        key_at = keys + slot[None, :] * key_slot_stride + kv_head * key_head_stride + dim[:, None]
        block = tl.load(key_at, mask=in_dim[:, None] & written[None, :], other=0.0).to(COMPUTE)
        scores = tl.dot(queries, block, input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        # Key 0 is in the first block and every query sees it: `top` is finite from then on.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        decay = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        value_at = values + slot[:, None] * value_slot_stride + kv_head * value_head_stride + dim[None, :]
        block = tl.load(value_at, mask=written[:, None] & in_dim[None, :], other=0.0).to(COMPUTE)
        acc = acc * decay[:, None] + tl.dot(weights.to(COMPUTE), block, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        top = new_top

    num_heads = GROUP * tl.num_programs(1)
    out_at = out + (token[:, None] * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
    result = acc / total[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(m < count * GROUP)[:, None] & in_dim[None, :])
