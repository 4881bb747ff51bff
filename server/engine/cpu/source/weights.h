// Weights as the products read them, and the product of one tile of 16 rows with up to MOST_TOKENS tokens.
//
// A weight lies in tiles of 16 rows; a tile is a run of blocks of 32 columns; lane i of every vector belongs to row i.
//   4 bits: 256 bytes of codes (4 vectors of 4 columns a lane; low nibbles are columns 0 to 15, high ones 16 to 31),
//           16 scales and 16 minimums in float16: W = code * scale + minimum
//   8 bits: 512 bytes of codes (8 vectors of 4 columns a lane), 16 scales in float16: W = (code - 128) * scale
//   16 bits: 1024 bytes of bfloat16 (16 vectors of 2 columns a lane)
// With the first two, tokens are multiplied as whole numbers of 16 bits with a scale for each block, in two int8 digits:
// finer than bfloat16. With the last, in bfloat16.
#pragma once
#include "vectors.h"

#define BLOCK 32
// As many as the registers hold.
#if defined(__AVX512F__)
#define MOST_TOKENS 8
#else
#define MOST_TOKENS 4
#endif

enum { FOUR_BITS = 4, EIGHT_BITS = 8, SIXTEEN_BITS = 16 };

typedef struct {
    const uint8_t *data;
    const float *bias;
    int64_t bits, rows, columns;
} Weight;

// Tokens [T, columns], both ways; what no weight reads is not filled.
typedef struct {
    int8_t *codes;  // [T, columns / 32, 2, 32]: x = (256 * first + second) * scale
    float *scales;  // [T, columns / 32]
    float *sums;    // the same, of the block's numbers
    uint16_t *rounded;
    int64_t columns;
    int quantized, plain;
} Tokens;

INLINE int64_t block_bytes(int64_t bits) { return bits == FOUR_BITS ? 320 : bits == EIGHT_BITS ? 544 : 1024; }

// Store 32 consecutive numbers of a token, which start a block.
INLINE void put_block(const Tokens *tokens, int64_t token, int64_t column, Floats low, Floats high)
{
    int64_t at = token * tokens->columns + column;
    if (tokens->plain) {
        store_bf16(tokens->rounded + at, low);
        store_bf16(tokens->rounded + at + LANES, high);
    }
    if (!tokens->quantized) return;
    float most = largest_of(larger(magnitude(low), magnitude(high))), sum = 0;
    const Floats halves[2] = {low, high};
    const float largest = 127 * 256, inverse = most > 0 ? largest / most : 0.0f, scale = most / largest;
    for (int i = 0; i < 2; i++) {
        Floats shifted = halves[i] * inverse + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
        Ints number = (Ints)shifted - 0x4b400000, first = (number + 128) >> 8, second = number - (first << 8);
        second -= second < -127;  // -1 where true; -128 has no opposite in int8
        Codes upper = __builtin_convertvector(first, Codes), lower = __builtin_convertvector(second, Codes);
        int8_t *to = tokens->codes + 2 * at + i * LANES;
        memcpy(to, &upper, sizeof upper);
        memcpy(to + BLOCK, &lower, sizeof lower);
        sum += scale * sum_of(to_floats((first << 8) + second));
    }
    tokens->scales[at / BLOCK] = scale;
    tokens->sums[at / BLOCK] = sum;
}

INLINE void four_bits(const int count, const uint8_t *tile, const Tokens *tokens, int64_t first, Floats *out)
{
    Floats totals[MOST_TOKENS];  // in registers, as `out` could not be
    const int64_t blocks = tokens->columns / BLOCK;
    const int32_t *codes = (const int32_t *)(tokens->codes + 2 * first * tokens->columns);
    const float *scales = tokens->scales + first * blocks, *sums = tokens->sums + first * blocks;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) totals[i] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++, tile += 320) {
        Bytes weights[8];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            Bytes both = load_bytes(tile + 64 * j);
            weights[j] = low_nibbles(both);
            weights[j + 4] = high_nibbles(both);
        }
        Floats scale = load_halves(tile + 256), minimum = load_halves(tile + 288);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const int32_t *x = codes + (i * blocks + block) * 16;
            Ints upper = {0}, lower = {0};
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                upper = dot_nibbles(upper, weights[j], x[j]);
                lower = dot_nibbles(lower, weights[j], x[j + 8]);
            }
            totals[i] += to_floats((upper << 8) + lower) * (scale * scales[i * blocks + block]);
            totals[i] += minimum * sums[i * blocks + block];
        }
    }
    for (int i = 0; i < count; i++) out[i] = totals[i];
}

