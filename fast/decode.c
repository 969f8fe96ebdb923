// One new token of each of a few sequences, from ids to logits, by a whole pre-norm LLaMA in one call.
//
// Decoding is bound by memory: each token reads every weight once, in fp32 or bf16; everything else is fp32. Rows have
// multiples of 16 elements. Sums have a fixed order: threads and other rows of the batch do not change a result.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, BATCH = 4 };  // rows of x multiplied at a time: 16 sums in 32 registers
#define WIDEN(h) _mm512_cvtepu16_epi32((__m256i)(h))
#else
enum { LANES = 8, BATCH = 2 };  // 8 sums in 16 registers
#define WIDEN(h) _mm256_cvtepu16_epi32((__m128i)(h))
#endif
enum { ROWS = 4, CHUNK = 16 };  // rows of a matrix multiplied at a time, and by a thread at a time
enum { SERIAL = 1 << 18 };      // weights that one thread reads sooner than it wakes another

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float vec4 __attribute__((vector_size(16), aligned(4)));

// The dtype of matrices and of the cache: fp32, or bf16, which is the upper half of a float.
#if BF16
typedef uint16_t weight;
typedef weight halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINE vec load(const weight *w) { return (vec)((words)WIDEN(*(const halves *)w) << 16); }

// To nearest, ties to even. NaN stays NaN.
INLINE weight rounded(float value) {
    union { float value; uint32_t bits; } u = {value};
    return value != value ? 0x7fc0 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}
#else
typedef float weight;

INLINE vec load(const weight *w) { return *(const vec *)w; }
INLINE weight rounded(float value) { return value; }
#endif

struct layer {
    const float *attention_norm, *mlp_norm;  // dim
    const weight *q, *k, *v, *o;             // (heads · head_dim, dim), (kv_heads · head_dim, dim) twice, and back
    const weight *gate, *up, *down;          // (hidden, dim) twice, (dim, hidden)
    weight *keys, *values;                   // (batch, kv_heads, context, head_dim), of the cache's context
};

struct model {  // as `Cache.plan` in decode.py fills it in
    int64_t batch, layers, dim, heads, kv_heads, head_dim, hidden, context, vocab;
    float *x;                                         // (batch, dim): the residual stream
    float *q, *k, *v, *attended;                      // (batch, heads or kv_heads, head_dim)
    float *scores, *gate, *up;                        // (batch, heads, context), (batch, hidden) twice
    const float *embedding, *cos, *sin, *final_norm;  // (vocab, dim), (positions, head_dim / 2) twice, dim
    const weight *head;                               // (vocab, dim)
    struct layer layer[];
};

// --- products ---

