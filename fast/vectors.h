// Vectors of floats as wide as the processor's registers, and tensors in memory as float or as bfloat16.

#ifndef VECTORS_H
#define VECTORS_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef double doubles __attribute__((vector_size(4 * LANES), aligned(8)));  // half as many

#define AT(p, i) (*(vec *)((p) + (i)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))
#define INLINE static inline __attribute__((always_inline))

enum { ONE_THREAD = 1 << 15 };  // elements that one thread finishes sooner than it wakes another

// vmax, vmin: b where either is NaN, like the instructions. interleave: elements of a and b in turn, from the lower or
// the upper half of each.
#ifdef __AVX512F__
INLINE vec vmax(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE doubles low_doubles(vec v) { return (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
INLINE doubles high_doubles(vec v) {
    return (doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
}
INLINE vec to_floats(doubles low, doubles high) {
    __m256d narrow_low = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)low));
    __m256d narrow_high = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)high));
    return (vec)_mm512_insertf64x4(_mm512_castpd256_pd512(narrow_low), narrow_high, 1);
}
INLINE __m256 folded(vec v) {  // the sums of lanes i and i + 8
    return _mm512_castps512_ps256((__m512)v) + _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
}
INLINE float largest(vec v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE vec interleave(vec a, vec b, int upper) {
    const ints order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return (vec)_mm512_permutex2var_ps((__m512)a, (__m512i)(order + 8 * upper), (__m512)b);
}
INLINE vec widen(halves h) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
INLINE halves narrow(ints n) { return (halves)_mm512_cvtepi32_epi16((__m512i)n); }
#else
INLINE vec vmax(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE doubles low_doubles(vec v) { return (doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
INLINE doubles high_doubles(vec v) { return (doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
INLINE vec to_floats(doubles low, doubles high) {
    return (vec)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
}
INLINE __m256 folded(vec v) { return (__m256)v; }
INLINE float largest(vec v) {
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}
INLINE vec interleave(vec a, vec b, int upper) {
    __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
    return (vec)(upper ? _mm256_permute2f128_ps(low, high, 0x31) : _mm256_permute2f128_ps(low, high, 0x20));
}
INLINE vec widen(halves h) { return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16); }
INLINE halves narrow(ints n) {  // of non-negative integers below 2^16
    __m256i packed = _mm256_packus_epi32((__m256i)n, (__m256i)n);
    return (halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#endif

INLINE __m128 folded_twice(vec v) {  // the sums of lanes i, i + 4, and so on
    return _mm256_castps256_ps128(folded(v)) + _mm256_extractf128_ps(folded(v), 1);
}

// The sum of each of four vectors. `total` adds in the same order.
INLINE __m128 totals(vec a, vec b, vec c, vec d) {
    return _mm_hadd_ps(_mm_hadd_ps(folded_twice(a), folded_twice(b)), _mm_hadd_ps(folded_twice(c), folded_twice(d)));
}

INLINE float total(vec v) {
    __m128 pairs = _mm_hadd_ps(folded_twice(v), folded_twice(v));
    return pairs[0] + pairs[1];
}

INLINE double total_in_double(vec v) {
    doubles sums = low_doubles(v) + high_doubles(v);
    double sum = 0;
    for (int i = 0; i < LANES / 4; i++) sum += sums[i] + sums[i + LANES / 4];
    return sum;
}

INLINE vec pick(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

// The first `count` lanes of v, the others of `rest`.
INLINE vec select_first(int64_t count, vec v, vec rest) {
    const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return pick(*(const ints *)numbers < (int32_t)MIN(count, LANES), v, rest);
}

// exp(x) for x up to 88, to 2 ulp. Anything below -87 gives exp(-87), about 1e-38. NaN stays NaN.
INLINE vec exponential(vec x) {
    const float round = 0x1.8p23f;  // adding it moves the nearest integer into the lowest bits
    x = vmax((vec){0} - 87, x);
    vec shifted = x * 0x1.715476p0f + round, n = shifted - round;                     // x = n log 2 + r
    vec r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, power = r * (1 / 5040.f);  // exp(r) by its series
    const float factorials[] = {720, 120, 24, 6, 2, 1, 1};
    for (int i = 0; i < 7; i++) power = power + 1 / factorials[i], power = i < 6 ? power * r : power;
    return (vec)((ints)power + ((ints)shifted << 23));
}

INLINE vec sigmoid(vec x) { return 1 / (1 + exponential(vmin((vec){0} + 87, -x))); }

// --- memory: `bf16` is a constant at every call, so the branches below cost nothing ---

// Round to nearest, ties to even. NaN stays NaN.
INLINE halves to_bf16(vec v) {
#ifdef __AVX512BF16__  // this instruction flushes subnormal numbers to zero
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, 0x20), 1)) return (halves)_mm512_cvtneps_pbh((__m512)v);
#endif
    ints bits = (ints)v, nan = v != v;
    ints rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    return narrow((rounded & ~nan) | (nan & 0x7fc0));
}

INLINE vec load(int bf16, const void *x, int64_t i) {
    return bf16 ? widen(*(const halves *)((const uint16_t *)x + i)) : AT((const float *)x, i);
}

INLINE void store(int bf16, void *y, int64_t i, vec v) {
    if (bf16)
        *(halves *)((uint16_t *)y + i) = to_bf16(v);
    else
        AT((float *)y, i) = v;
}

// As above for the last `count` elements of a row, if those are fewer than LANES. The other lanes are 0.
INLINE vec load_partial(int bf16, const void *x, int64_t i, int64_t count) {
    vec v = {0};
    halves h = {0};
    if (count >= LANES) return load(bf16, x, i);
    if (bf16) {
        memcpy(&h, (const uint16_t *)x + i, count * 2);
        return widen(h);
    }
    memcpy(&v, (const float *)x + i, count * 4);
    return v;
}

INLINE void store_partial(int bf16, void *y, int64_t i, vec v, int64_t count) {
    if (count >= LANES) {
        store(bf16, y, i, v);
    } else if (bf16) {
        halves h = to_bf16(v);
        memcpy((uint16_t *)y + i, &h, count * 2);
    } else
        memcpy((float *)y + i, &v, count * 4);
}

INLINE void prefetch(int bf16, const void *x, int64_t i) { __builtin_prefetch((const char *)x + (bf16 ? 2 : 4) * i); }

#endif
