// One new token of each of a few sequences, from ids to logits, by a whole pre-norm LLaMA in one call.
//
// Decoding is bound by memory: each token reads every weight once, in fp32 or bf16; everything else is fp32. Each dot
// product has one fixed order of summation, so results depend neither on the number of threads nor on what else is in
// the batch. The vectors are those of GCC and Clang; only their size and WIDEN are chosen for a processor.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, BATCH = 4 };  // rows of x multiplied at a time: 16 sums in 32 registers
#define WIDEN(h) _mm512_cvtepu16_epi32((__m256i)(h))
#else
enum { LANES = 8, BATCH = 2 };  // 8 sums in 16 registers
#define WIDEN(h) _mm256_cvtepu16_epi32((__m128i)(h))
#endif
enum { ROWS = 4, CHUNK = 16 };  // weight rows multiplied at a time, and by a thread at a time
enum { MAX_BATCH = 32 };        // as in decode.py
enum { SERIAL = 1 << 18 };      // weights that one thread reads sooner than it wakes another

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

struct layer {
    const float *attention_norm, *mlp_norm;  // dim
    const void *q, *k, *v, *o;               // (heads · head_dim, dim), (kv_heads · head_dim, dim) twice, and back
    const void *gate, *up, *down;            // (hidden, dim) twice, (dim, hidden)
    void *keys, *values;                     // (batch, kv_heads, context, head_dim)
};

struct model {  // as `Step` in decode.py fills it in
    int64_t bf16, batch, layers, dim, heads, kv_heads, head_dim, hidden, context, vocab;
    const float *embedding, *cos, *sin, *final_norm;  // (vocab, dim), (context, head_dim / 2) twice, dim
    const void *head;                                 // (vocab, dim)
    float *x, *gained;                                // (batch, dim): the residual stream, and times the next gain
    float *q, *k, *v, *attended;                      // (batch, heads or kv_heads, head_dim)
    float *scores, *inner;                            // (batch, heads, context), (batch, hidden)
    struct layer layer[];
};

// --- dot products ---

INLINE vec widen(halves h) { return (vec)((ints)WIDEN(h) << 16); }  // bf16 to floats

INLINE float total(vec v) {
    vec4 parts[LANES / 4], sums = {0};
    memcpy(parts, &v, sizeof v);
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 4; i++) sums += parts[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// `count` elements of a row of floats or of bf16 from element i on, at most LANES. The other lanes are 0.
INLINE vec load(int bf16, const void *x, int64_t i, int64_t count) {
    const void *from = (const char *)x + (bf16 ? 2 : 4) * i;
    if (count >= LANES) return bf16 ? widen(*(const halves *)from) : *(const vec *)from;
    vec v = {0};
    halves h = {0};
    memcpy(bf16 ? (void *)&h : (void *)&v, from, (bf16 ? 2 : 4) * count);
    return bf16 ? widen(h) : v;
}

// sums[r][b] += the products of `count` elements, from element i on, of row r of W and row b of x.
INLINE void accumulate(int bf16, int rows, int batch, int64_t inputs, const void *w, const float *x, int64_t i,
                       int64_t count, vec sums[ROWS][BATCH]) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        vec weights = load(bf16, w, r * inputs + i, count);
        __asm__("" : "+v"(weights));  // keep it in a register: GCC would reload it for each row of x
#pragma GCC unroll 4
        for (int b = 0; b < batch; b++) sums[r][b] += weights * load(0, x, b * inputs + i, count);
    }
}

// y[b][r] = W[r] · x[b] for `rows` rows of W, 1 or ROWS of them, and `batch` rows of x, 1 or BATCH.
INLINE void tile(int bf16, int rows, int batch, int64_t inputs, const void *w, const float *x, float *y,
                 int64_t stride) {
    const int line = bf16 ? 32 : 16;  // weights in a cache line
    vec sums[ROWS][BATCH] = {0};
    int64_t i = 0;
    for (; i + line <= inputs; i += line) {
#pragma GCC unroll 4
        for (int r = 0; rows > 1 && r < rows; r++)  // prefetch in memory's order; a single row needs no hints
            __builtin_prefetch((const char *)w + (bf16 ? 2 : 4) * (rows * (inputs + i) + r * line));
#pragma GCC unroll 4
        for (int part = 0; part < line; part += LANES)
            accumulate(bf16, rows, batch, inputs, w, x, i + part, LANES, sums);
    }
    for (; i < inputs; i += LANES) accumulate(bf16, rows, batch, inputs, w, x, i, inputs - i, sums);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < batch; b++) y[b * stride + r] = total(sums[r][b]);
}

