// Causal attention over the paged cache: some keys at a time with a running softmax, for the query heads of KV heads.
//
// Queries and outputs are held with the even and odd dimensions of each 32 apart, as keys and values are loaded. While
// some keys are computed with, those that come next are asked for, a line for each line that is read: pages lie
// anywhere, which the machine does not foresee; lines asked for all at once queue up, and the computation behind them.
#pragma once
#include "division.h"

#define KEYS 32  // scored before the softmax moves on; runs of LANES, each of which lies in one page
#define RUNS (KEYS / LANES)
#define FEW 6  // rows from which on keys are worth turning around
// Rows that share what is loaded; as many as the registers hold.
#if defined(__AVX512F__)
#define TOGETHER 8
#define MORE_COUNTS(function, ...)           \
    case 4: function(4, __VA_ARGS__); break; \
    case 5: function(5, __VA_ARGS__); break; \
    case 6: function(6, __VA_ARGS__); break; \
    case 7: function(7, __VA_ARGS__); break;
#else
#define TOGETHER 4
#define MORE_COUNTS(function, ...)
#endif

typedef struct {
    const uint16_t *keys, *values;  // bfloat16 [pages, page_size, kv_heads, head_dim]
    const int64_t *pages;           // of the sequence
    int64_t page_size, kv_heads, head_dim, heads;
} Cache;

// What is known of some rows; a row is a query head of a token, row = (KV head * tokens + token) * group + head.
typedef struct {
    float *out;    // [rows, head_dim], the sum of weighted values
    float *most;   // [rows], the largest score
    float *total;  // [rows], the sum of weights
} Part;

INLINE Part part_at(float *base, int64_t rows, int64_t head_dim)
{
    return (Part){base, base + rows * head_dim, base + rows * (head_dim + 1)};
}

INLINE void ask_for(const uint16_t *line) { _mm_prefetch((const char *)line, _MM_HINT_T1); }

// Call a function for a count that the compiler knows.
#define COUNTED(count, function, ...)                \
    switch (count) {                                 \
    case 1: function(1, __VA_ARGS__); break;         \
    case 2: function(2, __VA_ARGS__); break;         \
    case 3: function(3, __VA_ARGS__); break;         \
        MORE_COUNTS(function, __VA_ARGS__)           \
    default: function(TOGETHER, __VA_ARGS__); break; \
    }

// 16 keys of 32 dimensions, turned: to[d * LANES + key]. `next`: the keys that are wanted after them, here and below.
INLINE void turn_keys(const uint16_t *keys, const uint16_t *next, int64_t stride, float *to)
{
    Words rows[LANES];  // of two dimensions each
    for (int key = 0; key < LANES; key++) {
        rows[key] = (Words)load_bytes(keys + key * stride);
        ask_for(next + key * stride);
    }
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
    // b[4 * i + j] now holds, in its quarter q, place 4 * q + j of keys 4 * i to 4 * i + 3.
    for (int j = 0; j < 4; j++) {
        __m512 even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        __m512 more = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), rest = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        rows[j] = (Words)_mm512_shuffle_f32x4(even, more, 0x88);
        rows[8 + j] = (Words)_mm512_shuffle_f32x4(even, more, 0xdd);
        rows[4 + j] = (Words)_mm512_shuffle_f32x4(odd, rest, 0x88);
        rows[12 + j] = (Words)_mm512_shuffle_f32x4(odd, rest, 0xdd);
    }
    for (int i = 0; i < LANES; i++) {
        Pairs pairs = pairs_of(rows[i]);
        store(to + i * LANES, pairs.even);
        store(to + (LANES + i) * LANES, pairs.odd);
    }
#else
    for (int key = 0; key < LANES; key++) {
        Pairs pairs = pairs_of(rows[key]);
        for (int i = 0; i < LANES; i++) {
            to[i * LANES + key] = pairs.even[i];
            to[(LANES + i) * LANES + key] = pairs.odd[i];
        }
    }
#endif
}

