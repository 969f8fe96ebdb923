// curve(alpha · x + shift) · weight + bias, feature by feature, and its gradients, in one pass over memory each.
// norms/pointwise.py says which curves there are, makes their tables, and builds this file.
//
// Sums have an order that is written out: a few rows in float, then double, chunk by chunk. So results do not depend
// on the number of threads.

#include "../vectors.h"

enum { FEW = 16 };     // rows whose gradients are summed in float
enum { PIECES = 32 };  // of a table, each a polynomial around its middle
enum { TERMS = 7 };    // of a polynomial

// A curve f with f(-u) = -f(u), and its slope: pieces[d][k] is what piece k has before the d-th power of u's distance
// from the piece's middle, k / per_unit; that distance counted in pieces. The last piece is constant.
typedef struct {
    float pieces[TERMS][PIECES], slopes[TERMS][PIECES], per_unit;
} Curve;

typedef struct {
    int64_t rows, width, chunk, bf16;
    const Curve *curve;
    const float *alpha, *shift, *weight, *bias;  // shift may be NULL
} Job;

INLINE lanes look_up(const float *table, ints piece) {
#ifdef __AVX512F__
    return (lanes)_mm512_permutex2var_ps((__m512)AT(table, 0), (__m512i)piece, (__m512)AT(table, LANES));
#else
    lanes found;
    for (int i = 0; i < LANES; i++) found[i] = table[piece[i] & (PIECES - 1)];
    return found;
#endif
}

INLINE lanes polynomial(const float (*terms)[PIECES], ints piece, lanes at) {
    lanes sum = look_up(terms[TERMS - 1], piece);
    for (int d = TERMS - 2; d >= 0; d--) sum = sum * at + look_up(terms[d], piece);
    return sum;
}

// f(u), and f'(u) if it is wanted. What is not a number stays none.
INLINE lanes value(const Curve *curve, lanes u, lanes *slope) {
    const float round = 0x1.8p23f;  // added, it leaves the piece's number in the last bits
    ints sign = (ints)u & INT32_MIN;
    lanes x = (lanes)((ints)u ^ sign) * curve->per_unit;
    x = pick(x > PIECES - 1, (lanes){0} + (PIECES - 1), x);
    lanes shifted = x + round, at = x - (shifted - round);
    if (slope) *slope = polynomial(curve->slopes, (ints)shifted, at);
    return (lanes)((ints)polynomial(curve->pieces, (ints)shifted, at) | sign);
}

// Below, `bf16` is a constant wherever a function is put in.

INLINE void forward_some(const Job *job, int bf16, const void *x, void *y, int64_t at, int64_t j, int64_t some) {
    lanes u = load_some(bf16, x, at + j, some) * job->alpha[0] + (job->shift ? job->shift[0] : 0);
    lanes v = value(job->curve, u, 0) * load_some(0, job->weight, j, some) + load_some(0, job->bias, j, some);
    fetch(bf16, x, at + job->width + j);
    store_some(bf16, y, at + j, v, some);
}

// Adds to `few` what the row at `at` adds to the gradients of gain and bias, to `sums` the same for alpha and shift.
INLINE void backward_some(const Job *job, int bf16, const void *x, const void *grad_y, void *grad_x, int64_t at,
                          float *few, int64_t stride, lanes *sums, int64_t j, int64_t some) {
    float alpha = job->alpha[0], shift = job->shift ? job->shift[0] : 0;
    lanes v = load_some(bf16, x, at + j, some), g = load_some(bf16, grad_y, at + j, some), slope;
    fetch(bf16, x, at + job->width + j), fetch(bf16, grad_y, at + job->width + j);
    AT(few, j) += g * value(job->curve, v * alpha + shift, &slope);
    AT(few, stride + j) += g;
    lanes grad_u = g * load_some(0, job->weight, j, some) * slope;
    sums[0] += grad_u * v, sums[1] += grad_u;
    store_some(bf16, grad_x, at + j, grad_u * alpha, some);
}

#define CHUNKS ((job->rows + job->chunk - 1) / job->chunk)

void forward(const Job *job, const void *x, void *y) {
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t c = 0; c < CHUNKS; c++)
        for (int64_t i = c * job->chunk; i < LEAST((c + 1) * job->chunk, job->rows); i++)
            if (job->bf16)
                EACH_LANES(job->width, forward_some, job, 1, x, y, i * job->width)
            else
                EACH_LANES(job->width, forward_some, job, 0, x, y, i * job->width)
}

// The first of `sums` becomes the gradients of gain, bias, alpha and shift, each in `stride` places, which is the width
// rounded up to a multiple of LANES; those of alpha and shift in LANES parts.
// sums: 4 · stride for each chunk; few_rows: half of that.
void backward(const Job *job, const void *x, const void *grad_y, void *grad_x, double *all_sums,
              float *few_rows) {
    int64_t stride = (job->width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t c = 0; c < CHUNKS; c++) {
        double *sums = all_sums + c * 4 * stride;
        float *few = few_rows + c * 2 * stride;
        memset(sums, 0, 4 * stride * sizeof(double));
        memset(few, 0, 2 * stride * sizeof(float));
        int64_t begin = c * job->chunk, end = LEAST(begin + job->chunk, job->rows);
        for (int64_t i = begin; i < end; i++) {
            lanes scalars[2] = {0};
            if (job->bf16)
                EACH_LANES(job->width, backward_some, job, 1, x, grad_y, grad_x, i * job->width, few, stride, scalars)
            else
                EACH_LANES(job->width, backward_some, job, 0, x, grad_y, grad_x, i * job->width, few, stride, scalars)
            for (int k = 0; k < 2; k++) WIDE_AT(sums, (2 + k) * stride) += WIDEN(scalars[k]);
            if ((i - begin) % FEW == FEW - 1 || i == end - 1)
                for (int64_t j = 0; j < 2 * stride; j += LANES)
                    WIDE_AT(sums, j) += WIDEN(AT(few, j)), AT(few, j) = (lanes){0};
        }
    }
    for (int64_t c = 1; c < CHUNKS; c++)
        for (int64_t j = 0; j < 4 * stride; j += LANES) WIDE_AT(all_sums, j) += WIDE_AT(all_sums, c * 4 * stride + j);
}
