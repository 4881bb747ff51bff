// How a step's attention is divided among threads.
//
// A row with many new tokens is cut into runs of them, one item for each KV head. A row with few has only its keys to
// divide: an item is a part of them, for all KV heads, so that it reads the cache line after line (a KV head alone
// would read a third of the lines, which takes nearly as long), and a second phase joins the parts. A short context is
// not worth that phase; it is divided by KV heads.
//
// How a row is divided depends on nothing but the row, and so do its numbers: not on the other rows, nor on how many
// threads there are.
#pragma once
#include "stack.h"

#define MOST_QUERIES 16  // tokens of one item
#define WHOLE 256        // keys up to which a row stays in one piece
#define PART 128         // keys of a part, at least
#define MOST_PARTS 32

typedef struct {
    int64_t sequence, first, count;  // new tokens
    int64_t from, to;                // keys
    int64_t kv_from, kv_to;          // KV heads
    int64_t at;                      // where its part goes, in floats; -1 if it is whole
} Item;

typedef struct {
    int64_t first, count;  // new tokens
    int64_t parts, at;
} Divided;

typedef struct {
    int64_t items, divided, floats;
} Division;

// Floats of a part: for each row, as attention.h calls it, its outputs, the largest score and the sum of weights.
INLINE int64_t part_floats(int64_t rows, int64_t head_dim)
{
    return (rows * (head_dim + 2) + LANES - 1) / LANES * LANES;
}

static void divide_keys(const Stack *s, Item whole, Division *sizes, Item *items, Divided *divided)
{
    const int64_t step = (whole.to + MOST_PARTS * PART - 1) / (MOST_PARTS * PART) * PART;
    const int64_t parts = (whole.to + step - 1) / step, floats = part_floats(whole.count * s->heads, s->head_dim);
    if (items) {
        divided[sizes->divided] = (Divided){whole.first, whole.count, parts, sizes->floats};
        for (int64_t part = 0; part < parts; part++) {
            Item item = whole;
            item.from = part * step;
            if (part + 1 < parts) item.to = item.from + step;
            item.at = sizes->floats + part * floats;
            items[sizes->items + part] = item;
        }
    }
    sizes->divided++;
    sizes->items += parts;
    sizes->floats += parts * floats;
}

// Fill the lists; without them, count only.
static Division divide(const Stack *s, const Step *step, Item *items, Divided *divided)
{
    Division sizes = {0};
    for (int64_t r = 0; r < step->sequences; r++) {
        const int64_t start = step->query_start[r], end = step->query_start[r + 1];
        if (start == end) continue;
        const int64_t length = step->positions[end - 1] + 1;
        if (end - start <= MOST_QUERIES && length > WHOLE) {
            divide_keys(s, (Item){r, start, end - start, 0, length, 0, s->kv_heads, -1}, &sizes, items, divided);
            continue;
        }
        for (int64_t first = start; first < end; first += MOST_QUERIES)
            for (int64_t kv_head = 0; kv_head < s->kv_heads; kv_head++, sizes.items++) {
                int64_t count = end - first < MOST_QUERIES ? end - first : MOST_QUERIES;
                int64_t to = step->positions[first] + count;
                if (items) items[sizes.items] = (Item){r, first, count, 0, to, kv_head, kv_head + 1, -1};
            }
    }
    return sizes;
}
