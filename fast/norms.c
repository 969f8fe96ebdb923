// The norms with statistics, row by row: a row is read from memory once, stays in the first cache while it is worked
// on, and is written once. norms/fused.py says what is computed, builds this file, and calls `forward` and `backward`.
//
// Every sum has an order that is written out, so the results depend neither on the number of threads nor on where a
// row lies in memory.

#include <math.h>

#include "../vectors.h"

enum { SUMS = 4, STEP = SUMS * LANES };  // four sums side by side, as an addition waits for the one before it
enum { FEW = 16 };                       // rows whose gain gradients are summed in float, before they go to double

typedef struct {
    int64_t rows, width;    // of x; each row is normalised by itself
    int64_t groups;         // row i has gain and bias number i % groups
    int64_t first;          // features in the mean square; all of them where the mean is subtracted
    int64_t chunk, stride;  // rows that one thread does in one go; width rounded up to a multiple of LANES
    int32_t centred, bf16;  // whether the mean is subtracted; whether x and y are bfloat16 instead of float
    float eps, floor;       // r = 1 / sqrt(max(mean square + eps, floor))
} Job;

typedef struct {
    double mean, square;  // of the features' distances from a pivot, and of the squares of these
} Moments;

typedef struct {
    float mean, r, rest;  // n = (x - mean) · r - rest, which is what rounding left of the mean, times r
    int at_floor;         // whether r no longer depends on the row
} Statistics;

// Below, `centred` and `bf16` are constants wherever a function is put in, and `some` is LANES but for a row's end.

// Start to load STEP features.
INLINE void fetch_step(int bf16, const void *x, int64_t i) {
    for (int k = 0; k < SUMS; k += 1 + bf16) fetch(bf16, x, i + k * LANES);
}

INLINE double total_of(const lanes *sums) { return total_wide(WIDEN((sums[0] + sums[1]) + (sums[2] + sums[3]))); }

// --- statistics ---

INLINE void add_moments(int centred, lanes v, float pivot, int64_t some, lanes *sum, lanes *square) {
    if (centred) v = some < LANES ? until(some, v - pivot, (lanes){0}) : v - pivot, *sum += v;
    *square += v * v;
}

INLINE Moments moments(const Job *job, int centred, int bf16, const void *x, int64_t at, float pivot) {
    int64_t first = job->first, j = 0;
    lanes sums[SUMS] = {0}, squares[SUMS] = {0};
    for (; j + STEP <= first; j += STEP) {
        fetch_step(bf16, x, at + job->width + j);
        for (int k = 0; k < SUMS; k++)
            add_moments(centred, load(bf16, x, at + j + k * LANES), pivot, LANES, sums + k, squares + k);
    }
    for (; j < first; j += LANES) {
        int64_t some = LEAST(first - j, LANES);
        add_moments(centred, load_some(bf16, x, at + j, some), pivot, some, sums, squares);
    }
    return (Moments){centred ? total_of(sums) / first : 0, total_of(squares) / first};
}

// Of the row at `at`. Where a mean is subtracted, distances are from the first feature, so that a constant row's
// variance is exactly 0; or from the mean itself, if that feature is too far away from it to leave enough digits.
INLINE Statistics statistics(const Job *job, int centred, int bf16, const void *x, int64_t at) {
    float pivot = centred ? load_some(bf16, x, at, 1)[0] : 0;
    Moments m = moments(job, centred, bf16, x, at, pivot);
    if (centred && m.mean * m.mean > 0.75 * m.square) {  // more than 3 times the variance
        pivot += m.mean;
        m = moments(job, centred, bf16, x, at, pivot);
    }
    double mean = pivot + m.mean, variance = m.square - m.mean * m.mean;
    float rounded = mean, square = (float)(variance < 0 ? 0 : variance) + job->eps;
    int at_floor = square < job->floor;
    float r = 1 / sqrtf(at_floor ? job->floor : square);
    return (Statistics){rounded, r, (mean - rounded) * r, at_floor};
}

INLINE lanes normalised(int centred, Statistics s, lanes x) {
    return centred ? (x - s.mean) * s.r - s.rest : x * s.r;
}

// --- one row ---

INLINE void forward_row(const Job *job, int centred, int bf16, const void *x, const float *weight, const float *bias,
                        void *y, int64_t i) {
    int64_t width = job->width, at = i * width, gains = i % job->groups * width;
    const float *w = weight + gains, *b = bias + gains;
    Statistics s = statistics(job, centred, bf16, x, at);
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        lanes n = normalised(centred, s, load(bf16, x, at + j));
        store(bf16, y, at + j, centred ? n * AT(w, j) + AT(b, j) : n * AT(w, j));
    }
    if (j < width) {
        int64_t some = width - j;
        lanes n = normalised(centred, s, load_some(bf16, x, at + j, some)) * load_some(0, w, j, some);
        store_some(bf16, y, at + j, centred ? n + load_some(0, b, j, some) : n, some);
    }
}

