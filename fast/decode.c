// One new token of each of a few sequences: products that read each weight once, and attention over the cache.
//
// Each dot product has one fixed order of summation, so results depend neither on the number of threads nor on what
// else is in the batch.

#include "vectors.h"

enum { ROWS = 4 };  // weight rows multiplied at a time
#ifdef __AVX512F__
enum { BATCH = 4 };  // by as many rows of x: 16 sums in 32 registers
#else
enum { BATCH = 2 };  // 8 sums in 16 registers
#endif
enum { SERIAL = 1 << 16 };  // multiplications that one thread finishes sooner than it wakes another

// --- y = x Wᵀ ---

// y[b][r] = W[r] · x[b] for `rows` rows of W from element `at` on, 1 or ROWS of them, and `batch` rows of x.
INLINE void tile(int bf16, int rows, int batch, int64_t inputs, const void *w, int64_t at, const float *x, float *y,
                 int64_t y_stride) {
    const int line = bf16 ? 32 : 16;  // weights in a cache line
    vec sums[ROWS][BATCH] = {0};
    int64_t i = 0;
    for (; i + line <= inputs; i += line) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) prefetch(bf16, w, at + rows * (inputs + i) + r * line);  // in memory's order
#pragma GCC unroll 4
        for (int part = 0; part < line; part += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vec weights = load(bf16, w, at + r * inputs + i + part);
                __asm__("" : "+v"(weights));  // keep it in a register: GCC would reload it for each row of x
#pragma GCC unroll 4
                for (int b = 0; b < batch; b++) sums[r][b] += weights * AT(x + b * inputs, i + part);
            }
    }
    for (; i < inputs; i += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vec weights = load_partial(bf16, w, at + r * inputs + i, inputs - i);
#pragma GCC unroll 4
            for (int b = 0; b < batch; b++) sums[r][b] += weights * load_partial(0, x, b * inputs + i, inputs - i);
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

static __attribute__((noinline)) void multiply_fp32(int64_t batch, int64_t inputs, int64_t begin, int64_t end,
                                                    const void *w, const float *x, float *y, int64_t y_stride) {
    for (; begin + ROWS <= end; begin += ROWS) tiles(0, ROWS, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
    for (; begin < end; begin++) tiles(0, 1, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
}

static __attribute__((noinline)) void multiply_bf16(int64_t batch, int64_t inputs, int64_t begin, int64_t end,
                                                    const void *w, const float *x, float *y, int64_t y_stride) {
    for (; begin + ROWS <= end; begin += ROWS) tiles(1, ROWS, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
    for (; begin < end; begin++) tiles(1, 1, batch, inputs, w, begin * inputs, x, y + begin, y_stride);
}

// Columns `begin` to `end` of y = x Wᵀ: x (batch, inputs), W (outputs, inputs), rows of y `y_stride` apart.
INLINE void multiply(int64_t bf16, int64_t batch, int64_t inputs, int64_t begin, int64_t end, const void *w,
                     const float *x, float *y, int64_t y_stride) {
    (bf16 ? multiply_bf16 : multiply_fp32)(batch, inputs, begin, end, w, x, y, y_stride);
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

// y = (silu(x Wgᵀ) · x Wuᵀ) Wdᵀ. scratch: 2 · batch · (hidden + LANES) floats.
void mlp(int64_t batch, int64_t inputs, int64_t hidden, int64_t outputs, int64_t bf16, const float *x, const void *gate,
         const void *up, const void *down, float *scratch, float *y) {
    float *h = scratch, *other = scratch + batch * (hidden + LANES);
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
                    vec g = load_partial(0, h, at, end - i);
                    store_partial(0, h, at, g * sigmoid(g) * load_partial(0, other, at, end - i), end - i);
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
    for (int64_t s = 0; s < seen; s += LANES) top = vmax(AT(scores, s), top);
    float highest = largest(top);
    for (int64_t s = 0; s < seen; s += LANES) {
        vec exps = exponential((AT(scores, s) - highest) * scale);
        sums += AT(scores, s) = select_first(seen - s, exps, (vec){0});
    }
    return total(sums);
}

// y = inverse · Σ weight[s] · values[s], for `count` whole vectors from feature i on.
INLINE void weighted_sum(int bf16, int count, int64_t seen, int64_t dim, const float *weights, const void *values,
                         int64_t i, float inverse, float *y) {
    vec sums[4] = {0};
    for (int64_t s = 0; s < seen; s++)
#pragma GCC unroll 4
        for (int k = 0; k < count; k++) {
            int64_t at = i + k * LANES;
            sums[k] += weights[s] * load_partial(bf16, values, s * dim + at, count > 1 ? LANES : dim - at);
        }
    for (int k = 0; k < count; k++) store_partial(0, y, i + k * LANES, sums[k] * inverse, dim - i - k * LANES);
}

INLINE void average(int bf16, int64_t seen, int64_t dim, const float *weights, const void *values, float inverse,
                    float *y) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) weighted_sum(bf16, 4, seen, dim, weights, values, i, inverse, y);
    for (; i + 2 * LANES <= dim; i += 2 * LANES) weighted_sum(bf16, 2, seen, dim, weights, values, i, inverse, y);
    for (; i < dim; i += LANES) weighted_sum(bf16, 1, seen, dim, weights, values, i, inverse, y);
}

INLINE void append(int bf16, int64_t at, int64_t dim, const float *x, void *cache) {
    for (int64_t i = 0; i < dim; i += LANES)
        store_partial(bf16, cache, at + i, load_partial(0, x, i, dim - i), dim - i);
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
