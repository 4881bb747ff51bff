"""Triton kernels for rows with few new tokens: keys are split over programs, and the parts are merged."""

from __future__ import annotations

import triton
import triton.language as tl

from server.engine.attention.triton_kernels import slots_of
from server.engine.kernels.runtime import begin, fetch, release

ROW_FIELDS = tl.constexpr(3)
"""int32 numbers of a row that is not uniform: its place in the block tables, its first token, its new tokens."""


@triton.jit
def keys_per_part(length: tl.tensor, parts: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Keys of one part of a row: whole blocks, as even as can be."""
    return tl.cdiv(tl.cdiv(length, parts), BLOCK_N) * BLOCK_N


# Numbers that change from step to step: specialising on them would compile in the middle of serving.
@triton.jit(do_not_specialize=["table_stride", "num_tokens", "query_len"])
def attend_part(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    num_tokens: tl.tensor,
    query_len: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    FETCHED: tl.constexpr,
    COMPUTE: tl.constexpr,
    LONGEST_PART: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Causal attention of all new tokens of one row over one part of its keys; one program a (KV head, row, part).

    As `attend`, but lengths are read from device memory. SPLIT: `out` is fp32 [parts, T, heads, HEAD_DIM], each part
    normalised by itself, and `sums` fp32 [parts, T, heads] holds log2 of the part's sum of exponentials, -inf where a
    query sees nothing of it. Otherwise there is one part, and out is [T, heads, HEAD_DIM] in its own dtype.

    LINES cache lines of LINE numbers hold a head; up to FETCHED keys are fetched before the input is there.

    UNIFORM: every row has `query_len` new tokens, and `rows` is not read. A row of length 0 is padding: its output is
    0. LONGEST_PART is for the interpreter, as LONGEST of `attend`.
    """
    release(CHAINED)
    # KV heads first: what lies side by side in the cache is read at the same time.
    kv_head = tl.program_id(0)
    place = tl.program_id(1)
    part = tl.program_id(2)
    num_heads = GROUP * tl.num_programs(0)
    # All kernels but the last one have ended (that is `_rotate`, or one that is not chained): these can be read.
    length = tl.load(lengths + place)
    if UNIFORM:
        row = place.to(tl.int64)
        first_token = row * query_len
        count = query_len
    else:
        row = tl.load(rows + place * ROW_FIELDS).to(tl.int64)
        first_token = tl.load(rows + place * ROW_FIELDS + 1).to(tl.int64)
        count = tl.load(rows + place * ROW_FIELDS + 2)
    size = keys_per_part(length, tl.num_programs(2), BLOCK_N)
    first_key = part * size
    table = block_tables + row * table_stride
    if CHAINED:
        # What earlier steps stored comes nearer while the kernels in front of this one still run.
        line = tl.arange(0, LINES)
        for offset in range(0, tl.minimum(tl.minimum(size, length - first_key), FETCHED), BLOCK_N):
            slot = slots_of(table, first_key + offset, length, PAGE_SIZE, BLOCK_N)
            fetch(keys + slot[:, None] * key_slot_stride + kv_head * key_head_stride + line[None, :] * LINE, CHAINED)
            at = slot[:, None] * value_slot_stride + kv_head * value_head_stride + line[None, :] * LINE
            fetch(values + at, CHAINED)
    begin(CHAINED)
    if (not SPLIT) | (first_key < length):
        end = tl.minimum(first_key + size, length)
        m = tl.arange(0, BLOCK_M)
        # Rows of M beyond the tokens repeat the last one; they are not stored.
        query = tl.minimum(m // GROUP, count - 1)
        token = first_token + query
        head = kv_head * GROUP + m % GROUP
        position = length - count + query
        dim = tl.arange(0, DIM_PADDED)
        in_dim = dim < HEAD_DIM

        q_at = q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
        queries = tl.load(q_at, mask=in_dim[None, :], other=0.0).to(COMPUTE)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
        for offset in range(0, LONGEST_PART if LONGEST_PART else end - first_key, BLOCK_N):
            start = first_key + offset
            key = start + tl.arange(0, BLOCK_N)
            written = key < end
            slot = slots_of(table, start, end, PAGE_SIZE, BLOCK_N)
            key_at = keys + slot[None, :] * key_slot_stride + kv_head * key_head_stride + dim[:, None]
            block = tl.load(key_at, mask=in_dim[:, None] & written[None, :], other=0.0).to(COMPUTE)
            scores = tl.dot(queries, block, input_precision="ieee") * scale
            seen = written[None, :] & (key[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # A query may see nothing of this part: there is no maximum to subtract.
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay = tl.exp2(top - finite)
            weights = tl.exp2(scores - finite[:, None])
            value_at = values + slot[:, None] * value_slot_stride + kv_head * value_head_stride + dim[None, :]
            block = tl.load(value_at, mask=written[:, None] & in_dim[None, :], other=0.0).to(COMPUTE)
            acc = acc * decay[:, None] + tl.dot(weights.to(COMPUTE), block, input_precision="ieee")
            total = total * decay + tl.sum(weights, axis=1)
            top = new_top

        sees = total > 0
        total = tl.where(sees, total, 1.0)
        result = acc / total[:, None]
        store = m < count * GROUP
        at = token * num_heads + head
        if SPLIT:
            at += part.to(tl.int64) * num_tokens * num_heads
            tl.store(sums + at, tl.where(sees, top + tl.log2(total), float("-inf")), mask=store)
        out_at = out + at[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=store[:, None] & in_dim[None, :])


@triton.jit(do_not_specialize=["num_tokens", "query_len", "most_queries", "num_parts"])
def merge_parts(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    num_tokens: tl.tensor,
    query_len: tl.tensor,
    most_queries: tl.tensor,
    num_parts: tl.tensor,
    UNIFORM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Merge what `attend_part` left of each token and head; one program a (row and its i-th new token, head).

    The grid has `most_queries` programs a row; those beyond the row's tokens do nothing.
    """
    release(CHAINED)
    place = tl.program_id(0) // most_queries
    query = tl.program_id(0) % most_queries
    head = tl.program_id(1)
    begin(CHAINED)
    length = tl.load(lengths + place)
    if UNIFORM:
        first_token = place.to(tl.int64) * query_len
        count = query_len
    else:
        first_token = tl.load(rows + place * ROW_FIELDS + 1).to(tl.int64)
        count = tl.load(rows + place * ROW_FIELDS + 2)
    if query < count:
        part = tl.arange(0, MAX_PARTS)
        dim = tl.arange(0, DIM_PADDED)
        # Parts beyond the row's keys were not written.
        used = (part < num_parts) & (part * keys_per_part(length, num_parts, BLOCK_N) < length)
        at = (part.to(tl.int64) * num_tokens + first_token + query) * HEADS + head
        sum_ = tl.load(sums + at, mask=used, other=float("-inf"))
        weight = tl.exp2(sum_ - tl.maximum(tl.max(sum_, axis=0), -1e30))
        weight = weight / tl.maximum(tl.sum(weight, axis=0), 1e-30)
        inside = used[:, None] & (dim < HEAD_DIM)[None, :]
        piece = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        result = tl.sum(piece * weight[:, None], axis=0)
        out_at = out + ((first_token + query) * HEADS + head) * HEAD_DIM + dim
        tl.store(out_at, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
