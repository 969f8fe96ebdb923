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

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef double doubles __attribute__((vector_size(4 * LANES), aligned(8)));  // half as many

#define AT(p, i) (*(lanes *)((p) + (i)))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))
#define INLINE static inline __attribute__((always_inline))

enum { ONE_THREAD = 1 << 15 };  // elements that one thread finishes sooner than it wakes another

// larger, smaller: b where one of the two is NaN, as the instructions have it. weave: elements of a and b in turn, from
// the lower or the upper half of each.
#ifdef __AVX512F__
INLINE lanes larger(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE lanes smaller(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE doubles low_doubles(lanes v) { return (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
INLINE doubles high_doubles(lanes v) {
    return (doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)));
}
INLINE lanes to_floats(doubles low, doubles high) {
    __m256d narrow_low = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)low));
    __m256d narrow_high = _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)high));
    return (lanes)_mm512_insertf64x4(_mm512_castpd256_pd512(narrow_low), narrow_high, 1);
}
INLINE __m256 folded(lanes v) {  // the sums of lanes i and i + 8
    return _mm512_castps512_ps256((__m512)v) + _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
}
INLINE float largest(lanes v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE lanes weave(lanes a, lanes b, int upper) {
    const ints order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return (lanes)_mm512_permutex2var_ps((__m512)a, (__m512i)(order + 8 * upper), (__m512)b);
}
INLINE lanes widen(halves h) { return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
INLINE halves narrow(ints n) { return (halves)_mm512_cvtepi32_epi16((__m512i)n); }
#else
INLINE lanes larger(lanes a, lanes b) { return (lanes)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE lanes smaller(lanes a, lanes b) { return (lanes)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE doubles low_doubles(lanes v) { return (doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
INLINE doubles high_doubles(lanes v) { return (doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
INLINE lanes to_floats(doubles low, doubles high) {
    return (lanes)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
}
INLINE __m256 folded(lanes v) { return (__m256)v; }
INLINE float largest(lanes v) {
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}
INLINE lanes weave(lanes a, lanes b, int upper) {
    __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
    return (lanes)(upper ? _mm256_permute2f128_ps(low, high, 0x31) : _mm256_permute2f128_ps(low, high, 0x20));
}
INLINE lanes widen(halves h) { return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16); }
INLINE halves narrow(ints n) {  // of non-negative numbers below 2^16
    __m256i packed = _mm256_packus_epi32((__m256i)n, (__m256i)n);
    return (halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#endif

INLINE __m128 folded_twice(lanes v) {  // the sums of lanes i, i + 4, and so on
    return _mm256_castps256_ps128(folded(v)) + _mm256_extractf128_ps(folded(v), 1);
}

// The sum of each of four vectors. `total` adds in the same order.
INLINE __m128 totals(lanes a, lanes b, lanes c, lanes d) {
    return _mm_hadd_ps(_mm_hadd_ps(folded_twice(a), folded_twice(b)), _mm_hadd_ps(folded_twice(c), folded_twice(d)));
}

INLINE float total(lanes v) {
    __m128 pairs = _mm_hadd_ps(folded_twice(v), folded_twice(v));
    return pairs[0] + pairs[1];
}

INLINE double total_in_double(lanes v) {
    doubles sums = low_doubles(v) + high_doubles(v);
    double sum = 0;
    for (int i = 0; i < LANES / 4; i++) sum += sums[i] + sums[i + LANES / 4];
    return sum;
}

INLINE lanes pick(ints mask, lanes a, lanes b) { return (lanes)((mask & (ints)a) | (~mask & (ints)b)); }

// The first `count` lanes of v, the others of `rest`.
INLINE lanes first_of(int64_t count, lanes v, lanes rest) {
    const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return pick(*(const ints *)numbers < (int32_t)LEAST(count, LANES), v, rest);
}

// exp(x) for x up to 88, to 2 ulp. Anything below -87 gives exp(-87), about 1e-38. NaN stays NaN.
INLINE lanes exponential(lanes x) {
    const float round = 0x1.8p23f;  // adding it moves the nearest integer into the lowest bits
    x = larger((lanes){0} - 87, x);
    lanes shifted = x * 0x1.715476p0f + round, n = shifted - round;                     // x = n log 2 + r
    lanes r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, power = r * (1 / 5040.f);  // exp(r) by its series
    const float factorials[] = {720, 120, 24, 6, 2, 1, 1};
    for (int i = 0; i < 7; i++) power = power + 1 / factorials[i], power = i < 6 ? power * r : power;
    return (lanes)((ints)power + ((ints)shifted << 23));
}

INLINE lanes sigmoid(lanes x) { return 1 / (1 + exponential(smaller((lanes){0} + 87, -x))); }

// --- memory: `bf16` is a constant at every call, so the branches below cost nothing ---

// Round to nearest, ties to even. NaN stays NaN.
INLINE halves to_bf16(lanes v) {
#ifdef __AVX512BF16__  // this instruction flushes subnormal numbers to zero
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, 0x20), 1)) return (halves)_mm512_cvtneps_pbh((__m512)v);
#endif
    ints bits = (ints)v, nan = v != v;
    ints rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    return narrow((rounded & ~nan) | (nan & 0x7fc0));
}

INLINE lanes load(int bf16, const void *x, int64_t i) {
    return bf16 ? widen(*(const halves *)((const uint16_t *)x + i)) : AT((const float *)x, i);
}

INLINE void store(int bf16, void *y, int64_t i, lanes v) {
    if (bf16)
        *(halves *)((uint16_t *)y + i) = to_bf16(v);
    else
        AT((float *)y, i) = v;
}

// As above for the last `count` elements of a row, if those are fewer than LANES. The other lanes are 0.
INLINE lanes load_some(int bf16, const void *x, int64_t i, int64_t count) {
    lanes v = {0};
    halves h = {0};
    if (count >= LANES) return load(bf16, x, i);
    if (bf16) {
        memcpy(&h, (const uint16_t *)x + i, count * 2);
        return widen(h);
    }
    memcpy(&v, (const float *)x + i, count * 4);
    return v;
}

INLINE void store_some(int bf16, void *y, int64_t i, lanes v, int64_t count) {
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
