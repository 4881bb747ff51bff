// Causal attention over the paged cache: some keys at a time with a running softmax, for the query heads of one KV head.
#pragma once
#include "weights.h"

#define KEYS 32          // scored before the softmax moves on; two runs of LANES, each of which lies in one page
#define MOST_QUERIES 16  // tokens of one item
#define FEW 6            // rows from which on keys are worth turning around
#define TOGETHER 4       // rows that share what is loaded

typedef struct {
    const uint16_t *keys, *values;  // bfloat16 [pages, page_size, kv_heads, head_dim]
    const int64_t *pages;           // of the sequence
    int64_t page_size, kv_heads, head_dim, heads;
} Cache;

// 16 keys of 16 dimensions in float, turned: to[d * LANES + key].
INLINE void turn_keys(const uint16_t *keys, int64_t stride, float *to)
{
    Floats rows[LANES];
    for (int key = 0; key < LANES; key++) rows[key] = load_bf16(keys + key * stride);
#if defined(__AVX512F__)
    __m512 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        b[i] = (__m512)_mm512_unpacklo_pd((__m512d)a[i], (__m512d)a[i + 2]);
        b[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i], (__m512d)a[i + 2]);
        b[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
        b[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
    }
    // b[4 * i + j] now holds, in its quarter q, dimension 4 * q + j of keys 4 * i to 4 * i + 3.
    for (int j = 0; j < 4; j++) {
        __m512 even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        __m512 more = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), rest = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        store(to + j * LANES, (Floats)_mm512_shuffle_f32x4(even, more, 0x88));
        store(to + (8 + j) * LANES, (Floats)_mm512_shuffle_f32x4(even, more, 0xdd));
        store(to + (4 + j) * LANES, (Floats)_mm512_shuffle_f32x4(odd, rest, 0x88));
        store(to + (12 + j) * LANES, (Floats)_mm512_shuffle_f32x4(odd, rest, 0xdd));
    }
#else
    for (int key = 0; key < LANES; key++)
        for (int i = 0; i < LANES; i++) to[i * LANES + key] = rows[key][i];
#endif
}

// Scores of one row against 16 keys, one key after the other.
INLINE Floats scores_few(const float *query, const uint16_t *keys, int64_t stride, int64_t head_dim)
{
    float scores[LANES];
    for (int key = 0; key < LANES; key++) {
        Floats sum = {0};
        for (int64_t d = 0; d < head_dim; d += LANES) sum += load(query + d) * load_bf16(keys + key * stride + d);
        scores[key] = sum_of(sum);
    }
    return load(scores);
}

INLINE void scores_many(const int count, const float *queries, const float *turned, int64_t head_dim, float *scores)
{
    Floats even[TOGETHER] = {{0}}, odd[TOGETHER] = {{0}};
    for (int64_t d = 0; d < head_dim; d += 2) {
        Floats first = load(turned + d * LANES), second = load(turned + (d + 1) * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            even[i] += first * queries[i * head_dim + d];
            odd[i] += second * queries[i * head_dim + d + 1];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) store(scores + i * KEYS, even[i] + odd[i]);
}

// out = out * keep + weights @ values, for some rows.
INLINE void add_values(const int count, float *out, const float *weights, const float *keep, const float *values,
                       int64_t keys, int64_t head_dim)
{
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
        Floats low[TOGETHER], high[TOGETHER];
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            low[i] = load(out + i * head_dim + d) * keep[i];
            high[i] = load(out + i * head_dim + d + LANES) * keep[i];
        }
        for (int64_t key = 0; key < keys; key++) {
            Floats a = load(values + key * head_dim + d), b = load(values + key * head_dim + d + LANES);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                low[i] += a * weights[i * KEYS + key];
                high[i] += b * weights[i * KEYS + key];
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            store(out + i * head_dim + d, low[i]);
            store(out + i * head_dim + d + LANES, high[i]);
        }
    }
}