// What features j to j + some add to the gradients of gain and bias, and to the two sums of the row.
INLINE void add_gradients(int centred, Statistics s, lanes x, lanes g, lanes w, float *few_w, float *few_b,
                          lanes *along, lanes *sum) {
    lanes n = normalised(centred, s, x), grad_n = g * w;
    AT(few_w, 0) += g * n;
    *along += grad_n * n;
    if (centred) AT(few_b, 0) += g, *sum += grad_n;
}

// Adds to `few` what the row adds to the gradients of gain and, where the mean is subtracted, bias.
INLINE void backward_row(const Job *job, int centred, int bf16, const void *x, const void *grad_y, const float *weight,
                         void *grad_x, float *few, int64_t i) {
    int64_t width = job->width, first = job->first, at = i * width, group = i % job->groups;
    const float *w = weight + group * width;
    float *few_w = few + group * job->stride, *few_b = few_w + job->groups * job->stride;
    Statistics s = statistics(job, centred, bf16, x, at);

    lanes sums[SUMS] = {0}, products[SUMS] = {0};
    int64_t j = 0;
    for (; j + STEP <= width; j += STEP) {
        fetch_step(bf16, grad_y, at + width + j);
        for (int64_t k = 0, l = j; k < SUMS; k++, l += LANES)
            add_gradients(centred, s, load(bf16, x, at + l), load(bf16, grad_y, at + l), AT(w, l), few_w + l,
                          few_b + l, products + k, sums + k);
    }
    for (; j < width; j += LANES) {
        int64_t some = LEAST(width - j, LANES);
        lanes v = load_some(bf16, x, at + j, some), g = load_some(bf16, grad_y, at + j, some);
        add_gradients(centred, s, v, g, load_some(0, w, j, some), few_w + j, few_b + j, products, sums);
    }
    // grad_x = r · (grad_n − mean(grad_n) − n · mean(grad_n · n)), n only as far as its mean square was taken.
    float mean = centred ? total_of(sums) / first : 0;
    float along = s.at_floor ? 0 : total_of(products) / first;
    for (j = 0; j + LANES <= first; j += LANES) {
        lanes n = normalised(centred, s, load(bf16, x, at + j)), g = load(bf16, grad_y, at + j);
        store(bf16, grad_x, at + j, (g * AT(w, j) - mean - n * along) * s.r);
    }
    for (; j < width; j += LANES) {
        int64_t some = LEAST(width - j, LANES);
        lanes n = until(first - j, normalised(centred, s, load_some(bf16, x, at + j, some)), (lanes){0});
        lanes grad_n = load_some(bf16, grad_y, at + j, some) * load_some(0, w, j, some);
        store_some(bf16, grad_x, at + j, (grad_n - mean - n * along) * s.r, some);
    }
}

// --- all rows, in chunks ---

#define CHUNKS ((job->rows + job->chunk - 1) / job->chunk)
#define EACH_ROW(begin, end, row, ...)                                                           \
    for (int64_t i = begin; i < end; i++)                                                        \
        if (job->centred)                                                                        \
            job->bf16 ? row(job, 1, 1, __VA_ARGS__, i) : row(job, 1, 0, __VA_ARGS__, i);         \
        else                                                                                     \
            job->bf16 ? row(job, 0, 1, __VA_ARGS__, i) : row(job, 0, 0, __VA_ARGS__, i);

// y = n · weight + bias, n = r · x; gain and bias are (groups, width). There is a bias where the mean is subtracted.
void forward(const Job *job, const void *x, const float *weight, const float *bias, void *y) {
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++)
        EACH_ROW(chunk * job->chunk, LEAST((chunk + 1) * job->chunk, job->rows), forward_row, x, weight, bias, y)
}

// The gradients of x, of gain and, where the mean is subtracted, of bias.
// room: 1.5 · (1 + centred) · groups · stride for each chunk.
void backward(const Job *job, const void *x, const void *grad_y, const float *weight, void *grad_x, float *grad_weight,
              float *grad_bias, double *room) {
    int64_t each = job->groups * job->stride, gains = (1 + job->centred) * each, own = gains * 3 / 2;
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
        int64_t end = LEAST((chunk + 1) * job->chunk, job->rows), next;
        double *sums = room + chunk * own;
        float *few = (float *)(sums + gains);
        memset(sums, 0, own * sizeof(double));
        for (int64_t begin = chunk * job->chunk; begin < end; begin = next) {
            next = LEAST(begin + FEW * job->groups, end);
            EACH_ROW(begin, next, backward_row, x, grad_y, weight, grad_x, few)
            for (int64_t j = 0; j < gains; j += LANES)
                WIDE_AT(sums, j) += WIDEN(AT(few, j)), AT(few, j) = (lanes){0};
        }
    }
    for (int64_t i = 0; i < gains; i += LANES) {
        int64_t group = i % each / job->stride, j = i % job->stride;
        wide sum = {0};
        for (int64_t chunk = 0; chunk < CHUNKS; chunk++) sum += WIDE_AT(room, chunk * own + i);
        store_some(0, i < each ? grad_weight : grad_bias, group * job->width + j, __builtin_convertvector(sum, lanes),
            LEAST(job->width - j, LANES));
    }
}
