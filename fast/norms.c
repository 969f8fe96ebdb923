// RMSNorm and LayerNorm. A row is read from memory once, stays in the first-level cache, and is written once.
//
// Every sum is added up in one fixed order, so results do not depend on the number of threads.

#include "vectors.h"

enum { SUMS = 4, STEP = SUMS * LANES };  // several running sums, because an addition waits for the one before it
enum { FEW = 16 };                       // rows whose gain gradients are summed in float, then added as double

typedef struct {
    float mean, r, residue;  // normalized value: (x - mean) · r - residue, which corrects the rounding of the mean
} Statistics;

INLINE double sum_of(const vec *sums) { return total_in_double((sums[0] + sums[1]) + (sums[2] + sums[3])); }

// The mean of x - pivot and of its square.
INLINE void moments(int centered, int bf16, const void *x, int64_t at, int64_t width, float pivot, double *mean,
                    double *square) {
    vec sums[SUMS] = {0}, squares[SUMS] = {0};
    int64_t j = 0;
    for (; j + STEP <= width; j += STEP) {
        for (int k = 0; k < SUMS; k++) {
            if (k % (bf16 ? 64 / LANES / 2 : 1) == 0) prefetch(bf16, x, at + width + j + k * LANES);
            vec v = load(bf16, x, at + j + k * LANES);
            if (centered) v -= pivot, sums[k] += v;
            squares[k] += v * v;
        }
    }
    for (; j < width; j += LANES) {
        vec v = load_partial(bf16, x, at + j, width - j);
        if (centered) v = select_first(width - j, v - pivot, (vec){0}), sums[0] += v;
        squares[0] += v * v;
    }
    *mean = centered ? sum_of(sums) / width : 0;
    *square = sum_of(squares) / width;
}

// Values are taken relative to the row's first element, so a constant row has variance 0. If that element is so far
// from the others that digits would cancel, a second pass takes them relative to the mean.
INLINE Statistics statistics(int centered, int bf16, const void *x, int64_t at, int64_t width, float eps) {
    float pivot = centered ? load_partial(bf16, x, at, 1)[0] : 0;
    double mean, square;
    moments(centered, bf16, x, at, width, pivot, &mean, &square);
    if (centered && mean * mean > 0.75 * square) {  // more than 3 times the variance
        pivot += mean;
        moments(centered, bf16, x, at, width, pivot, &mean, &square);
    }
    double exact = pivot + mean, variance = square - mean * mean;
    float rounded = exact, r = 1 / sqrtf((float)(variance < 0 ? 0 : variance) + eps);
    return (Statistics){rounded, r, (exact - rounded) * r};
}

INLINE vec normalized(int centered, Statistics s, vec x) {
    return centered ? (x - s.mean) * s.r - s.residue : x * s.r;
}

INLINE void forward_row(int centered, int bf16, int64_t row, int64_t width, float eps, const void *x,
                        const float *weight, const float *bias, void *y) {
    int64_t at = row * width, j = 0;
    Statistics s = statistics(centered, bf16, x, at, width, eps);
    for (; j + LANES <= width; j += LANES) {
        vec n = normalized(centered, s, load(bf16, x, at + j)) * AT(weight, j);
        store(bf16, y, at + j, centered ? n + AT(bias, j) : n);
    }
    if (j < width) {
        int64_t rest = width - j;
        vec n = normalized(centered, s, load_partial(bf16, x, at + j, rest)) * load_partial(0, weight, j, rest);
        store_partial(bf16, y, at + j, centered ? n + load_partial(0, bias, j, rest) : n, rest);
    }
}

INLINE void add_gradients(int centered, Statistics s, vec x, vec grad, vec weight, float *weight_sums,
                          float *bias_sums, vec *products, vec *sums) {
    vec n = normalized(centered, s, x), grad_n = grad * weight;
    AT(weight_sums, 0) += grad * n;
    *products += grad_n * n;
    if (centered) AT(bias_sums, 0) += grad, *sums += grad_n;
}