// Scores of some rows against 16 keys.
INLINE void scores_few(const int count, const float *queries, const uint16_t *keys, const uint16_t *next,
                       int64_t stride, int64_t head_dim, float *scores)
{
    Floats sums[TOGETHER][LANES];
    for (int key = 0; key < LANES; key++) {
        Floats sum[TOGETHER] = {{0}};
        for (int64_t d = 0; d < head_dim; d += BLOCK) {
            Pairs pairs = load_pairs(keys + key * stride + d);
            ask_for(next + key * stride + d);
#pragma GCC unroll 8
            for (int i = 0; i < count; i++) {
                sum[i] += load(queries + i * head_dim + d) * pairs.even;
                sum[i] += load(queries + i * head_dim + d + LANES) * pairs.odd;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) sums[i][key] = sum[i];
    }
    for (int i = 0; i < count; i++) store(scores + i * KEYS, sums_of(sums[i]));
}

// The same from turned keys.
INLINE void scores_many(const int count, const float *queries, const float *turned, int64_t head_dim, float *scores)
{
    Floats even[TOGETHER] = {{0}}, odd[TOGETHER] = {{0}};
    for (int64_t d = 0; d < head_dim; d += 2) {
        Floats first = load(turned + d * LANES), second = load(turned + (d + 1) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            even[i] += first * queries[i * head_dim + d];
            odd[i] += second * queries[i * head_dim + d + 1];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) store(scores + i * KEYS, even[i] + odd[i]);
}

// out = out * keep + weights @ values, for some rows; values + at[run] are those of 16 keys.
INLINE void add_values(const int count, float *out, const float *weights, const float *keep, const uint16_t *values,
                       const int64_t *at, const int64_t *next, int64_t runs, int64_t stride, int64_t head_dim)
{
    for (int64_t d = 0; d < head_dim; d += BLOCK) {
        Floats even[TOGETHER], odd[TOGETHER];
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            even[i] = load(out + i * head_dim + d) * keep[i];
            odd[i] = load(out + i * head_dim + d + LANES) * keep[i];
        }
        for (int64_t run = 0; run < runs; run++)
            for (int64_t key = 0; key < LANES; key++) {
                Pairs pairs = load_pairs(values + at[run] + key * stride + d);
                ask_for(values + next[run] + key * stride + d);
#pragma GCC unroll 8
                for (int i = 0; i < count; i++) {
                    even[i] += pairs.even * weights[i * KEYS + run * LANES + key];
                    odd[i] += pairs.odd * weights[i * KEYS + run * LANES + key];
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            store(out + i * head_dim + d, even[i]);
            store(out + i * head_dim + d + LANES, odd[i]);
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

// Rows are taken in groups of nearly equal size: one alone would wait for each of its sums.
INLINE int64_t together(int64_t rows)
{
    int64_t groups = (rows + TOGETHER - 1) / TOGETHER;
    return (rows + groups - 1) / groups;
}

// Scores of all rows of a KV head against 16 keys.
static void score(const float *queries, int64_t rows, const uint16_t *keys, const uint16_t *next, int64_t stride,
                  int64_t head_dim, float *turned, float *scores)
{
    if (rows >= FEW)
        for (int64_t d = 0; d < head_dim; d += BLOCK) turn_keys(keys + d, next + d, stride, turned + d * LANES);
    const int64_t most = together(rows);
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t count = rows - row < most ? rows - row : most;
        const float *some = queries + row * head_dim;
        if (rows >= FEW) COUNTED(count, scores_many, some, turned, head_dim, scores + row * KEYS)
        else COUNTED(count, scores_few, some, keys, next, stride, head_dim, scores + row * KEYS)
    }
}

// Where the next runs of LANES keys from `start` to `end` lie, in numbers from the cache's first.
INLINE void find_runs(const Cache *cache, int64_t start, int64_t end, int64_t *at)
{
    for (int64_t run = 0, key = start; run < RUNS && key < end; run++, key += LANES) {
        int64_t slot = cache->pages[key / cache->page_size] * cache->page_size + key % cache->page_size;
        at[run] = slot * cache->kv_heads * cache->head_dim;
    }
}

// Attend to an item's keys for its tokens and KV heads.
//
// first:   position of the first token; the cache holds all up to the last.
// queries: float [rows, head_dim], already divided by sqrt(head_dim) and multiplied by log2(e).
// part:    the result.
// scratch: what attention_scratch counts for it.
static void attend(const Cache *cache, const Item *item, int64_t first, const float *queries, const Part *part,
                   float *scratch)
{
    const int64_t group = cache->heads / cache->kv_heads, rows = group * item->count, head_dim = cache->head_dim;
    const int64_t all_rows = rows * (item->kv_to - item->kv_from), stride = cache->kv_heads * head_dim;
    float *turned = scratch, *scores = turned + LANES * head_dim, *keep = scores + rows * KEYS, *totals = keep + rows;
    for (int64_t row = 0; row < all_rows; row++) part->most[row] = -INFINITY;
    memset(totals, 0, sizeof(float) * all_rows * LANES);
    memset(part->out, 0, sizeof(float) * all_rows * head_dim);
    const int64_t length = first + item->count;
    int64_t at[2][RUNS] = {{0}}, turn = 0;
    find_runs(cache, item->from, item->to, at[0]);
    for (int64_t start = item->from; start < item->to; start += KEYS, turn ^= 1) {
        const int64_t *here = at[turn], *next = at[turn ^ 1];
        const int64_t left = (item->to - start + LANES - 1) / LANES, runs = left < RUNS ? left : RUNS;
        // Past the item's end lies what the same thread will most likely do next.
        find_runs(cache, start + KEYS, length, at[turn ^ 1]);
        for (int64_t kv_head = item->kv_from, done = 0; kv_head < item->kv_to; kv_head++, done += rows) {
            const uint16_t *keys = cache->keys + kv_head * head_dim, *values = cache->values + kv_head * head_dim;
            for (int64_t run = 0; run < runs; run++)
                score(queries + done * head_dim, rows, keys + here[run], keys + next[run], stride, head_dim, turned,
                      scores + run * LANES);
            float *some = scores, *total = totals + done * LANES, *highest = part->most + done;
            for (int64_t row = 0; row < rows; row++, some += KEYS, total += LANES) {
                int64_t seen = first + row / group + 1 - start;
                keep[row] = 1;
                if (seen <= 0) memset(some, 0, sizeof(float) * KEYS);
                else keep[row] = soften(some, runs * LANES, seen, highest + row, total);
            }
            const int64_t most = together(rows);
            for (int64_t row = 0; row < rows; row += most) {
                const int64_t count = rows - row < most ? rows - row : most;
                COUNTED(count, add_values, part->out + (done + row) * head_dim, scores + row * KEYS, keep + row, values,
                        here, next, runs, stride, head_dim)
            }
        }
    }
    for (int64_t row = 0; row < all_rows; row++) part->total[row] = sum_of(load(totals + row * LANES));
}

// The result of one row from its parts, which are `stride` floats apart, as `head_dim` columns of a token.
static void join(const Part *first, int64_t row, int64_t parts, int64_t stride, int64_t head_dim, const Tokens *tokens,
                 int64_t token, int64_t column)
{
    float weights[MOST_PARTS], most = -INFINITY, total = 0;
    for (int64_t part = 0; part < parts; part++) {
        weights[part] = first->most[part * stride + row];
        if (weights[part] > most) most = weights[part];
    }
    for (int64_t part = parts; part % LANES; part++) weights[part] = -INFINITY;
    for (int64_t part = 0; part < parts; part += LANES)
        store(weights + part, power_of_two(load(weights + part) - most));
    for (int64_t part = 0; part < parts; part++) total += weights[part] * first->total[part * stride + row];
    const float inverse = 1.0f / total;
    for (int64_t d = 0; d < head_dim; d += BLOCK) {
        Pairs pairs = {{0}, {0}};
        for (int64_t part = 0; part < parts; part++) {
            const float *from = first->out + part * stride + row * head_dim + d;
            pairs.even += load(from) * weights[part];
            pairs.odd += load(from + LANES) * weights[part];
        }
        Floats low, high;
        put_together((Pairs){pairs.even * inverse, pairs.odd * inverse}, &low, &high);
        put_block(tokens, token, column + d, low, high);
    }
}

// Floats of scratch that a thread needs: queries, a part, and what `attend` keeps.
INLINE int64_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t head_dim)
{
    int64_t rows = heads * MOST_QUERIES, together = rows / kv_heads;
    return rows * head_dim + part_floats(rows, head_dim) + LANES * head_dim + together * (KEYS + 1) + rows * LANES;
}
