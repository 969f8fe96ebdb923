// The norms with statistics, row by row: a row is read from memory once, stays in the first cache while it is worked
// on, and is written once. norms/fused.py says what is computed, builds this file, and calls `forward` and `backward`.
//
// Every sum has an order that is written out, so the results depend neither on the number of threads nor on where a
// row lies in memory.

#include <math.h>

#include "../vectors.h"

enum { STEP = 2 * LANES };  // two vectors at a time, as an addition waits for the one before it
enum { FEW = 16 };          // rows whose gain gradients are summed in float, before they go to double
#define WIDE_AT(p, i) (*(wide *)((p) + (i)))
#define WIDEN(v) __builtin_convertvector(v, wide)
#define EACH(i, n) for (int64_t i = 0; i < (n); i += LANES)

typedef struct {
    int64_t rows, width;    // of x; each row is normalised by itself
    int64_t groups;         // row i has gain and bias number i % groups
    int64_t first;          // features in the mean square; all of them where the mean is subtracted
    int64_t chunk, stride;  // rows that one thread does in one go; width rounded up to a multiple of STEP
    int32_t centred, bf16;  // whether the mean is subtracted; whether x and y are bfloat16 instead of float
    float eps, floor;       // r = 1 / sqrt(max(mean square + eps, floor))
} Job;

typedef struct {
    const float *row;
    float mean, rest, r;  // the mean in two parts, as far as float goes and what is left
    int at_floor;         // whether r no longer depends on the row
} Prepared;

INLINE double total_of(const lanes *sums) {
    wide all = WIDEN(sums[0]) + WIDEN(sums[1]);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) all[i] += all[i + half];
    return all[0];
}

// --- between memory and rows of float, padded with zeros to `stride` ---

// Start to load what is read next: features `at` to `at` + STEP of row i.
INLINE void fetch(const Job *job, const void *x, int64_t i, int64_t at) {
    int64_t size = job->bf16 ? 2 : 4;
    for (int64_t k = 0; k < STEP * size; k += 64) __builtin_prefetch((const char *)x + (i * job->width + at) * size + k);
}

// Row i as it stands in memory, or else a copy in `room`.
INLINE const float *read_row(const Job *job, const void *x, int64_t i, float *restrict room) {
    int64_t width = job->width;
    if (job->bf16) {
        const uint16_t *restrict half = (const uint16_t *)x + i * width;
        uint32_t *restrict bits = (uint32_t *)room;
        for (int64_t j = 0; j < width; j++) bits[j] = (uint32_t)half[j] << 16;
    } else if (width == job->stride)
        return (const float *)x + i * width;
    else
        memcpy(room, (const float *)x + i * width, width * sizeof(float));
    memset(room + width, 0, (job->stride - width) * sizeof(float));
    return room;
}

// Where to put row i, for `write_row` to bring it to memory.
INLINE float *row_to_write(const Job *job, void *y, int64_t i, float *room) {
    return job->bf16 || job->width != job->stride ? room : (float *)y + i * job->width;
}

