// All decoder layers of a dense model, or of an EAGLE-3 head, in one call: the embedding, the layers over the paged
// cache, the final norm.
#include "attention.h"
#include "team.h"

typedef struct {
    float *stream, *projected, *cosines, *sines;
    Tokens joined, narrow, heads, wide;  // twice the hidden size, once, all heads, the intermediate size
    Item *items;
    Divided *divided;
    float *parts, *scratch;
    int64_t bytes;
} Room;

static char *cut(Room *room, char *base, int64_t bytes)
{
    char *at = base + room->bytes;
    room->bytes += (bytes + 63) / 64 * 64;
    return at;
}

static Tokens cut_tokens(Room *room, char *base, const Stack *s, int64_t count, int64_t columns)
{
    Tokens tokens = {.columns = columns, .quantized = (int)s->quantized, .plain = (int)s->plain};
    if (s->quantized) {
        tokens.codes = (int8_t *)cut(room, base, 2 * count * columns);
        tokens.scales = (float *)cut(room, base, 4 * count * columns / BLOCK);
        tokens.sums = (float *)cut(room, base, 4 * count * columns / BLOCK);
    }
    if (s->plain) tokens.rounded = (uint16_t *)cut(room, base, 2 * count * columns);
    return tokens;
}

static Room lay_out(const Stack *s, const Step *step, int64_t threads, char *base)
{
    const int64_t tokens = step->tokens, scratch = attention_scratch(s->heads, s->kv_heads, s->head_dim);
    const Division sizes = divide(s, step, NULL, NULL);
    Room room = {.bytes = 0};
    room.stream = (float *)cut(&room, base, 4 * tokens * s->hidden);
    room.projected = (float *)cut(&room, base, 4 * tokens * (s->heads + 2 * s->kv_heads) * s->head_dim);
    room.cosines = (float *)cut(&room, base, 4 * tokens * s->rotary_dim / 2);
    room.sines = (float *)cut(&room, base, 4 * tokens * s->rotary_dim / 2);
    if (s->embedding_norm) room.joined = cut_tokens(&room, base, s, tokens, 2 * s->hidden);
    room.narrow = cut_tokens(&room, base, s, tokens, s->hidden);
    room.heads = cut_tokens(&room, base, s, tokens, s->heads * s->head_dim);
    room.wide = cut_tokens(&room, base, s, tokens, s->intermediate);
    room.items = (Item *)cut(&room, base, sizes.items * sizeof(Item));
    room.divided = (Divided *)cut(&room, base, sizes.divided * sizeof(Divided));
    room.parts = (float *)cut(&room, base, 4 * sizes.floats);
    room.scratch = (float *)cut(&room, base, 4 * threads * scratch);
    return room;
}

// Bytes of `base` in outrider_stack.
int64_t outrider_stack_room(const Stack *stack, const Step *step, int64_t threads)
{
    return lay_out(stack, step, threads, 0).bytes;
}

INLINE float inverse_norm(const float *x, int64_t size, double eps)
{
    Floats squares = {0};
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(sum_of(squares) / size + (float)eps);
}

// The norm of one token, from column `at` on.
static void norm_token(const Stack *s, const float *x, const float *weight, const Tokens *out, int64_t token,
                       int64_t at)
{
    float inverse = inverse_norm(x, s->hidden, s->eps);
    for (int64_t i = 0; i < s->hidden; i += BLOCK)
        put_block(out, token, at + i, load(x + i) * inverse * load(weight + i),
                  load(x + i + LANES) * inverse * load(weight + i + LANES));
}

static void capture(const Stack *s, const Step *step, const float *stream, int64_t boundary, int64_t token)
{
    if (!s->captures || s->captured[boundary] < 0) return;
    uint16_t *to = step->captured + (token * s->captures + s->captured[boundary]) * s->hidden;
    for (int64_t i = 0; i < s->hidden; i += LANES) store_bf16(to + i, load(stream + token * s->hidden + i));
}

static void load_line(float *to, const uint16_t *from, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) store(to + i, load_bf16(from + i));
}

