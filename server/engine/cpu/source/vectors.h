// Vectors of 16 numbers in the compiler's own vector types: it lowers them to what the machine has. The operations that
// it does not find by itself are spelt out for AVX-512 and AVX2.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "needs AVX2, FMA and F16C"
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));
typedef int8_t Codes __attribute__((vector_size(16)));

INLINE Floats load(const float *from) { Floats v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, Floats v) { memcpy(to, &v, sizeof v); }
INLINE Bytes load_bytes(const void *from) { Bytes v; memcpy(&v, from, sizeof v); return v; }
INLINE Floats all(float x) { return x - (Floats){0}; }
INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
INLINE Floats choose(Ints mask, Floats a, Floats b) { return (Floats)(((Ints)a & mask) | ((Ints)b & ~mask)); }
INLINE Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
INLINE Floats magnitude(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }

INLINE Bytes low_nibbles(Bytes v) { return v & 15; }
INLINE Bytes high_nibbles(Bytes v) { return (Bytes)((Shorts)v >> 4) & 15; }

INLINE float sum_of(Floats v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

// The sums of 16 vectors: their halves and quarters are added side by side, not one vector after the other.
INLINE Floats sums_of(const Floats *v)
{
#if defined(__AVX512F__)
    __m512 pairs[8], quads[4], halves[2];
    for (int i = 0; i < 8; i++) {
        __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        quads[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    // quads[i] now holds, in each of its quarters, a part of the sums 4 * i to 4 * i + 3.
    for (int i = 0; i < 2; i++) {
        __m512 a = quads[2 * i], b = quads[2 * i + 1];
        halves[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    return (Floats)(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88) + _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
    __m256 parts[LANES / 8];
    for (int i = 0; i < LANES / 8; i++) {
        __m256 eight[8], four[4];
        for (int j = 0; j < 8; j++) {
            __m256 whole[2];
            memcpy(whole, v + 8 * i + j, sizeof whole);
            eight[j] = whole[0] + whole[1];
        }
        for (int j = 0; j < 4; j++) four[j] = _mm256_hadd_ps(eight[2 * j], eight[2 * j + 1]);
        __m256 first = _mm256_hadd_ps(four[0], four[1]), last = _mm256_hadd_ps(four[2], four[3]);
        parts[i] = _mm256_permute2f128_ps(first, last, 0x20) + _mm256_permute2f128_ps(first, last, 0x31);
    }
    Floats sums;
    memcpy(&sums, parts, sizeof sums);
    return sums;
#endif
}

INLINE float largest_of(Floats v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// bfloat16: the upper half of a float, rounded to nearest, ties to even. Infinity stays; NaN stays NaN.
INLINE Floats load_bf16(const uint16_t *from)
{
#if defined(__AVX512F__)
    // The compiler's own conversion takes it apart into halves.
    return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#else
    HalfWords v;
    memcpy(&v, from, sizeof v);
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}

// 32 numbers, those of even and of odd places apart: a shift and a mask, where loading them in order takes four steps.
typedef struct {
    Floats even, odd;
} Pairs;

INLINE Pairs pairs_of(Words bf16) { return (Pairs){(Floats)(bf16 << 16), (Floats)(bf16 & 0xffff0000u)}; }
INLINE Pairs load_pairs(const uint16_t *from) { return pairs_of((Words)load_bytes(from)); }

INLINE Pairs take_apart(Floats low, Floats high)
{
    return (Pairs){__builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                   __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

INLINE void put_together(Pairs pairs, Floats *low, Floats *high)
{
    *low = __builtin_shufflevector(pairs.even, pairs.odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *high = __builtin_shufflevector(pairs.even, pairs.odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

INLINE void store_bf16(uint16_t *to, Floats v)
{
    Words bits = (Words)v;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    HalfWords out = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), HalfWords);
    memcpy(to, &out, sizeof out);
}

INLINE Floats load_halves(const void *from)
{
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    __m256 parts[2];
    for (int i = 0; i < 2; i++) parts[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + i));
    Floats v;
    memcpy(&v, parts, sizeof v);
    return v;
#endif
}

// sum + the four products of each lane. Nibbles are 0 to 15, x holds four int8.
INLINE Ints dot_nibbles(Ints sum, Bytes nibbles, int32_t x)
{
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)nibbles, _mm512_set1_epi32(x));
#else
    __m256i parts[2], sums[2];
    memcpy(parts, &nibbles, sizeof parts);
    memcpy(sums, &sum, sizeof sums);
    for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
        sums[i] = _mm256_dpbusd_avx_epi32(sums[i], parts[i], _mm256_set1_epi32(x));
#else
        __m256i pairs = _mm256_maddubs_epi16(parts[i], _mm256_set1_epi32(x));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
    memcpy(&sum, sums, sizeof sum);
    return sum;
#endif
}

// The same for codes of 8 bits that stand for code - 128. Where the machine's product takes unsigned codes only, the
// caller subtracts EIGHT_BIT_EXCESS times the sum of x.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define EIGHT_BIT_EXCESS 128.0f
#else
#define EIGHT_BIT_EXCESS 0.0f
#endif
INLINE Ints dot_bytes(Ints sum, Bytes codes, int32_t x)
{
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return dot_nibbles(sum, codes, x);
#else
    __m256i parts[2], sums[2], xs = _mm256_set1_epi32(x);
    memcpy(parts, &codes, sizeof parts);
    memcpy(sums, &sum, sizeof sums);
    for (int i = 0; i < 2; i++) {
        __m256i number = _mm256_xor_si256(parts[i], _mm256_set1_epi8((char)0x80));
        // 128 * 127 * 2 still fits 16 bits.
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(xs, number));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    memcpy(&sum, sums, sizeof sum);
    return sum;
#endif
}

// sum + the two products of each lane; weights and x are pairs of bfloat16.
INLINE Floats dot_bf16(Floats sum, Bytes weights, uint32_t x)
{
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)weights, (__m512bh)_mm512_set1_epi32((int32_t)x));
#else
    union { uint32_t bits; float number; } even = {x << 16}, odd = {x & 0xffff0000u};
    Words pairs = (Words)weights;
    return sum + (Floats)(pairs << 16) * even.number + (Floats)(pairs & 0xffff0000u) * odd.number;
#endif
}

// 2^x for x <= 0 or little above; 0 below -126. Cephes' polynomial on [-1/2, 1/2], relative error 2e-7.
INLINE Floats power_of_two(Floats x)
{
    x = larger(x, all(-127.0f));
    Floats shifted = x + 12582912.0f;  // rounds to a whole number in the lowest bits
    Floats fraction = x - (shifted - 12582912.0f);
    Floats p = all(1.535336188319500e-4f);
    p = p * fraction + 1.339887440266574e-3f;
    p = p * fraction + 9.618437357674640e-3f;
    p = p * fraction + 5.550332471162809e-2f;
    p = p * fraction + 2.402264791363012e-1f;
    p = p * fraction + 6.931472028550421e-1f;
    p = p * fraction + 1.0f;
    Ints whole = (Ints)shifted - 0x4b400000;
    return p * (Floats)((whole + 127) << 23);
}

INLINE Floats silu(Floats x)
{
    // exp(-x) overflows nowhere near what matters: beyond 80, silu(x) is 0 or x.
    Floats bounded = choose(x < -80.0f, all(-80.0f), x);
    return x / (1.0f + power_of_two(larger(bounded * -1.44269504f, all(-127.0f))));
}
