// One more token of a few sequences, step by step: products that read each weight once, attention to what the cache
// holds, gates, norms and sums. decode.py records the steps, and calls `play`; and `product` for a single one.
//
// All threads go through all steps. A loop after `omp for` is divided among them, what is after `omp single` is done by
// one, and at the end of either they wait for each other. Every sum has an order that is written out and is one
// thread's own, so the results do not depend on their number.

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
    const float *q, *k, *v;                // of one sequence: (heads, head_dim), (kv_heads, head_dim) twice
    int64_t q_stride, k_stride, v_stride;  // from one sequence to the next
    int64_t batch, heads, kv_heads, head_dim, layer;
    float scale;
    float *room;  // for each query, head_dim + context + LANES
} Attention;

typedef struct {
    int64_t context, seen;         // positions of the cache, and how many of them are taken
    const float *cos, *sin;        // of the new position
    float *const *keys, *const *values;  // for each layer (batch, kv_heads, context, head_dim)
} Place;

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
// y: (batch, heads, head_dim).
INLINE void attend(const Attention *a, const Place *place, float *y) {
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, context = place->context, seen = place->seen;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < a->batch * a->kv_heads; n++) {
        int64_t b = n / a->kv_heads, kv = n % a->kv_heads;
        float *keys = place->keys[a->layer] + n * context * dim, *values = place->values[a->layer] + n * context * dim;
        rotate(a->k + b * a->k_stride + kv * dim, place->cos, place->sin, dim, keys + seen * dim);
        memcpy(values + seen * dim, a->v + b * a->v_stride + kv * dim, dim * sizeof(float));
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            int64_t number = b * a->heads + h;
            float *turned = a->room + number * (dim + context + LANES);
            rotate(a->q + b * a->q_stride + h * dim, place->cos, place->sin, dim, turned);
            attend_one(turned, keys, values, seen + 1, dim, a->scale, turned + dim, y + number * dim);
        }
    }
}

// --- the gate ---

// y = silu(gate) · up, where a row of x holds `width` of the one and then of the other. x is read up to LANES too far.
INLINE void gated(int64_t rows, int64_t width, const float *x, float *y) {
    int64_t whole = (width + LANES - 1) / LANES;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows * whole; n++) {
        int64_t row = n / whole, i = n % whole * LANES;
        lanes gate = AT(x + 2 * row * width, i), up = AT(x + (2 * row + 1) * width, i);
        store_some(0, y + row * width, i, gate * sigmoid(gate) * up, LEAST(width - i, LANES));
    }
}

// --- a token ---

enum { PRODUCT, ATTENTION, GATE, NORM, SUM, SCALE };  // those from NORM on are too small to be divided
enum { MOST_GIVEN = 11 };

typedef struct {
    int64_t kind, rows, width;  // the latter of y
    const void *what;           // the Product, the Attention, or a norm's function
    const float *x, *z;
    float *y, factor;
    int64_t count, given[MOST_GIVEN];  // to a norm's function
} Step;

static void normalise(const void *function, int64_t count, const int64_t *g) {
    typedef int64_t n;
    if (count == 3) ((void (*)(n, n, n))function)(g[0], g[1], g[2]);
    if (count == 5) ((void (*)(n, n, n, n, n))function)(g[0], g[1], g[2], g[3], g[4]);
    if (count == 11)
        ((void (*)(n, n, n, n, n, n, n, n, n, n, n))function)(g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8],
                                                              g[9], g[10]);
}

static void small(const Step *s) {
    int64_t size = s->rows * s->width;
    if (s->kind == NORM) normalise(s->what, s->count, s->given);
    if (s->kind == SUM)
        for (int64_t i = 0; i < size; i++) s->y[i] = s->x[i] + s->z[i];
    if (s->kind == SCALE)
        for (int64_t i = 0; i < size; i++) s->y[i] = s->x[i] * s->factor;
}

void play(const Step *steps, int64_t count, const Place *place, int64_t multiplications) {
    const Step *end = steps + count;
#pragma omp parallel if (multiplications > ALONE)
    for (const Step *s = steps, *next; s < end; s = next) {
        next = s + 1;
        if (s->kind == PRODUCT) multiply(s->what, s->rows, s->x, s->y);
        if (s->kind == ATTENTION) attend(s->what, place, s->y);
        if (s->kind == GATE) gated(s->rows, s->width, s->x, s->y);
        if (s->kind >= NORM) {
            while (next < end && next->kind >= NORM) next++;
#pragma omp single
            for (const Step *each = s; each < next; each++) small(each);
        }
    }
}