INLINE void tiles(int bf16, int rows, int64_t batch, int64_t inputs, const void *w, const float *x, float *y,
                  int64_t stride) {
    for (; batch >= BATCH; batch -= BATCH, x += BATCH * inputs, y += BATCH * stride)
        tile(bf16, rows, BATCH, inputs, w, x, y, stride);
    for (; batch > 0; batch--, x += inputs, y += stride) tile(bf16, rows, 1, inputs, w, x, y, stride);
}

// y[b][r] = W[begin + r] · x[b] up to row `end` of W. x: (batch, inputs). Rows of y are `stride` apart.
static __attribute__((noinline)) void multiply(int64_t bf16, int64_t batch, int64_t inputs, int64_t begin, int64_t end,
                                               const void *w, const float *x, float *y, int64_t stride) {
    for (int64_t rows; begin < end; begin += rows, y += rows) {
        const void *row = (const char *)w + (bf16 ? 2 : 4) * begin * inputs;
        rows = (bf16 || batch >= BATCH) && begin + ROWS <= end ? ROWS : 1;  // for floats, one stream is faster
        if (bf16 && rows == ROWS)
            tiles(1, ROWS, batch, inputs, row, x, y, stride);
        else if (bf16)
            tiles(1, 1, batch, inputs, row, x, y, stride);
        else if (rows == ROWS)
            tiles(0, ROWS, batch, inputs, row, x, y, stride);
        else
            tiles(0, 1, batch, inputs, row, x, y, stride);
    }
}

// --- parts of a block: their columns are divided among the threads, which do not wait for each other at the end ---

// 1 / sqrt(mean(x²) + eps) of each row of the stream. With it, norm(x) W = inverse · (gained W).
INLINE void inverse_rms(const struct model *m, float eps, float *inverse) {
    for (int64_t b = 0; b < m->batch; b++) {
        const float *x = m->x + b * m->dim;
        tile(0, 1, 1, m->dim, x, x, inverse + b, 1);
        inverse[b] = 1 / sqrtf(inverse[b] / m->dim + eps);
    }
}

// y = norm(x) Wᵀ.
static void project(const struct model *m, float eps, int64_t outputs, const void *w, float *y) {
    float inverse[MAX_BATCH];
    inverse_rms(m, eps, inverse);
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < outputs; o += CHUNK) {
        int64_t end = MIN(o + CHUNK, outputs);
        multiply(m->bf16, m->batch, m->dim, o, end, w, m->gained, y + o, outputs);
        for (int64_t b = 0; b < m->batch; b++)
            for (int64_t i = o; i < end; i++) y[b * outputs + i] *= inverse[b];
    }
}

// inner = silu(norm(x) Wgᵀ) · norm(x) Wuᵀ.
static void gate_and_up(const struct model *m, float eps, const struct layer *layer) {
    float inverse[MAX_BATCH], gate[MAX_BATCH][CHUNK], up[MAX_BATCH][CHUNK];
    inverse_rms(m, eps, inverse);
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < m->hidden; o += CHUNK) {
        int64_t end = MIN(o + CHUNK, m->hidden);
        multiply(m->bf16, m->batch, m->dim, o, end, layer->gate, m->gained, gate[0], CHUNK);
        multiply(m->bf16, m->batch, m->dim, o, end, layer->up, m->gained, up[0], CHUNK);
        for (int64_t b = 0; b < m->batch; b++)
            for (int64_t i = 0; i < end - o; i++) {
                float g = gate[b][i] * inverse[b];
                m->inner[b * m->hidden + o + i] = g / (1 + expf(-g)) * (up[b][i] * inverse[b]);
            }
    }
}

// x += y Wᵀ.
static void add(const struct model *m, int64_t inputs, const void *w, const float *y, const float *gain) {
    float sums[MAX_BATCH][CHUNK];
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < m->dim; o += CHUNK) {
        int64_t end = MIN(o + CHUNK, m->dim);
        multiply(m->bf16, m->batch, inputs, o, end, w, y, sums[0], CHUNK);
        for (int64_t b = 0; b < m->batch; b++)
            for (int64_t i = o; i < end; i++) {
                m->x[b * m->dim + i] += sums[b][i - o];
                m->gained[b * m->dim + i] = m->x[b * m->dim + i] * gain[i];
            }
    }
}

