// One new token of each of a few sequences: products that read each weight once, and attention over the cache.
//
// Each dot product has one fixed order of summation, so results depend neither on the number of threads nor on what
// else is in the batch. `bf16` is a constant at every call of an inline function, so branches on it cost nothing.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, BATCH = 4 };  // rows of x multiplied at a time: 16 sums in 32 registers
#define WIDEN(h) (ints)_mm512_cvtepu16_epi32((__m256i)(h))
#else
enum { LANES = 8, BATCH = 2 };  // 8 sums in 16 registers
#define WIDEN(h) (ints)_mm256_cvtepu16_epi32((__m128i)(h))
#endif
enum { ROWS = 4 };          // weight rows multiplied at a time
enum { SERIAL = 1 << 16 };  // multiplications that one thread finishes sooner than it wakes another

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

#define AT(p, i) (*(vec *)((p) + (i)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

// --- vectors of floats ---

INLINE __m128 folded(vec v) {  // the sums of lanes i, i + 4, and so on
#ifdef __AVX512F__
    __m256 half = _mm512_castps512_ps256((__m512)v) + _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
#else
    __m256 half = (__m256)v;
#endif
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

// The sum of each of four vectors. `total` adds in the same order.
INLINE __m128 totals(vec a, vec b, vec c, vec d) {
    return _mm_hadd_ps(_mm_hadd_ps(folded(a), folded(b)), _mm_hadd_ps(folded(c), folded(d)));
}

INLINE float total(vec v) { return totals(v, v, v, v)[0]; }

INLINE vec pick(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

// exp(x) for x up to 88, to 2 ulp. Anything below -87 gives exp(-87), about 1e-38. NaN stays NaN.
INLINE vec exponential(vec x) {
    const float round = 0x1.8p23f;  // adding it moves the nearest integer into the lowest bits
    x = pick(x < -87, (vec){0} - 87, x);
    vec shifted = x * 0x1.715476p0f + round, n = shifted - round;                     // x = n log 2 + r
    vec r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, power = r * (1 / 5040.f);  // exp(r) by its series
    const float factorials[] = {720, 120, 24, 6, 2, 1, 1};
    for (int i = 0; i < 7; i++) power = power + 1 / factorials[i], power = i < 6 ? power * r : power;
    return (vec)((ints)power + ((ints)shifted << 23));
}

INLINE vec sigmoid(vec x) { return 1 / (1 + exponential(pick(x < -87, (vec){0} + 87, -x))); }

// --- memory ---

// Round to nearest, ties to even. NaN stays NaN.
INLINE halves to_bf16(vec v) {
    ints bits = (ints)v, nan = v != v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), halves);
}

// `count` elements of a row of floats or of bf16 from element i on, at most LANES. The other lanes are 0.
INLINE vec load(int bf16, const void *x, int64_t i, int64_t count) {
    vec v = {0};
    halves h = {0};
    if (bf16) {
        if (count >= LANES)
            h = *(const halves *)((const uint16_t *)x + i);
        else
            memcpy(&h, (const uint16_t *)x + i, count * 2);
        return (vec)(WIDEN(h) << 16);
    }
    if (count >= LANES) return AT((const float *)x, i);
    memcpy(&v, (const float *)x + i, count * 4);
    return v;
}

INLINE void store(int bf16, void *y, int64_t i, vec v, int64_t count) {
    halves h = to_bf16(v);
    if (bf16)
        memcpy((uint16_t *)y + i, &h, MIN(count, LANES) * 2);
    else
        memcpy((float *)y + i, &v, MIN(count, LANES) * 4);
}

// --- y = x Wᵀ ---

// y[b][r] = W[r] · x[b] for `rows` rows of W from element `at` on, 1 or ROWS of them, and `batch` rows of x.
INLINE void tile(int bf16, int rows, int batch, int64_t inputs, const void *w, int64_t at, const float *x, float *y,
                 int64_t y_stride) {
    const int line = bf16 ? 32 : 16;  // weights in a cache line
    vec sums[ROWS][BATCH] = {0};
    int64_t i = 0;
    for (; i + line <= inputs; i += line) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)  // prefetch in memory's order
            __builtin_prefetch((const char *)w + (bf16 ? 2 : 4) * (at + rows * (inputs + i) + r * line));
