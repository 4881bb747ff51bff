// One linear layer on its own, and the head with the choice of the most probable token.
#include "team.h"
#include "weights.h"

// Fill the tokens' forms from bfloat16 rows.
static void take_in(Member *member, const Tokens *tokens, const uint16_t *x, int64_t x_stride, int64_t count)
{
    SHARE(member, count, token)
        for (int64_t column = 0; column < tokens->columns; column += BLOCK) {
            const uint16_t *from = x + token * x_stride + column;
            put_block(tokens, token, column, load_bf16(from), load_bf16(from + LANES));
        }
    meet(member);
}

static Tokens lay_out(char *room, int64_t count, const Weight *weight)
{
    Tokens tokens = {.columns = weight->columns};
    tokens.plain = weight->bits == SIXTEEN_BITS;
    tokens.quantized = !tokens.plain;
    tokens.scales = (float *)room;
    tokens.sums = tokens.scales + count * weight->columns / BLOCK;
    tokens.codes = (int8_t *)(tokens.sums + count * weight->columns / BLOCK);
    tokens.rounded = (uint16_t *)room;
    return tokens;
}

// Bytes of `room` for so many tokens.
int64_t outrider_product_room(int64_t count, int64_t columns) { return count * (3 * columns + sizeof(float)); }

// out = x @ weight.T + bias.
//
// x:   bfloat16 [count, columns], rows `x_stride` apart.
// out: [count, rows], float, or bfloat16 if `rounded`.
void outrider_product(const Weight *weight, const uint16_t *x, int64_t x_stride, int64_t count, void *out,
                      int64_t rounded, char *room, int64_t threads)
{
    Team team = {.size = (int)threads};
    Tokens tokens = lay_out(room, count, weight);
    const int64_t tiles = (weight->rows + LANES - 1) / LANES;
#pragma omp parallel num_threads(team.size)
    {
        Member member = {&team, 0};
        take_in(&member, &tokens, x, x_stride, count);
        SHARE(&member, tiles, tile) {
            int64_t width = weight->rows - tile * LANES < LANES ? weight->rows - tile * LANES : LANES;
            for (int64_t first = 0; first < count; first += MOST_TOKENS) {
                int some = count - first < MOST_TOKENS ? (int)(count - first) : MOST_TOKENS;
                Floats got[MOST_TOKENS];
                multiply(some, weight, tile, &tokens, first, got);
                for (int i = 0; i < some; i++) {
                    int64_t at = (first + i) * weight->rows + tile * LANES;
                    if (rounded) {
                        uint16_t line[LANES];
                        store_bf16(line, got[i]);
                        memcpy((uint16_t *)out + at, line, width * sizeof *line);
                    } else {
                        memcpy((float *)out + at, &got[i], width * sizeof(float));
                    }
                }
            }
        }
    }
}

// The row of the largest product for each token, the first one of equals. Rows from `limit` on do not count.
//
// best: int64 [count], filled with -1.
void outrider_best(const Weight *weight, const uint16_t *x, int64_t x_stride, int64_t count, int64_t limit,
                   int64_t *best, char *room, int64_t threads)
{
    Team team = {.size = (int)threads};
    Tokens tokens = lay_out(room, count, weight);
    const int64_t tiles = (limit + LANES - 1) / LANES;
    float *highest = (float *)(room + 3 * count * weight->columns);
    Ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
#pragma omp parallel num_threads(team.size)
    {
        Member member = {&team, 0};
        take_in(&member, &tokens, x, x_stride, count);
        for (int64_t first = 0; first < count; first += MOST_TOKENS) {
            int some = count - first < MOST_TOKENS ? (int)(count - first) : MOST_TOKENS;
            Floats most[MOST_TOKENS];
            Ints where[MOST_TOKENS];
            for (int i = 0; i < some; i++) most[i] = all(-INFINITY), where[i] = (Ints){0} + INT32_MAX;
            SHARE(&member, tiles, tile) {
                Floats got[MOST_TOKENS];
                multiply(some, weight, tile, &tokens, first, got);
                Ints rows = lanes + (int32_t)(tile * LANES);
                for (int i = 0; i < some; i++) {
                    Ints better = (got[i] > most[i]) & (rows < (int32_t)limit);
                    most[i] = choose(better, got[i], most[i]);
                    where[i] = (rows & better) | (where[i] & ~better);
                }
            }
#pragma omp critical
            for (int i = 0; i < some; i++)
                for (int lane = 0; lane < LANES; lane++) {
                    int64_t *chosen = best + first + i;
                    int fresh = *chosen < 0 || most[i][lane] > highest[first + i];
                    if (fresh || (most[i][lane] == highest[first + i] && where[i][lane] < *chosen)) {
                        highest[first + i] = most[i][lane];
                        *chosen = where[i][lane];
                    }
                }
            meet(&member);
        }
    }
}
