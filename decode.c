// One more token of a few sequences: products that read each weight once, attention to what the cache holds, the MLP.
// decode.py says what is computed, and calls `product`, `attention` and `mlp`.
//
// A loop after `omp for` is divided among the threads, which wait for each other at its end. Every sum has an order
// that is written out and is one thread's own, so the results do not depend on their number.

#include <stdlib.h>

#include "vectors.h"

enum { ROWS = 4 };         // rows of weights, and of x, that are multiplied at a time
enum { ALONE = 1 << 16 };  // multiplications that one thread does as soon as it could wake another
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

// --- y = x Wᵀ ---

typedef struct {
    int64_t outputs, inputs;
    int64_t bits;        // of a weight: 32 and 16 are floats (the latter bfloat16), 8 are whole numbers
    const void *weight;  // outputs × inputs
    const float *steps;  // what each row's whole numbers count
} Product;

#ifdef __AVX512F__  // one instruction, which GCC 12 does not find by itself
#define WIDEN_BYTES(b) (ints) _mm512_cvtepi8_epi32((__m128i)(b))
#else
#define WIDEN_BYTES(b) __builtin_convertvector(b, ints)
#endif

INLINE lanes weights(int bits, const char *row, int64_t i) {
    if (bits == 32) return AT((float *)row, i);
    if (bits == 16) return load(1, row, i);
    return __builtin_convertvector(WIDEN_BYTES(*(bytes *)(row + i)), lanes);
}

INLINE float weight(int bits, const char *row, int64_t i) {
    if (bits == 8) return ((int8_t *)row)[i];
    int32_t pattern = bits == 16 ? (int32_t)((uint16_t *)row)[i] << 16 : ((int32_t *)row)[i];
    float value;
    memcpy(&value, &pattern, 4);
    return value;
}

// `height` rows of weights from number `o` on, times `width` rows of x.
INLINE void tile(const Product *p, int bits, int height, int width, const float *x, float *y, int64_t o) {
    int64_t inputs = p->inputs, whole = inputs / LANES * LANES, size = bits / 8;
    const char *row = (const char *)p->weight + o * inputs * size;
    lanes sums[ROWS][ROWS] = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int r = 0; r < height; r++) {
            lanes w = weights(bits, row + r * inputs * size, i);
            __builtin_prefetch(row + (r + size * height) * inputs * size + i * size);
            for (int b = 0; b < width; b++) sums[r][b] += w * AT(x + b * inputs, i);
        }
    for (int r = 0; r < height; r++)
        for (int b = 0; b < width; b++) {
            float sum = total(sums[r][b]);
            for (int64_t i = whole; i < inputs; i++)
                sum += weight(bits, row + r * inputs * size, i) * x[b * inputs + i];
            y[b * p->outputs + o + r] = bits == 8 ? sum * p->steps[o + r] : sum;
        }
}

INLINE void product_in(const Product *p, int bits, int64_t rows, const float *x, float *y) {
    int64_t whole = p->outputs / ROWS * ROWS;
#pragma omp for schedule(static)
    for (int64_t o = 0; o < p->outputs; o += ROWS)
        for (int64_t b = 0; b < rows; b += ROWS) {
            const float *some = x + b * p->inputs;
            float *out = y + b * p->outputs;
            int width = rows - b < ROWS ? rows - b : ROWS;
            if (o == whole)
                for (int64_t end = o; end < p->outputs; end++)
                    for (int k = 0; k < width; k++) tile(p, bits, 1, 1, some + k * p->inputs, out + k * p->outputs, end);
            else if (width == 1)
                tile(p, bits, ROWS, 1, some, out, o);
            else if (width == 2)
                tile(p, bits, ROWS, 2, some, out, o);
            else if (width == 3)
                tile(p, bits, ROWS, 3, some, out, o);
            else
                tile(p, bits, ROWS, ROWS, some, out, o);
        }
}

static void multiply(const Product *p, int64_t rows, const float *x, float *y) {
    if (p->bits == 32) product_in(p, 32, rows, x, y);
    if (p->bits == 16) product_in(p, 16, rows, x, y);
    if (p->bits == 8) product_in(p, 8, rows, x, y);
}

void product(const Product *p, int64_t rows, const float *x, float *y) {
#pragma omp parallel if (p->outputs * p->inputs > ALONE)
    multiply(p, rows, x, y);
}

// --- attention ---

typedef struct {
    const Product *qkv, *out;  // none where x is the product already, or y shall not be multiplied yet
    int64_t heads, kv_heads, head_dim;
    float scale;
} Attention;

INLINE void rotate(const float *restrict x, const float *cos, const float *sin, int64_t dim, float *restrict y) {
    for (int64_t i = 0; i < dim / 2; i++) {
        float a = x[i], b = x[i + dim / 2];
        y[i] = a * cos[i] - b * sin[i];
        y[i + dim / 2] = b * cos[i] + a * sin[i];
    }
}