#pragma GCC unroll 4
        for (int part = 0; part < line; part += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec weights = load(bf16, w, at + r * inputs + i + part, LANES);
                __asm__("" : "+v"(weights));  // keep it in a register: GCC would reload it for each row of x
#pragma GCC unroll 4
                for (int b = 0; b < batch; b++) sums[r][b] += weights * AT(x + b * inputs, i + part);
            }
    }
    for (; i < inputs; i += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec weights = load(bf16, w, at + r * inputs + i, inputs - i);
#pragma GCC unroll 4
            for (int b = 0; b < batch; b++) sums[r][b] += weights * load(0, x, b * inputs + i, inputs - i);
        }
#pragma GCC unroll 4
    for (int b = 0; b < batch; b++)
        if (rows == ROWS)
            _mm_storeu_ps(y + b * y_stride, totals(sums[0][b], sums[1][b], sums[2][b], sums[3][b]));
        else
            y[b * y_stride] = total(sums[0][b]);
}

INLINE void tiles(int bf16, int rows, int64_t batch, int64_t inputs, const void *w, int64_t at, const float *x,
                  float *y, int64_t y_stride) {
    for (; batch >= BATCH; batch -= BATCH, x += BATCH * inputs, y += BATCH * y_stride)
        tile(bf16, rows, BATCH, inputs, w, at, x, y, y_stride);
    for (; batch > 0; batch--, x += inputs, y += y_stride) tile(bf16, rows, 1, inputs, w, at, x, y, y_stride);
}

