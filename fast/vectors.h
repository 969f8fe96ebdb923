// What the C files share: vectors of 16 floats, and how memory holds them, as float or as bfloat16.

#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef double wide __attribute__((vector_size(8 * LANES), aligned(8)));
#define AT(p, i) (*(lanes *)((p) + (i)))
#define WIDE_AT(p, i) (*(wide *)((p) + (i)))
#define WIDEN(v) __builtin_convertvector(v, wide)
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
// For each LANES features of `width`, a call of `function` with where they begin and how many they are; that is a
// constant, but for the last ones.
#define EACH_LANES(width, function, ...)                              \
    for (int64_t j = 0; j < (width); j += LANES)                      \
        (width) - j < LANES ? function(__VA_ARGS__, j, (width) - j)   \
                            : function(__VA_ARGS__, j, LANES);
#define INLINE static inline __attribute__((always_inline))

INLINE lanes pick(ints which, lanes a, lanes b) { return (lanes)((which & (ints)a) | (~which & (ints)b)); }

// The larger and the smaller of two, b where one of them is not a number; and the largest of all lanes.
#ifdef __AVX512F__  // one instruction each, which GCC 12 does not find by itself; so below
INLINE lanes larger(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE lanes smaller(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE float largest(lanes v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE lanes larger(lanes a, lanes b) { return pick(a > b, a, b); }
INLINE lanes smaller(lanes a, lanes b) { return pick(a < b, a, b); }
INLINE float largest(lanes v) {
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}
#endif

// total and total_wide: the sum of all lanes, by halves.
#define TOTAL(name, number, vector)                                           \
    INLINE number name(vector v) {                                            \
        typedef number eight __attribute__((vector_size(8 * sizeof(number)))); \
        typedef number four __attribute__((vector_size(4 * sizeof(number))));  \
        union {                                                               \
            vector all;                                                       \
            eight halves[2];                                                  \
        } in8 = {v};                                                          \
        union {                                                               \
            eight all;                                                        \
            four halves[2];                                                   \
        } in4 = {in8.halves[0] + in8.halves[1]};                              \
        four sums = in4.halves[0] + in4.halves[1];                            \
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);                     \
    }
TOTAL(total, float, lanes)
TOTAL(total_wide, double, wide)

// The numbers of a and b from `from` on by turns, eight of each.
INLINE lanes weave(lanes a, lanes b, int from) {
#ifdef __AVX512F__
    const ints order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return (lanes)_mm512_permutex2var_ps((__m512)a, (__m512i)(order + from), (__m512)b);
#else
    lanes woven;
    for (int i = 0; i < LANES / 2; i++) woven[2 * i] = a[i + from], woven[2 * i + 1] = b[i + from];
    return woven;
#endif
}

// v, and from number `some` on something else.
INLINE lanes until(int64_t some, lanes v, lanes otherwise) {
    const ints number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return pick(number < (int32_t)some, v, otherwise);
}

// exp(x) of x up to 88, to 2 units in the last place; what is below -87 counts as -87, whose exponential is 10^-38.
INLINE lanes exponential(lanes x) {
    const float round = 0x1.8p23f;  // added, it leaves a whole number in the last bits
    x = larger((lanes){0} - 87, x);
    lanes shifted = x * 0x1.715476p0f + round, n = shifted - round;                     // x = n log 2 + r
    lanes r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, power = r * (1 / 5040.f);  // exp r, a series
    const float factorials[] = {720, 120, 24, 6, 2, 1, 1};
    for (int i = 0; i < 7; i++) power = power + 1 / factorials[i], power = i < 6 ? power * r : power;
    return (lanes)((ints)power + ((ints)shifted << 23));
}

INLINE lanes sigmoid(lanes x) { return 1 / (1 + exponential(smaller((lanes){0} + 87, -x))); }

// --- bfloat16: the upper half of a float ---

#ifdef __AVX512F__
#define WIDEN_HALVES(h) (ints) _mm512_cvtepu16_epi32((__m256i)(h))
#define NARROW_INTS(n) (halves) _mm512_cvtepi32_epi16((__m512i)(n))
#else
#define WIDEN_HALVES(h) __builtin_convertvector(h, ints)
#define NARROW_INTS(n) __builtin_convertvector(n, halves)
#endif

INLINE lanes from_bf16(halves h) { return (lanes)(WIDEN_HALVES(h) << 16); }

// To the nearest, ties to even; what is not a number stays none.
INLINE halves to_bf16(lanes v) {
#ifdef __AVX512BF16__  // for its instruction, numbers below 2^-126 are zeros
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, 0x20), 1)) return (halves)_mm512_cvtneps_pbh((__m512)v);
#endif
    ints bits = (ints)v, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = v != v;
    return NARROW_INTS((nearest & ~nan) | (nan & 0x7fc0));
}

// Features i to i + LANES of a tensor in bfloat16 or float.
INLINE lanes load(int bf16, const void *x, int64_t i) {
    return bf16 ? from_bf16(*(const halves *)((const uint16_t *)x + i)) : AT((const float *)x, i);
}

INLINE void store(int bf16, void *y, int64_t i, lanes v) {
    if (bf16)
        *(halves *)((uint16_t *)y + i) = to_bf16(v);
    else
        AT((float *)y, i) = v;
}

// Start to load what stands there.
INLINE void fetch(int bf16, const void *x, int64_t i) { __builtin_prefetch((const char *)x + (bf16 ? 2 : 4) * i); }

// What `load` and `store` do where only `some` may be left, with zeros for the others.
INLINE lanes load_some(int bf16, const void *x, int64_t i, int64_t some) {
    lanes v = {0};
    halves h = {0};
    if (some >= LANES) return load(bf16, x, i);
    if (bf16) {
        memcpy(&h, (const uint16_t *)x + i, some * 2);
        return from_bf16(h);
    }
    memcpy(&v, (const float *)x + i, some * 4);
    return v;
}

INLINE void store_some(int bf16, void *y, int64_t i, lanes v, int64_t some) {
    if (some >= LANES) {
        store(bf16, y, i, v);
    } else if (bf16) {
        halves h = to_bf16(v);
        memcpy((uint16_t *)y + i, &h, some * 2);
    } else
        memcpy((float *)y + i, &v, some * 4);
}

#endif