// One query's attention to `seen` keys and values. `scores` has room for them, rounded up to whole vectors.
INLINE void attend_one(const float *q, const float *keys, const float *values, int64_t seen, int64_t dim, float scale,
                       float *scores, float *y) {
    int64_t whole = dim / LANES * LANES;
    float top = -__builtin_inff();
    for (int64_t s = 0; s < seen; s++) {
        const float *key = keys + s * dim;
        lanes sums = {0};
        for (int64_t i = 0; i < whole; i += LANES) sums += AT(q, i) * AT(key, i);
        float score = total(sums);
        for (int64_t i = whole; i < dim; i++) score += q[i] * key[i];
        scores[s] = score * scale;
        top = scores[s] > top ? scores[s] : top;
    }
    lanes sums = {0};
    for (int64_t s = seen; s % LANES; s++) scores[s] = -__builtin_inff();
    for (int64_t s = 0; s < seen; s += LANES) {
        AT(scores, s) = exponential(AT(scores, s) - top);
        sums += AT(scores, s);
    }
    float share = 1 / total(sums);
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes mean = {0};
        for (int64_t s = 0; s < seen; s++) mean += scores[s] * AT(values + s * dim, i);
        AT(y, i) = mean * share;
    }
    for (int64_t i = whole; i < dim; i++) {
        float mean = 0;
        for (int64_t s = 0; s < seen; s++) mean += scores[s] * values[s * dim + i];
        y[i] = mean * share;
    }
}

// Turns queries and keys by their position's angle, adds keys and values to the cache, attends to all there.
// qkv: (batch, heads + 2 kv_heads, head_dim). y: (batch, heads, head_dim). room: for each head head_dim + seen + LANES.
INLINE void attend(const Attention *a, int64_t batch, int64_t context, int64_t seen, const float *qkv, const float *cos,
                   const float *sin, float *keys, float *values, float *y, float *room) {
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < batch * a->kv_heads; n++) {
        int64_t b = n / a->kv_heads, kv = n % a->kv_heads;
        const float *q = qkv + b * (a->heads + 2 * a->kv_heads) * dim, *k = q + (a->heads + kv) * dim;
        float *own_keys = keys + n * context * dim, *own_values = values + n * context * dim;
        rotate(k, cos, sin, dim, own_keys + seen * dim);
        memcpy(own_values + seen * dim, k + a->kv_heads * dim, dim * sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            int64_t number = b * a->heads + h;
            float *turned = room + number * (dim + seen + LANES);
            rotate(q + h * dim, cos, sin, dim, turned);
            attend_one(turned, own_keys, own_values, seen + 1, dim, a->scale, turned + dim, y + number * dim);
        }
    }
}

// x: (batch, 1, inputs). keys, values: (batch, kv_heads, context, head_dim), of which `seen` positions are taken.
void attention(const Attention *a, int64_t batch, int64_t context, int64_t seen, const float *x, const float *cos,
               const float *sin, float *keys, float *values, float *y) {
    int64_t dim = a->head_dim, heads = batch * a->heads, all = heads + 2 * batch * a->kv_heads;
    float *room = malloc((all * dim + heads * (2 * dim + seen + LANES)) * sizeof(float));
    float *qkv = room, *mixed = qkv + all * dim, *scores = mixed + heads * dim;
#pragma omp parallel if (heads * dim * (seen + (a->qkv ? a->qkv->inputs : 0)) > ALONE)
    {
        if (a->qkv) multiply(a->qkv, batch, x, qkv);
        attend(a, batch, context, seen, a->qkv ? qkv : x, cos, sin, keys, values, a->out ? mixed : y, scores);
        if (a->out) multiply(a->out, batch, mixed, y);
    }
    free(room);
}

// --- down(silu(gate(x)) · up(x)) ---

// silu(gate) · up, where a row of `both` holds `width` of the one and then of the other.
INLINE void gated(int64_t rows, int64_t width, const float *both, float *y) {
    int64_t whole = (width + LANES - 1) / LANES;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows * whole; n++) {
        int64_t row = n / whole, i = n % whole * LANES;
        lanes gate = AT(both + 2 * row * width, i), up = AT(both + (2 * row + 1) * width, i);
        store_some(0, y + row * width, i, gate * sigmoid(gate) * up, width - i < LANES ? width - i : LANES);
    }
}

void mlp(const Product *gate_up, const Product *down, int64_t rows, const float *x, float *y) {
    int64_t width = down->inputs;
    float *both = malloc((3 * rows * width + LANES) * sizeof(float)), *inner = both + 2 * rows * width;
#pragma omp parallel if (gate_up->outputs * gate_up->inputs > ALONE)
    {
        multiply(gate_up, rows, x, both);
        gated(rows, width, both, inner);
        multiply(down, rows, inner, y);
    }
    free(both);
}