INLINE float total(vec v) {
    vec4 sums = {0};
    for (int i = 0; i < LANES / 4; i++) sums += ((const vec4 *)&v)[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// y[b][r] = W[r] · x[b], or += if `add`, for `rows` rows of W, 1 or ROWS of them, and `batch` rows of x, 1 or BATCH.
INLINE void tile(int add, int rows, int batch, int64_t inputs, const weight *w, const float *x, float *y,
                 int64_t stride) {
    vec sums[ROWS][BATCH] = {0};
    for (int64_t i = 0; i < inputs; i += 16) {
        // Prefetch the next rows in memory's order. A single row needs no hints.
        for (int64_t next = 0; rows > 1 && next < 16 * rows; next += 64 / sizeof *w)
            __builtin_prefetch(w + rows * (inputs + i) + next);
        for (int64_t part = i; part < i + 16; part += LANES)
            for (int r = 0; r < rows; r++) {
                vec weights = load(w + r * inputs + part);
                __asm__("" : "+v"(weights));  // keep it in a register: GCC would reload it for each row of x
                for (int b = 0; b < batch; b++) sums[r][b] += weights * *(const vec *)(x + b * inputs + part);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < batch; b++) y[b * stride + r] = (add ? y[b * stride + r] : 0) + total(sums[r][b]);
}

INLINE void tiles(int add, int rows, int64_t batch, int64_t inputs, const weight *w, const float *x, float *y,
                  int64_t stride) {
    for (; batch >= BATCH; batch -= BATCH, x += BATCH * inputs, y += BATCH * stride)
        tile(add, rows, BATCH, inputs, w, x, y, stride);
    for (; batch > 0; batch--, x += inputs, y += stride) tile(add, rows, 1, inputs, w, x, y, stride);
}

// y = x Wᵀ, or += if `add`, of (batch, inputs) and (outputs, inputs). Rows of y are `stride` apart.
static void multiply(int add, int64_t batch, int64_t inputs, int64_t outputs, const weight *w, const float *x, float *y,
                     int64_t stride) {
    int64_t r = 0;
    if (BF16 || batch >= BATCH)  // for floats, one stream is faster
        for (; r + ROWS <= outputs; r += ROWS) tiles(add, ROWS, batch, inputs, w + r * inputs, x, y + r, stride);
    for (; r < outputs; r++) tiles(add, 1, batch, inputs, w + r * inputs, x, y + r, stride);
}

// --- parts of a block: `omp for` divides them among the threads, `nowait` unless what follows needs all of it ---

static void project(int add, int64_t batch, int64_t inputs, int64_t outputs, const weight *w, const float *x,
                    float *y) {
#pragma omp for schedule(static) nowait
    for (int64_t o = 0; o < outputs; o += CHUNK)
        multiply(add, batch, inputs, outputs - o < CHUNK ? outputs - o : CHUNK, w + o * inputs, x, y + o, outputs);
}

// y = x / sqrt(mean(x²) + eps) · gain, of the whole stream: each thread has its own y, which costs less than to wait.
static void norm(const struct model *m, float eps, const float *gain, float *y) {
    for (const float *x = m->x; x < m->x + m->batch * m->dim; x += m->dim, y += m->dim) {
        vec squares = {0};
        for (int64_t i = 0; i < m->dim; i += LANES) squares += *(const vec *)(x + i) * *(const vec *)(x + i);
        float scale = 1 / sqrtf(total(squares) / m->dim + eps);
        for (int64_t i = 0; i < m->dim; i++) y[i] = x[i] * scale * gain[i];
    }
}

// gate = silu(x Wgᵀ) · x Wuᵀ.
static void gate_and_up(const struct model *m, const struct layer *layer, const float *x) {
#pragma omp for schedule(static)
    for (int64_t o = 0; o < m->hidden; o += CHUNK) {
        multiply(0, m->batch, m->dim, CHUNK, layer->gate + o * m->dim, x, m->gate + o, m->hidden);
        multiply(0, m->batch, m->dim, CHUNK, layer->up + o * m->dim, x, m->up + o, m->hidden);
        for (int64_t b = 0; b < m->batch; b++)
            for (int64_t i = b * m->hidden + o; i < b * m->hidden + o + CHUNK; i++)
                m->gate[i] *= m->up[i] / (1 + expf(-m->gate[i]));
    }
}

INLINE void rotate(const struct model *m, int64_t seen, float *x) {
    int64_t half = m->head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cos = m->cos[seen * half + i], sin = m->sin[seen * half + i];
        x[i] = a * cos - b * sin;
        x[i + half] = b * cos + a * sin;
    }
}

// attended[h] = softmax(keys q[h] / √D) values, of the `seen` cached tokens and the new one, which is cached here.
static void attend(const struct model *m, const struct layer *layer, int64_t seen) {
    int64_t dim = m->head_dim, group = m->heads / m->kv_heads;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < m->batch * m->kv_heads; n++) {
        float *q = m->q + n * group * dim, *k = m->k + n * dim, *v = m->v + n * dim;
        float *y = m->attended + n * group * dim, *scores = m->scores + n * group * m->context;
        weight *keys = layer->keys + n * m->context * dim, *values = layer->values + n * m->context * dim;
        rotate(m, seen, k);
        for (int64_t i = 0; i < dim; i++) {
            keys[seen * dim + i] = rounded(k[i]);
            values[seen * dim + i] = rounded(v[i]);
        }
        for (int64_t h = 0; h < group; h++) rotate(m, seen, q + h * dim);
        multiply(0, group, dim, seen + 1, keys, q, scores, m->context);
        for (int64_t h = 0; h < group; h++, scores += m->context, y += dim) {
            float largest = scores[0], sum = 0;
            for (int64_t s = 1; s <= seen; s++) largest = scores[s] > largest ? scores[s] : largest;
            for (int64_t s = 0; s <= seen; s++) sum += scores[s] = expf((scores[s] - largest) / sqrtf(dim));
            memset(y, 0, 4 * dim);
            for (int64_t s = 0; s <= seen; s++)
                for (int64_t i = 0; i < dim; i += LANES)
                    *(vec *)(y + i) += scores[s] / sum * load(values + s * dim + i);
        }
    }
}

// The token after `ids`, one for each sequence, which have `seen` tokens in the cache. Returns 0 for ids out of range.
int decode(const struct model *m, float eps, int64_t seen, const int64_t *ids, float *logits) {
    for (int64_t b = 0; b < m->batch; b++) {
        if (ids[b] < 0 || ids[b] >= m->vocab) return 0;
        memcpy(m->x + b * m->dim, m->embedding + ids[b] * m->dim, 4 * m->dim);
    }
    int64_t heads = m->heads * m->head_dim, kv_heads = m->kv_heads * m->head_dim;
#pragma omp parallel if (m->dim * (m->vocab + m->layers * m->hidden) > SERIAL)
    {
        float *normed = malloc(4 * m->batch * m->dim);
        for (const struct layer *layer = m->layer; layer < m->layer + m->layers; layer++) {
            norm(m, eps, layer->attention_norm, normed);
            project(0, m->batch, m->dim, heads, layer->q, normed, m->q);
            project(0, m->batch, m->dim, kv_heads, layer->k, normed, m->k);
            project(0, m->batch, m->dim, kv_heads, layer->v, normed, m->v);
#pragma omp barrier
            attend(m, layer, seen);
            project(1, m->batch, heads, m->dim, layer->o, m->attended, m->x);
#pragma omp barrier
            norm(m, eps, layer->mlp_norm, normed);
            gate_and_up(m, layer, normed);
            project(1, m->batch, m->hidden, m->dim, layer->down, m->gate, m->x);
#pragma omp barrier
        }
        norm(m, eps, m->final_norm, normed);
        project(0, m->batch, m->dim, m->vocab, m->head, normed, logits);
        free(normed);
    }
    return 1;
}