INLINE void write_row(const Job *job, void *y, int64_t i, const float *restrict row) {
    int64_t width = job->width;
    if (job->bf16) {  // to the nearest, ties to even; what is not a number stays none
        uint16_t *restrict half = (uint16_t *)y + i * width;
        const uint32_t *restrict bits = (const uint32_t *)row;
        for (int64_t j = 0; j < width; j++) {
            uint32_t nearest = (bits[j] + 0x7fff + ((bits[j] >> 16) & 1)) >> 16;
            half[j] = (bits[j] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest;
        }
    } else if (width != job->stride)
        memcpy((float *)y + i * width, row, width * sizeof(float));
}

// --- one row ---

INLINE Prepared prepare(const Job *job, int centred, const void *x, int64_t i, float *restrict room) {
    const float *row = read_row(job, x, i, room);
    int64_t first = job->first, whole = first / STEP * STEP;
    lanes sums[2] = {0}, squares[2] = {0};
    double sum = 0, square = 0;  // of what is left over by `whole`
    float mean = 0;
    if (centred) {  // the mean as a distance from the first feature, so that a constant row's is exact
        for (int64_t j = 0; j < whole; j += STEP)
            for (int k = 0; k < 2; k++) sums[k] += AT(row, j + k * LANES) - row[0];
        for (int64_t j = whole; j < first; j++) sum += row[j] - row[0];
        mean = row[0] + (sum + total_of(sums)) / first;
        sum = 0, sums[0] = sums[1] = (lanes){0};
    }
    for (int64_t j = 0; j < whole; j += STEP) {
        fetch(job, x, i + 1, j);
        for (int k = 0; k < 2; k++) {
            lanes v = AT(row, j + k * LANES) - mean;
            squares[k] += v * v;
            if (centred) sums[k] += v;
        }
    }
    for (int64_t j = whole; j < first; j++) {
        float v = row[j] - mean;
        square += v * v;
        if (centred) sum += v;
    }
    double rest = centred ? (sum + total_of(sums)) / first : 0;  // what rounding left of the mean
    double variance = (square + total_of(squares)) / first - rest * rest;
    float mean_square = (float)(variance < 0 ? 0 : variance) + job->eps;
    int at_floor = mean_square < job->floor;
    return (Prepared){row, mean, rest, 1 / sqrtf(at_floor ? job->floor : mean_square), at_floor};
}

INLINE void forward_row(const Job *job, int centred, const void *x, const float *weight, const float *bias, void *y,
                        float *room, int64_t i) {
    int64_t stride = job->stride;
    const float *w = weight + i % job->groups * stride, *b = bias + i % job->groups * stride;
    Prepared p = prepare(job, centred, x, i, room);
    float *out = row_to_write(job, y, i, room);
    if (bias)
        EACH(j, stride) AT(out, j) = (AT(p.row, j) - p.mean - p.rest) * p.r * AT(w, j) + AT(b, j);
    else
        EACH(j, stride) AT(out, j) = (AT(p.row, j) - p.mean - p.rest) * p.r * AT(w, j);
    write_row(job, y, i, out);
}

// Adds to `few` what the row adds to the gradients of gain and, where the mean is subtracted, bias.
INLINE void backward_row(const Job *job, int centred, const void *x, const void *grad_y, const float *weight,
                         void *grad_x, float *few, float *room, int64_t i) {
    int64_t stride = job->stride, first = job->first, whole = first == job->width ? stride : first / LANES * LANES;
    const float *w = weight + i % job->groups * stride;
    float *few_w = few + i % job->groups * stride, *few_b = few_w + job->groups * stride, *grad_room = room + stride;
    Prepared p = prepare(job, centred, x, i, room);
    const float *grad = read_row(job, grad_y, i, grad_room);
    float *out = row_to_write(job, grad_x, i, grad_room);

    lanes grads[2] = {0}, products[2] = {0};
    for (int64_t at = 0; at < stride; at += STEP) {
        fetch(job, grad_y, i + 1, at);
        for (int k = 0; k < 2; k++) {
            int64_t j = at + k * LANES;
            lanes n = (AT(p.row, j) - p.mean - p.rest) * p.r, g = AT(grad, j), grad_n = g * AT(w, j);
            AT(few_w, j) += g * n;
            products[k] += grad_n * n;
            if (centred) AT(few_b, j) += g, grads[k] += grad_n;
        }
    }
    // grad_x = r · (grad_n − mean(grad_n) − n · mean(grad_n · n)), n only as far as its mean square was taken.
    float mean = centred ? total_of(grads) / first : 0;
    float along = p.at_floor ? 0 : total_of(products) / first;
    EACH(j, whole) AT(out, j) = (AT(grad, j) * AT(w, j) - mean - (AT(p.row, j) - p.mean - p.rest) * p.r * along) * p.r;
    for (int64_t j = whole; j < stride; j++) out[j] = (grad[j] * w[j] - (j < first ? p.row[j] * p.r * along : 0)) * p.r;
    write_row(job, grad_x, i, out);
}

// --- all rows, in chunks ---

#define CHUNKS ((job->rows + job->chunk - 1) / job->chunk)
#define END ((chunk + 1) * job->chunk < job->rows ? (chunk + 1) * job->chunk : job->rows)

// y = n · weight + bias, n = r · x. Gain and bias have `groups` rows of `stride`; bias may be NULL.
// room: `stride` for each chunk.
void forward(const Job *job, const void *x, const float *weight, const float *bias, void *y, float *room) {
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
        float *own = room + chunk * job->stride;
        if (job->centred)
            for (int64_t i = chunk * job->chunk; i < END; i++) forward_row(job, 1, x, weight, bias, y, own, i);
        else
            for (int64_t i = chunk * job->chunk; i < END; i++) forward_row(job, 0, x, weight, bias, y, own, i);
    }
}

// The gradient of x; and those of gain and bias, in sums[0] of (chunks, 2, groups, stride).
// room: (2 + 2 · groups) · stride for each chunk.
void backward(const Job *job, const void *x, const void *grad_y, const float *weight, void *grad_x, double *sums,
              float *room) {
    int64_t gains = 2 * job->groups * job->stride;
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
        float *few = room + chunk * (gains + 2 * job->stride), *own = few + gains;
        double *all = sums + chunk * gains;
        memset(all, 0, gains * sizeof(double));
        for (int64_t begin = chunk * job->chunk; begin < END; begin += FEW * job->groups) {
            int64_t end = begin + FEW * job->groups < END ? begin + FEW * job->groups : END;
            memset(few, 0, gains * sizeof(float));
            if (job->centred)
                for (int64_t i = begin; i < end; i++) backward_row(job, 1, x, grad_y, weight, grad_x, few, own, i);
            else
                for (int64_t i = begin; i < end; i++) backward_row(job, 0, x, grad_y, weight, grad_x, few, own, i);
            EACH(j, gains) WIDE_AT(all, j) += WIDEN(AT(few, j));
        }
    }
    for (int64_t chunk = 1; chunk < CHUNKS; chunk++)
        EACH(j, gains) WIDE_AT(sums, j) += WIDE_AT(sums, chunk * gains + j);
}