// Columns `begin` to `end` of y = x Wᵀ: x (batch, inputs), W (outputs, inputs), rows of y `y_stride` apart.
static __attribute__((noinline)) void multiply(int64_t bf16, int64_t batch, int64_t inputs, int64_t begin, int64_t end,
                                               const void *w, const float *x, float *y, int64_t y_stride) {
    for (int64_t rows; begin < end; begin += rows) {
        rows = begin + ROWS <= end ? ROWS : 1;
        if (bf16 && rows == ROWS)
            tiles(1, ROWS, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
        else if (bf16)
            tiles(1, 1, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
        else if (rows == ROWS)
            tiles(0, ROWS, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
        else
            tiles(0, 1, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
    }
}

// All columns, divided among the threads of the surrounding parallel region, which do not wait for each other here.
INLINE void multiply_shared(int64_t bf16, int64_t batch, int64_t inputs, int64_t outputs, const void *w, const float *x,
                            float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < outputs; o += 4 * ROWS)
        multiply(bf16, batch, inputs, o, MIN(o + 4 * ROWS, outputs), w, x, y, outputs);
}

void linear(int64_t batch, int64_t inputs, int64_t outputs, int64_t bf16, const float *x, const void *w, float *y) {
#pragma omp parallel if (inputs * outputs > SERIAL)
    multiply_shared(bf16, batch, inputs, outputs, w, x, y);
}

// The projections of attention: q, k and v of x.
void project(int64_t batch, int64_t inputs, int64_t q_width, int64_t kv_width, int64_t bf16, const float *x,
             const void *wq, const void *wk, const void *wv, float *q, float *k, float *v) {
#pragma omp parallel if (inputs * (q_width + 2 * kv_width) > SERIAL)
    {
        multiply_shared(bf16, batch, inputs, q_width, wq, x, q);
        multiply_shared(bf16, batch, inputs, kv_width, wk, x, k);
        multiply_shared(bf16, batch, inputs, kv_width, wv, x, v);
    }
}

// --- the MLP ---

// y = (silu(x Wgᵀ) · x Wuᵀ) Wdᵀ. scratch: 2 · batch · hidden floats.
void mlp(int64_t batch, int64_t inputs, int64_t hidden, int64_t outputs, int64_t bf16, const float *x, const void *gate,
         const void *up, const void *down, float *scratch, float *y) {
    float *h = scratch, *other = scratch + batch * hidden;
#pragma omp parallel if (inputs * hidden > SERIAL)
    {
#pragma omp for schedule(static)
        for (int64_t o = 0; o < hidden; o += 16) {
            int64_t end = MIN(o + 16, hidden);
            multiply(bf16, batch, inputs, o, end, gate, x, h, hidden);
            multiply(bf16, batch, inputs, o, end, up, x, other, hidden);
            for (int64_t b = 0; b < batch; b++)
                for (int64_t i = o; i < end; i += LANES) {
                    int64_t at = b * hidden + i;
                    vec g = load(0, h, at, end - i);
                    store(0, h, at, g * sigmoid(g) * load(0, other, at, end - i), end - i);
                }
        }
        multiply_shared(bf16, batch, hidden, outputs, down, h, y);
    }
}

// --- attention ---

INLINE void rotate(const float *restrict x, const float *cos, const float *sin, int64_t dim, float *restrict y) {
    for (int64_t i = 0; i < dim / 2; i++) {
        float a = x[i], b = x[i + dim / 2];
        y[i] = a * cos[i] - b * sin[i];
        y[i + dim / 2] = b * cos[i] + a * sin[i];
    }
}

// Turns `seen` scores into exp(scale · (score - the largest)), 0 up to the next whole vector. Returns their sum.
INLINE float exponentials(int64_t seen, float scale, float *scores) {
    vec top = (vec){0} - INFINITY, sums = {0};
    for (int64_t s = seen; s % LANES; s++) scores[s] = -INFINITY;
    for (int64_t s = 0; s < seen; s += LANES) top = pick(AT(scores, s) > top, AT(scores, s), top);
    float largest = top[0];
    for (int i = 1; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    for (int64_t s = 0; s < seen; s += LANES) {
        AT(scores, s) = exponential((AT(scores, s) - largest) * scale);
        for (int64_t i = seen; i < s + LANES; i++) scores[i] = 0;
        sums += AT(scores, s);
    }
    return total(sums);
}

// y = inverse · Σ weight[s] · values[s], for `count` whole vectors from feature i on, or for what is left of one.
INLINE void weighted_sum(int bf16, int count, int64_t seen, int64_t dim, const float *weights, const void *values,
                         int64_t i, float inverse, float *y) {
    vec sums[4] = {0};
    for (int64_t s = 0; s < seen; s++)
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) {
            int64_t at = i + k * LANES;
            sums[k] += weights[s] * load(bf16, values, s * dim + at, count > 1 ? LANES : dim - at);
        }
    for (int k = 0; k < count; k++) store(0, y, i + k * LANES, sums[k] * inverse, dim - i - k * LANES);
}

INLINE void average(int bf16, int64_t seen, int64_t dim, const float *weights, const void *values, float inverse,
                    float *y) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) weighted_sum(bf16, 4, seen, dim, weights, values, i, inverse, y);
    for (; i + 2 * LANES <= dim; i += 2 * LANES) weighted_sum(bf16, 2, seen, dim, weights, values, i, inverse, y);
    for (; i < dim; i += LANES) weighted_sum(bf16, 1, seen, dim, weights, values, i, inverse, y);
}

INLINE void append(int bf16, int64_t at, int64_t dim, const float *x, void *cache) {
    for (int64_t i = 0; i < dim; i += LANES) store(bf16, cache, at + i, load(0, x, i, dim - i), dim - i);
}

// Rotates q and k, appends k and v to the cache, attends to all of it, and multiplies by the output projection.
// q: (batch, heads, dim). k, v: (batch, kv_heads, dim). keys, values: (batch, kv_heads, context, dim), of which `seen`
// positions are filled. scratch: heads · (2 · dim + context + LANES) floats for each sequence.
void attend(int64_t batch, int64_t heads, int64_t kv_heads, int64_t dim, int64_t context, int64_t seen, int64_t outputs,
            int64_t cache_bf16, int64_t bf16, float scale, const float *q, const float *k, const float *v,
            const float *cos, const float *sin, void *keys, void *values, const void *w, float *scratch, float *y) {
    int64_t group = heads / kv_heads, stride = context + LANES;
    float *attended = scratch, *rotated = attended + batch * heads * dim, *scores = rotated + batch * heads * dim;
#pragma omp parallel if (outputs * heads * dim > SERIAL)
    {
#pragma omp for schedule(static)
        for (int64_t n = 0; n < batch * kv_heads; n++) {
            int64_t size = (cache_bf16 ? 2 : 4) * context * dim, first = n * group;
            char *own_keys = (char *)keys + n * size, *own_values = (char *)values + n * size;
            float *query = rotated + first * dim;
            rotate(k + n * dim, cos, sin, dim, query);
            append(cache_bf16, seen * dim, dim, query, own_keys);
            append(cache_bf16, seen * dim, dim, v + n * dim, own_values);
            for (int64_t g = 0; g < group; g++) rotate(q + (first + g) * dim, cos, sin, dim, query + g * dim);
            multiply(cache_bf16, group, dim, 0, seen + 1, own_keys, query, scores + first * stride, stride);
            for (int64_t h = first; h < first + group; h++) {
                float *weights = scores + h * stride, inverse = 1 / exponentials(seen + 1, scale, weights);
                if (cache_bf16)
                    average(1, seen + 1, dim, weights, own_values, inverse, attended + h * dim);
                else
                    average(0, seen + 1, dim, weights, own_values, inverse, attended + h * dim);
            }
        }
        multiply_shared(bf16, batch, heads * dim, outputs, w, attended, y);
    }
}