// --- attention ---

INLINE void rotate(const struct model *m, int64_t seen, float scale, float *x) {
    int64_t half = m->head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i] * scale, b = x[i + half] * scale, cos = m->cos[seen * half + i], sin = m->sin[seen * half + i];
        x[i] = a * cos - b * sin;
        x[i + half] = b * cos + a * sin;
    }
}

// Element i of a row of floats or of bf16, rounded to nearest, ties to even. NaN stays NaN.
INLINE void store(int64_t bf16, void *row, int64_t i, float value) {
    union { float value; uint32_t bits; } u = {value};
    if (bf16)
        ((uint16_t *)row)[i] = value != value ? 0x7fc0 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    else
        ((float *)row)[i] = value;
}

// y += scale · row.
INLINE void add_scaled(int64_t bf16, int64_t dim, float scale, const void *row, float *y) {
    for (int64_t i = 0; i < dim; i += LANES) {
        vec sum = load(0, y, i, dim - i) + scale * load(bf16, row, i, dim - i);
        memcpy(y + i, &sum, 4 * MIN(LANES, dim - i));
    }
}

// attended[h] = softmax(keys q[h] / √D) values, of the `seen` cached tokens and the new one, which is cached here.
static void attend(const struct model *m, const struct layer *layer, int64_t seen) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads, stride = m->context;
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < m->batch * m->kv_heads; n++) {
        int64_t size = (m->bf16 ? 2 : 4) * dim;
        int64_t start = n * m->context * size;
        char *keys = (char *)layer->keys + start, *values = (char *)layer->values + start;
        rotate(m, seen, 1, m->k + n * dim);
        for (int64_t i = 0; i < dim; i++) {
            store(m->bf16, keys + seen * size, i, m->k[n * dim + i]);
            store(m->bf16, values + seen * size, i, m->v[n * dim + i]);
        }
        float *q = m->q + n * group * dim, *scores = m->scores + n * group * stride;
        for (int64_t h = 0; h < group; h++) rotate(m, seen, 1 / sqrtf(dim), q + h * dim);
        multiply(m->bf16, group, dim, 0, seen + 1, keys, q, scores, stride);
        for (int64_t h = 0; h < group; h++, scores += stride) {
            float largest = scores[0], sum = 0, *y = m->attended + (n * group + h) * dim;
            for (int64_t s = 1; s <= seen; s++) largest = scores[s] > largest ? scores[s] : largest;
            for (int64_t s = 0; s <= seen; s++) sum += scores[s] = expf(scores[s] - largest);
            memset(y, 0, 4 * dim);
            for (int64_t s = 0; s <= seen; s++) add_scaled(m->bf16, dim, scores[s] / sum, values + s * size, y);
        }
    }
}

// The token after `ids`, one for each sequence, which have `seen` tokens in the cache. Returns 0, and does nothing, if
// an id is out of range.
int decode(const struct model *m, float eps, int64_t seen, const int64_t *ids, float *logits) {
    for (int64_t b = 0; b < m->batch; b++)
        if (ids[b] < 0 || ids[b] >= m->vocab) return 0;
    for (int64_t b = 0; b < m->batch; b++)
        for (int64_t i = 0; i < m->dim; i++) {
            m->x[b * m->dim + i] = m->embedding[ids[b] * m->dim + i];
            m->gained[b * m->dim + i] = m->x[b * m->dim + i] * m->layer[0].attention_norm[i];
        }
    int64_t heads = m->heads * m->head_dim, kv_heads = m->kv_heads * m->head_dim;
#pragma omp parallel if (m->dim * (m->vocab + m->layers * m->hidden) > SERIAL)
    {
        for (const struct layer *layer = m->layer, *end = layer + m->layers; layer < end; layer++) {
            project(m, eps, heads, layer->q, m->q);
            project(m, eps, kv_heads, layer->k, m->k);
            project(m, eps, kv_heads, layer->v, m->v);
#pragma omp barrier
            attend(m, layer, seen);
#pragma omp barrier
            add(m, heads, layer->o, m->attended, layer->mlp_norm);
#pragma omp barrier
            gate_and_up(m, eps, layer);
#pragma omp barrier
            add(m, m->hidden, layer->down, m->inner, layer + 1 < end ? layer[1].attention_norm : m->final_norm);
#pragma omp barrier
        }
        project(m, eps, m->vocab, m->head, logits);
    }
    return 1;
}
