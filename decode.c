// One more token of a few sequences: products that read each weight once, and attention to what the cache holds.
// decode.py says what is computed, and calls `product` and `attend`.
//
// Every sum has an order that is written out and is one thread's own, so the results do not depend on their number.

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
            for (int64_t i = whole; i < inputs; i++) sum += weight(bits, row + r * inputs * size, i) * x[b * inputs + i];
            y[b * p->outputs + o + r] = bits == 8 ? sum * p->steps[o + r] : sum;
        }
}

INLINE void product_in(const Product *p, int bits, int64_t rows, const float *x, float *y) {
    int64_t whole = p->outputs / ROWS * ROWS;
#pragma omp parallel for schedule(static) if (p->outputs * p->inputs > ALONE)
    for (int64_t o = 0; o < p->outputs; o += ROWS)
        for (int64_t b = 0; b < rows; b += ROWS) {
            const float *some = x + b * p->inputs;
            float *out = y + b * p->outputs;
            int width = rows - b < ROWS ? rows - b : ROWS;
            if (o == whole)
                for (int64_t last = o; last < p->outputs; last++)
                    for (int k = 0; k < width; k++) tile(p, bits, 1, 1, some + k * p->inputs, out + k * p->outputs, last);
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

void product(const Product *p, int64_t rows, const float *x, float *y) {
    if (p->bits == 32) product_in(p, 32, rows, x, y);
    if (p->bits == 16) product_in(p, 16, rows, x, y);
    if (p->bits == 8) product_in(p, 8, rows, x, y);
}

// --- attention ---

typedef struct {
    int64_t batch, heads, kv_heads, head_dim;
    int64_t context, length;             // of the cache, (batch, kv_heads, context, head_dim); how much of it is taken
    int64_t q_stride, k_stride, v_stride;  // from one sequence to the next
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
    float largest = -__builtin_inff();
    for (int64_t s = 0; s < seen; s++) {
        const float *key = keys + s * dim;
        lanes sums = {0};
        for (int64_t i = 0; i < whole; i += LANES) sums += AT(q, i) * AT(key, i);
        float score = total(sums);
        for (int64_t i = whole; i < dim; i++) score += q[i] * key[i];
        scores[s] = score * scale;
        largest = scores[s] > largest ? scores[s] : largest;
    }
    lanes sums = {0};
    for (int64_t s = seen; s % LANES; s++) scores[s] = -__builtin_inff();
    for (int64_t s = 0; s < seen; s += LANES) {
        AT(scores, s) = exponential(AT(scores, s) - largest);
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
// y: (batch, heads, head_dim). room: for each sequence and head head_dim + context + LANES.
void attend(const Attention *a, const float *q, const float *k, const float *v, const float *cos, const float *sin,
            float *keys, float *values, float *y, float *room) {
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, each = dim + a->context + LANES;
#pragma omp parallel for schedule(static) if (a->batch * a->heads * a->length * dim > ALONE)
    for (int64_t n = 0; n < a->batch * a->kv_heads; n++) {
        int64_t b = n / a->kv_heads, kv = n % a->kv_heads;
        float *own_keys = keys + n * a->context * dim, *own_values = values + n * a->context * dim;
        rotate(k + b * a->k_stride + kv * dim, cos, sin, dim, own_keys + a->length * dim);
        memcpy(own_values + a->length * dim, v + b * a->v_stride + kv * dim, dim * sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            float *turned = room + (b * a->heads + h) * each;
            rotate(q + b * a->q_stride + h * dim, cos, sin, dim, turned);
            attend_one(turned, own_keys, own_values, a->length + 1, dim, a->scale, turned + dim,
                       y + (b * a->heads + h) * dim);
        }
    }
}