INLINE void eight_bits(const int count, const uint8_t *tile, const Tokens *tokens, int64_t first, Floats *out)
{
    Floats totals[MOST_TOKENS];  // in registers, as `out` could not be
    const int64_t blocks = tokens->columns / BLOCK;
    const int32_t *codes = (const int32_t *)(tokens->codes + 2 * first * tokens->columns);
    const float *scales = tokens->scales + first * blocks, *sums = tokens->sums + first * blocks;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) totals[i] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++, tile += 544) {
        Bytes weights[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) weights[j] = load_bytes(tile + 64 * j);
        Floats scale = load_halves(tile + 512);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const int32_t *x = codes + (i * blocks + block) * 16;
            Ints upper = {0}, lower = {0};
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                upper = dot_bytes(upper, weights[j], x[j]);
                lower = dot_bytes(lower, weights[j], x[j + 8]);
            }
            Floats value = to_floats((upper << 8) + lower) * scales[i * blocks + block];
            totals[i] += scale * (value - EIGHT_BIT_EXCESS * sums[i * blocks + block]);
        }
    }
    for (int i = 0; i < count; i++) out[i] = totals[i];
}

INLINE void sixteen_bits(const int count, const uint8_t *tile, const Tokens *tokens, int64_t first, Floats *out)
{
    Floats totals[MOST_TOKENS];
    const int64_t pairs = tokens->columns / 2;
    const uint32_t *x = (const uint32_t *)(tokens->rounded + first * tokens->columns);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) totals[i] = (Floats){0};
    for (int64_t pair = 0; pair < pairs; pair += 2, tile += 128) {
        Bytes even = load_bytes(tile), odd = load_bytes(tile + 64);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            totals[i] = dot_bf16(totals[i], even, x[i * pairs + pair]);
            totals[i] = dot_bf16(totals[i], odd, x[i * pairs + pair + 1]);
        }
    }
    for (int i = 0; i < count; i++) out[i] = totals[i];
}

INLINE void tile_product(const int count, const Weight *weight, int64_t tile, const Tokens *x, int64_t first, Floats *out)
{
    const uint8_t *data = weight->data + tile * (weight->columns / BLOCK) * block_bytes(weight->bits);
    if (weight->bits == FOUR_BITS) four_bits(count, data, x, first, out);
    else if (weight->bits == EIGHT_BITS) eight_bits(count, data, x, first, out);
    else sixteen_bits(count, data, x, first, out);
    if (weight->bias) {
        Floats bias = load(weight->bias + tile * LANES);
        for (int i = 0; i < count; i++) out[i] += bias;
    }
}

// Rows 16 * tile to 16 * tile + 15 of weight @ x for tokens first to first + count - 1; `count` is 1 to MOST_TOKENS.
static void multiply(int count, const Weight *weight, int64_t tile, const Tokens *x, int64_t first, Floats *out)
{
    switch (count) {
    case 1: tile_product(1, weight, tile, x, first, out); break;
    case 2: tile_product(2, weight, tile, x, first, out); break;
    case 3: tile_product(3, weight, tile, x, first, out); break;
#if MOST_TOKENS == 8
    case 4: tile_product(4, weight, tile, x, first, out); break;
    case 5: tile_product(5, weight, tile, x, first, out); break;
    case 6: tile_product(6, weight, tile, x, first, out); break;
    case 7: tile_product(7, weight, tile, x, first, out); break;
#endif
    default: tile_product(MOST_TOKENS, weight, tile, x, first, out);
    }
}