// Turn a row's scores into weights relative to the largest score so far; returns what earlier weights shrink by.
INLINE float soften(float *scores, int64_t keys, int64_t seen, float *most, float *total)
{
    Ints places;
    for (int i = 0; i < LANES; i++) places[i] = i;
    Floats highest = all(-INFINITY);
    for (int64_t at = 0; at < keys; at += LANES) {
        Floats score = load(scores + at);
        if (seen < at + LANES) {
            score = choose(places < (int32_t)(seen - at), score, all(-INFINITY));
            store(scores + at, score);
        }
        highest = larger(highest, score);
    }
    float before = *most, now = largest_of(highest);
    if (now < before) now = before;
    Floats sum = {0};
    for (int64_t at = 0; at < keys; at += LANES) {
        // Below -126 the power is 0, which also is the weight of what is not seen.
        Floats weight = power_of_two(load(scores + at) - now);
        store(scores + at, weight);
        sum += weight;
    }
    float keep = before == now ? 1.0f : power_of_two(all(before - now))[0];
    store(total, load(total) * keep + sum);
    *most = now;
    return keep;
}

// Attend for the queries of `count` consecutive tokens that share a KV head.
//
// first:   position of the first of these tokens; the cache holds all up to the last.
// queries: float [rows = heads a KV head * count, head_dim], row = token * group + head, already divided by
//          sqrt(head_dim) and multiplied by log2(e).
// out:     float [rows, head_dim], the result.
// scratch: what attention_scratch counts beyond queries and out.
static void attend(const Cache *cache, int64_t kv_head, int64_t count, int64_t first, const float *queries, float *out,
                   float *scratch)
{
    const int64_t group = cache->heads / cache->kv_heads, rows = group * count, head_dim = cache->head_dim;
    const int64_t stride = cache->kv_heads * head_dim, length = first + count;
    float *turned = scratch, *values = turned + LANES * head_dim, *scores = values + KEYS * head_dim;
    float *total = scores + rows * KEYS, *most = total + rows * LANES, *keep = most + rows;
    for (int64_t row = 0; row < rows; row++) most[row] = -INFINITY, store(total + row * LANES, (Floats){0});
    memset(out, 0, sizeof(float) * rows * head_dim);
    for (int64_t start = 0; start < length; start += KEYS) {
        const int64_t keys = length - start > LANES ? KEYS : LANES;
        for (int64_t run = 0; run < keys; run += LANES) {
            int64_t page = cache->pages[(start + run) / cache->page_size];
            int64_t at = (page * cache->page_size + (start + run) % cache->page_size) * stride + kv_head * head_dim;
            if (rows < FEW) {
                for (int64_t row = 0; row < rows; row++) {
                    Floats got = scores_few(queries + row * head_dim, cache->keys + at, stride, head_dim);
                    store(scores + row * KEYS + run, got);
                }
            } else {
                for (int64_t d = 0; d < head_dim; d += LANES) turn_keys(cache->keys + at + d, stride, turned + d * LANES);
                int64_t row = 0;
                for (; row + TOGETHER <= rows; row += TOGETHER)
                    scores_many(TOGETHER, queries + row * head_dim, turned, head_dim, scores + row * KEYS + run);
                for (; row < rows; row++)
                    scores_many(1, queries + row * head_dim, turned, head_dim, scores + row * KEYS + run);
            }
            for (int k = 0; k < LANES; k++)
                for (int64_t d = 0; d < head_dim; d += LANES)
                    store(values + (run + k) * head_dim + d, load_bf16(cache->values + at + k * stride + d));
        }
        for (int64_t row = 0; row < rows; row++) {
            int64_t seen = first + row / group + 1 - start;
            keep[row] = 1;
            if (seen <= 0) memset(scores + row * KEYS, 0, sizeof(float) * KEYS);
            else keep[row] = soften(scores + row * KEYS, keys, seen, most + row, total + row * LANES);
        }
        int64_t row = 0;
        for (; row + TOGETHER <= rows; row += TOGETHER)
            add_values(TOGETHER, out + row * head_dim, scores + row * KEYS, keep + row, values, keys, head_dim);
        for (; row < rows; row++)
            add_values(1, out + row * head_dim, scores + row * KEYS, keep + row, values, keys, head_dim);
    }
    for (int64_t row = 0; row < rows; row++) {
        float inverse = 1.0f / sum_of(load(total + row * LANES));
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(out + row * head_dim + d, load(out + row * head_dim + d) * inverse);
    }
}

// Floats of scratch that a thread needs: queries, results, and what `attend` keeps.
INLINE int64_t attention_scratch(int64_t group, int64_t head_dim)
{
    int64_t rows = group * MOST_QUERIES;
    return 2 * rows * head_dim + (LANES + KEYS) * head_dim + rows * (KEYS + LANES + 2);
}