// Writes the row of grad_x and adds to the sums of the gradients of weight and bias.
INLINE void backward_row(int centered, int bf16, int64_t row, int64_t width, float eps, const void *x,
                         const void *grad_y, const float *weight, void *grad_x, float *weight_sums, float *bias_sums) {
    int64_t at = row * width, j = 0;
    Statistics s = statistics(centered, bf16, x, at, width, eps);
    vec sums[SUMS] = {0}, products[SUMS] = {0};
    for (; j + STEP <= width; j += STEP) {
        for (int64_t k = 0, l = j; k < SUMS; k++, l += LANES) {
            if (k % (bf16 ? 64 / LANES / 2 : 1) == 0) prefetch(bf16, grad_y, at + width + l);
            add_gradients(centered, s, load(bf16, x, at + l), load(bf16, grad_y, at + l), AT(weight, l),
                          weight_sums + l, bias_sums + l, products + k, sums + k);
        }
    }
    for (; j < width; j += LANES) {
        int64_t rest = width - j;
        vec v = load_partial(bf16, x, at + j, rest), grad = load_partial(bf16, grad_y, at + j, rest);
        add_gradients(centered, s, v, grad, load_partial(0, weight, j, rest), weight_sums + j, bias_sums + j, products,
                      sums);
    }
    // grad_x = r · (grad_n - mean(grad_n) - n · mean(grad_n · n))
    float mean = centered ? sum_of(sums) / width : 0, dot = sum_of(products) / width;
    for (j = 0; j < width; j += LANES) {
        int64_t rest = width - j;
        vec n = normalized(centered, s, load_partial(bf16, x, at + j, rest));
        vec grad_n = load_partial(bf16, grad_y, at + j, rest) * load_partial(0, weight, j, rest);
        store_partial(bf16, grad_x, at + j, (grad_n - mean - n * dot) * s.r, rest);
    }
}

#define SPECIALIZED(function, ...)                                                             \
    do {                                                                                       \
        if (centered)                                                                          \
            bf16 ? function(1, 1, __VA_ARGS__) : function(1, 0, __VA_ARGS__);                  \
        else                                                                                   \
            bf16 ? function(0, 1, __VA_ARGS__) : function(0, 0, __VA_ARGS__);                  \
    } while (0)

// y = normalized x · weight, plus bias if `centered`. Threads take `chunk` rows at a time.
void norm_forward(int64_t rows, int64_t width, int64_t chunk, int64_t centered, int64_t bf16, float eps, const void *x,
                  const float *weight, const float *bias, void *y) {
#pragma omp parallel for schedule(static) if (rows > chunk)
    for (int64_t begin = 0; begin < rows; begin += chunk)
        for (int64_t row = begin; row < MIN(begin + chunk, rows); row++)
            SPECIALIZED(forward_row, row, width, eps, x, weight, bias, y);
}

// The gradients of x, of weight and, if `centered`, of bias. Each chunk of rows has its own sums, so the number of
// chunks must not depend on that of the threads. scratch: 3 · (1 + centered) · (width rounded up to whole vectors)
// floats for each chunk, for sums in double and in float.
void norm_backward(int64_t rows, int64_t width, int64_t chunk, int64_t centered, int64_t bf16, float eps, const void *x,
                   const void *grad_y, const float *weight, void *grad_x, float *grad_weight, float *grad_bias,
                   double *scratch) {
    int64_t stride = ROUND_UP(width, LANES), gains = (1 + centered) * stride, own = gains * 3 / 2;
    int64_t chunks = (rows + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t end = MIN((c + 1) * chunk, rows);
        double *sums = scratch + c * own;
        float *few = (float *)(sums + gains);
        memset(sums, 0, own * sizeof(double));
        for (int64_t begin = c * chunk; begin < end; begin += FEW) {
            for (int64_t row = begin; row < MIN(begin + FEW, end); row++)
                SPECIALIZED(backward_row, row, width, eps, x, grad_y, weight, grad_x, few, few + stride);
            for (int64_t j = 0; j < gains; j += LANES) {
                doubles *pair = (doubles *)(sums + j);
                pair[0] += low_doubles(AT(few, j)), pair[1] += high_doubles(AT(few, j));
                AT(few, j) = (vec){0};
            }
        }
    }
    for (int64_t i = 0; i < gains; i += LANES) {
        int64_t j = i % stride;
        doubles low = {0}, high = {0};
        for (int64_t c = 0; c < chunks; c++) {
            const doubles *pair = (const doubles *)(scratch + c * own + i);
            low += pair[0], high += pair[1];
        }
        store_partial(0, i < stride ? grad_weight : grad_bias, j, to_floats(low, high), width - j);
    }
}
