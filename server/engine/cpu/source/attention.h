// Causal attention over the paged cache: 16 keys at a time with a running softmax, for the query heads of one KV head.
#pragma once
#include "weights.h"

#define KEYS 16          // read at a time; a page holds a multiple of them
#define MOST_QUERIES 16  // tokens of one item
#define FEW 6            // rows from which on keys are worth turning around

typedef struct {
    const uint16_t *keys, *values;  // bfloat16 [pages, page_size, kv_heads, head_dim]
    const int64_t *pages;           // of the sequence
    int64_t page_size, kv_heads, head_dim, heads;
} Cache;

// Scores of one row against 16 keys, one key after the other.
INLINE Floats scores_few(const float *query, const uint16_t *keys, int64_t stride, int64_t head_dim)
{
    Floats scores;
    for (int key = 0; key < KEYS; key++) {
        Floats sum = {0};
        for (int64_t d = 0; d < head_dim; d += LANES) sum += load(query + d) * load_bf16(keys + key * stride + d);
        scores[key] = sum_of(sum);
    }
    return scores;
}

INLINE void scores_many(const int count, const float *queries, const float *turned, int64_t head_dim, float *scores)
{
    Floats sums[4] = {{0}};
    for (int64_t d = 0; d < head_dim; d++) {
        Floats keys = load(turned + d * KEYS);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) sums[i] += keys * queries[i * head_dim + d];
    }
    for (int i = 0; i < count; i++) store(scores + i * KEYS, sums[i]);
}

INLINE void add_values(float *out, const float *weights, const float *values, int64_t head_dim, float keep)
{
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
        Floats a = load(out + d) * keep, b = load(out + d + LANES) * keep, c = {0}, e = {0};
#pragma GCC unroll 8
        for (int key = 0; key < KEYS; key += 2) {
            a += load(values + key * head_dim + d) * weights[key];
            b += load(values + key * head_dim + d + LANES) * weights[key];
            c += load(values + (key + 1) * head_dim + d) * weights[key + 1];
            e += load(values + (key + 1) * head_dim + d + LANES) * weights[key + 1];
        }
        store(out + d, a + c);
        store(out + d + LANES, b + e);
    }
}

// Attend for the queries of `count` consecutive tokens that share a KV head.
//
// queries: float [heads a KV head * count rows, head_dim], row = token * group + head, already divided by
//          sqrt(head_dim) and multiplied by log2(e).
// first:   position of the first of these tokens; the cache holds all up to the last.
// out:     float [rows, head_dim], the result.
// scratch: what attention_scratch counts beyond queries and out.
static void attend(const Cache *cache, int64_t kv_head, int64_t count, int64_t first, const float *queries, float *out,
                   float *scratch)
{
    const int64_t group = cache->heads / cache->kv_heads, rows = group * count, head_dim = cache->head_dim;
    const int64_t stride = cache->kv_heads * head_dim;
    float *turned = scratch, *values = turned + KEYS * head_dim, *scores = values + KEYS * head_dim;
    float *most = scores + (rows + 3) * KEYS, *total = most + rows;
    for (int64_t row = 0; row < rows; row++) most[row] = -INFINITY, total[row] = 0;
    memset(out, 0, sizeof(float) * rows * head_dim);
    Ints places;
    for (int i = 0; i < LANES; i++) places[i] = i;
    for (int64_t key = 0; key < first + count; key += KEYS) {
        int64_t page = cache->pages[key / cache->page_size];
        int64_t at = (page * cache->page_size + key % cache->page_size) * stride + kv_head * head_dim;
        const uint16_t *keys = cache->keys + at;
        if (rows < FEW) {
            for (int64_t row = 0; row < rows; row++)
                store(scores + row * KEYS, scores_few(queries + row * head_dim, keys, stride, head_dim));
        } else {
            for (int k = 0; k < KEYS; k++)
                for (int64_t d = 0; d < head_dim; d += LANES) {
                    Floats part = load_bf16(keys + k * stride + d);
                    for (int i = 0; i < LANES; i++) turned[(d + i) * KEYS + k] = part[i];
                }
            int64_t row = 0;
            for (; row + 4 <= rows; row += 4)
                scores_many(4, queries + row * head_dim, turned, head_dim, scores + row * KEYS);
            for (; row < rows; row++)
                scores_many(1, queries + row * head_dim, turned, head_dim, scores + row * KEYS);
        }
        for (int k = 0; k < KEYS; k++)
            for (int64_t d = 0; d < head_dim; d += LANES)
                store(values + k * head_dim + d, load_bf16(cache->values + at + k * stride + d));
        for (int64_t row = 0; row < rows; row++) {
            int64_t seen = first + row / group + 1 - key;
            if (seen <= 0) continue;
            Floats score = load(scores + row * KEYS);
            if (seen < KEYS) score = choose(places < (int32_t)seen, score, all(-INFINITY));
            float highest = largest_of(score);
            highest = highest > most[row] ? highest : most[row];
            Floats weight = power_of_two(score - highest);
            if (seen < KEYS) weight = choose(places < (int32_t)seen, weight, (Floats){0});
            float keep = most[row] == highest ? 1.0f : power_of_two(all(most[row] - highest))[0];
            total[row] = total[row] * keep + sum_of(weight);
            most[row] = highest;
            store(scores + row * KEYS, weight);
            add_values(out + row * head_dim, scores + row * KEYS, values, head_dim, keep);
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(out + row * head_dim + d, load(out + row * head_dim + d) / total[row]);
}

// Floats of scratch that a thread needs: queries, results, and what `attend` keeps.
INLINE int64_t attention_scratch(int64_t group, int64_t head_dim)
{
    int64_t rows = group * MOST_QUERIES;
    return 2 * rows * head_dim + 2 * KEYS * head_dim + (rows + 3) * KEYS + 2 * rows;
}