// What a token's residual stream and the first layer's products begin with.
static void embed(const Stack *s, const Step *step, const Room *room, int64_t token)
{
    float *stream = room->stream + token * s->hidden;
    load_line(stream, s->embedding + step->ids[token] * s->hidden, s->hidden);
    const Tokens *out = &room->narrow;
    if (s->embedding_norm) {
        out = &room->joined;
        norm_token(s, stream, s->embedding_norm, out, token, 0);
        load_line(stream, step->states + token * s->hidden, s->hidden);
    }
    norm_token(s, stream, s->layers[0].input_norm, out, token, out->columns - s->hidden);
    if (s->begins_normed) {
        float inverse = inverse_norm(stream, s->hidden, s->eps);
        for (int64_t i = 0; i < s->hidden; i += LANES)
            store(stream + i, load(stream + i) * inverse * load(s->layers[0].input_norm + i));
    }
    const int64_t half = s->rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)step->positions[token] * s->inverse_frequency[i];
        room->cosines[token * half + i] = cosf(angle) * (float)s->angle_scale;
        room->sines[token * half + i] = sinf(angle) * (float)s->angle_scale;
    }
}

// Norm and turn the heads in place: pairs are (i, i + rotary_dim / 2).
static void turn(const Stack *s, float *head, const float *norm, const float *cosines, const float *sines)
{
    if (norm) {
        float inverse = inverse_norm(head, s->head_dim, s->eps);
        for (int64_t i = 0; i < s->head_dim; i++) head[i] *= inverse * norm[i];
    }
    const int64_t half = s->rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Turn the heads, write keys and values to the cache, and leave the queries as `attend` takes them.
static void turn_and_keep(const Stack *s, const Layer *layer, const Step *step, const Room *room, int64_t token)
{
    const int64_t size = s->head_dim, kv = s->kv_heads * size, half = s->rotary_dim / 2;
    float *queries = room->projected + token * (s->heads * size + 2 * kv), *keys = queries + s->heads * size;
    const float *cosines = room->cosines + token * half, *sines = room->sines + token * half;
    const float factor = 1.44269504f / sqrtf((float)size);
    for (int64_t head = 0; head < s->heads; head++)
        turn(s, queries + head * size, layer->query_norm, cosines, sines);
    for (int64_t i = 0; i < s->heads * size; i += BLOCK) {
        Pairs pairs = take_apart(load(queries + i) * factor, load(queries + i + LANES) * factor);
        store(queries + i, pairs.even);
        store(queries + i + LANES, pairs.odd);
    }
    for (int64_t head = 0; head < s->kv_heads; head++) turn(s, keys + head * size, layer->key_norm, cosines, sines);
    for (int64_t i = 0; i < kv; i += LANES) {
        store_bf16(layer->keys + step->slots[token] * kv + i, load(keys + i));
        store_bf16(layer->values + step->slots[token] * kv + i, load(keys + kv + i));
    }
}

// Join the parts of some tokens' rows for one KV head.
static void join_parts(const Stack *s, const Room *room, const Divided *divided, int64_t kv_head)
{
    const int64_t group = s->heads / s->kv_heads, rows = divided->count * s->heads, size = s->head_dim;
    const Part first = part_at(room->parts + divided->at, rows, size);
    for (int64_t i = 0; i < divided->count * group; i++)
        join(&first, kv_head * divided->count * group + i, divided->parts, part_floats(rows, size), size, &room->heads,
             divided->first + i / group, (kv_head * group + i % group) * size);
}

static void attend_item(const Stack *s, const Layer *layer, const Step *step, const Room *room, const Item *item,
                        float *scratch)
{
    const int64_t group = s->heads / s->kv_heads, size = s->head_dim, count = item->count;
    const int64_t width = (s->heads + 2 * s->kv_heads) * size, rows = (item->kv_to - item->kv_from) * count * group;
    Cache cache = {layer->keys, layer->values, step->tables + item->sequence * step->table_width,
                   s->page_size, s->kv_heads, size, s->heads};
    float *queries = scratch, *own = queries + rows * size, *to = queries;
    for (int64_t kv_head = item->kv_from; kv_head < item->kv_to; kv_head++)
        for (int64_t i = 0; i < count; i++, to += group * size) {
            const float *from = room->projected + (item->first + i) * width + kv_head * group * size;
            memcpy(to, from, sizeof(float) * group * size);
        }
    const Part part = part_at(item->at < 0 ? own : room->parts + item->at, rows, size);
    attend(&cache, item, step->positions[item->first], queries, &part, own + part_floats(rows, size));
    for (int64_t i = 0; item->at < 0 && i < rows; i++)
        join(&part, i, 1, 0, size, &room->heads, item->first + i / group, (item->kv_from * group + i % group) * size);
}

// Products of some tiles with all tokens; stored, or added to what is there.
INLINE void project(const Weight *weight, const Tokens *x, int64_t count, int64_t tile, float *out, const int add)
{
    for (int64_t first = 0; first < count; first += MOST_TOKENS) {
        int some = count - first < MOST_TOKENS ? (int)(count - first) : MOST_TOKENS;
        Floats got[MOST_TOKENS];
        multiply(some, weight, tile, x, first, got);
        for (int i = 0; i < some; i++) {
            float *to = out + (first + i) * weight->rows + tile * LANES;
            store(to, add ? load(to) + got[i] : got[i]);
        }
    }
}

// silu(gate) * up for 32 columns, all tokens.
static void gated(const Weight *weight, const Tokens *x, int64_t count, int64_t block, const Tokens *out)
{
    const int64_t gate = 2 * block, up = weight->rows / 2 / LANES + gate;
    for (int64_t first = 0; first < count; first += MOST_TOKENS) {
        int some = count - first < MOST_TOKENS ? (int)(count - first) : MOST_TOKENS;
        Floats gates[2][MOST_TOKENS], ups[2][MOST_TOKENS];
        for (int half = 0; half < 2; half++) {
            multiply(some, weight, gate + half, x, first, gates[half]);
            multiply(some, weight, up + half, x, first, ups[half]);
        }
        for (int i = 0; i < some; i++)
            put_block(out, first + i, block * BLOCK, silu(gates[0][i]) * ups[0][i], silu(gates[1][i]) * ups[1][i]);
    }
}

// Run the step: keys and values go into the cache, step->hidden receives the states after the final norm.
void outrider_stack(const Stack *s, const Step *step, char *base, int64_t threads)
{
    Team team = {.size = (int)threads};
    const Room room = lay_out(s, step, threads, base);
    const Division sizes = divide(s, step, room.items, room.divided);
    const int64_t count = step->tokens, scratch = attention_scratch(s->heads, s->kv_heads, s->head_dim);
#pragma omp parallel num_threads(team.size)
    {
        Member member = {&team, 0};
        float *own = room.scratch + omp_get_thread_num() * scratch;
        SHARE(&member, count, token) {
            embed(s, step, &room, token);
            capture(s, step, room.stream, 0, token);
        }
        meet(&member);
        for (int64_t l = 0; l < s->num_layers; l++) {
            const Layer *layer = s->layers + l;
            SHARE(&member, layer->qkv.rows / LANES, tile)
                project(&layer->qkv, l || !s->embedding_norm ? &room.narrow : &room.joined, count, tile,
                        room.projected, 0);
            meet(&member);
            SHARE(&member, count, token) turn_and_keep(s, layer, step, &room, token);
            meet(&member);
            SHARE(&member, sizes.items, item) attend_item(s, layer, step, &room, room.items + item, own);
            meet(&member);
            if (sizes.divided) {
                SHARE(&member, sizes.divided * s->kv_heads, i)
                    join_parts(s, &room, room.divided + i / s->kv_heads, i % s->kv_heads);
                meet(&member);
            }
            SHARE(&member, layer->output.rows / LANES, tile)
                project(&layer->output, &room.heads, count, tile, room.stream, 1);
            meet(&member);
            SHARE(&member, count, token)
                norm_token(s, room.stream + token * s->hidden, layer->post_norm, &room.narrow, token, 0);
            meet(&member);
            SHARE(&member, s->intermediate / BLOCK, block)
                gated(&layer->gate_up, &room.narrow, count, block, &room.wide);
            meet(&member);
            SHARE(&member, layer->down.rows / LANES, tile)
                project(&layer->down, &room.wide, count, tile, room.stream, 1);
            meet(&member);
            SHARE(&member, count, token) {
                const float *x = room.stream + token * s->hidden;
                capture(s, step, room.stream, l + 1, token);
                if (l + 1 < s->num_layers) {
                    norm_token(s, x, s->layers[l + 1].input_norm, &room.narrow, token, 0);
                    continue;
                }
                float inverse = inverse_norm(x, s->hidden, s->eps);
                for (int64_t i = 0; i < s->hidden; i += LANES)
                    store_bf16(step->hidden + token * s->hidden + i, load(x + i) * inverse * load(s->final_norm + i));
            }
            meet(&member);
        }
    }
}
