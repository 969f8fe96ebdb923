// Forward and backward of rotation, causal softmax and cross-entropy, each in one pass over memory.
//
// Each sum belongs to one thread and has one fixed order, so results do not depend on the number of threads.

#include "vectors.h"

enum { BLOCK = 512 };  // exponentials that are summed in float before they are added as double

#define MINUS_INFINITY ((vec){0} - INFINITY)
#define FOR_VEC(j, n) for (int64_t j = 0; j < (n); j += LANES)
#define SPECIALIZED(function, ...) (bf16 ? function(1, __VA_ARGS__) : function(0, __VA_ARGS__))

// --- rotation ---

// (a, b) becomes (a cos - b sin, b cos + a sin), a and b the halves of each head; sign -1 rotates back.
// x: (batch, length, heads, 2 · half) with the given strides; y: contiguous (batch, heads, length, 2 · half).
INLINE void rotate_token(int bf16, int64_t token, int64_t length, int64_t heads, int64_t half, int64_t batch_stride,
                         int64_t token_stride, int64_t head_stride, float sign, const void *x, const float *cos,
                         const float *sin, void *y) {
    int64_t b = token / length, t = token % length;
    for (int64_t head = 0; head < heads; head++) {
        int64_t from = b * batch_stride + t * token_stride + head * head_stride;
        int64_t to = ((b * heads + head) * length + t) * 2 * half;
        FOR_VEC(j, half) {
            int64_t rest = half - j;
            vec a = load_partial(bf16, x, from + j, rest), b = load_partial(bf16, x, from + half + j, rest);
            vec c = load_partial(0, cos, t * half + j, rest), s = load_partial(0, sin, t * half + j, rest) * sign;
            store_partial(bf16, y, to + j, a * c - b * s, rest);
            store_partial(bf16, y, to + half + j, b * c + a * s, rest);
        }
    }
}

void rotate_heads(int64_t batch, int64_t length, int64_t heads, int64_t half, int64_t batch_stride,
                  int64_t token_stride, int64_t head_stride, int64_t bf16, float sign, const void *x, const float *cos,
                  const float *sin, void *y) {
#pragma omp parallel for schedule(static) if (batch * length * heads * half > ONE_THREAD)
    for (int64_t token = 0; token < batch * length; token++)
        SPECIALIZED(rotate_token, token, length, heads, half, batch_stride, token_stride, head_stride, sign, x, cos,
                    sin, y);
}

// --- causal softmax ---

INLINE void softmax_row(int bf16, int64_t row, int64_t length, float scale, void *scores, void *grad) {
    int64_t at = row * length, seen = row % length + 1;
    vec highest = MINUS_INFINITY, sums = {0}, products = {0};
#define SCORES(j) (load_partial(bf16, scores, at + (j), length - (j)) * scale)
    FOR_VEC(j, seen) highest = vmax(select_first(seen - j, SCORES(j), MINUS_INFINITY), highest);
    float top = largest(highest);
    FOR_VEC(j, seen) sums += select_first(seen - j, exponential(SCORES(j) - top), (vec){0});
    top += logf(total(sums));
    FOR_VEC(j, length) {
        vec p = {0};
        if (j < seen) {
            p = select_first(seen - j, exponential(SCORES(j) - top), (vec){0});
            products += select_first(seen - j, p * load_partial(bf16, grad, at + j, length - j), (vec){0});
        }
        store_partial(bf16, scores, at + j, p, length - j);
    }
    float dot = total(products);
    FOR_VEC(j, length) {
        vec grad_score = {0};
        if (j < seen) {
            vec p = load_partial(bf16, scores, at + j, length - j), g = load_partial(bf16, grad, at + j, length - j);
            grad_score = select_first(seen - j, p * (g - dot) * scale, (vec){0});
        }
        store_partial(bf16, grad, at + j, grad_score, length - j);
    }
}

// scores: (squares, length, length). Each row becomes p = softmax(scale · scores) over the columns up to its own
// index, 0 beyond. grad, the gradient of p, becomes that of the scores.
void causal_softmax(int64_t squares, int64_t length, int64_t bf16, float scale, void *scores, void *grad) {
#pragma omp parallel for schedule(static) if (squares * length * length > ONE_THREAD)
    for (int64_t row = 0; row < squares * length; row++) SPECIALIZED(softmax_row, row, length, scale, scores, grad);
}

// --- cross-entropy ---

INLINE void cross_entropy_row(int bf16, int64_t row, int64_t width, void *logits, const int64_t *targets,
                              float *losses, float *restrict exps) {
    int64_t at = row * width, stride = ROUND_UP(width, LANES), target = targets[row];
    vec highest = MINUS_INFINITY;
    FOR_VEC(j, width) {
        AT(exps, j) = select_first(width - j, load_partial(bf16, logits, at + j, width - j), MINUS_INFINITY);
        highest = vmax(AT(exps, j), highest);
    }
    float top = largest(highest), at_target = exps[target];
    double sum = 0;
    for (int64_t begin = 0; begin < stride; begin += BLOCK) {
        vec block = {0};
        for (int64_t j = begin; j < MIN(begin + BLOCK, stride); j += LANES)
            block += AT(exps, j) = exponential(AT(exps, j) - top);
        sum += total(block);
    }
    losses[row] = (float)log(sum) - (at_target - top);
    exps[target] -= (float)sum;
    float inverse = (float)(1 / sum);
    FOR_VEC(j, width) store_partial(bf16, logits, at + j, AT(exps, j) * inverse, width - j);
}

// losses: -log softmax(logits) at the target of each row. The logits become their gradient, softmax less 1 at the
// target. scratch: `width` floats, rounded up to whole vectors, for each of the `chunks` of rows.
void cross_entropy(int64_t rows, int64_t width, int64_t bf16, int64_t chunks, void *logits, const int64_t *targets,
                   float *losses, float *scratch) {
    int64_t each = (rows + chunks - 1) / chunks, stride = ROUND_UP(width, LANES);
#pragma omp parallel for schedule(static) if (rows * width > ONE_THREAD)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t row = chunk * each; row < MIN((chunk + 1) * each, rows); row++)
            SPECIALIZED(cross_entropy_row, row, width, logits, targets, losses, scratch + chunk * stride);
}

// --- transposition ---

INLINE vec scaled_sum(int64_t at, int64_t rest, int x_bf16, int more_bf16, const void *x, const void *more,
                        float scale) {
    vec v = load_partial(x_bf16, x, at, rest);
    return (more ? v + load_partial(more_bf16, more, at, rest) : v) * scale;
}

// y = (scale · (x + more)) transposed, x and more (rows, width). Without `more` and `scale`, x transposed.
void transpose_sum(int64_t rows, int64_t width, int64_t x_bf16, int64_t more_bf16, int64_t y_bf16, const void *x,
                   const void *more, const float *scale, void *y) {
    float factor = scale ? *scale : 1;
#pragma omp parallel for schedule(static) if (rows * width > ONE_THREAD)
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < width; j += LANES) {
            int64_t height = MIN(rows - i, LANES), rest = width - j;
            vec square[LANES], interleaved[LANES], *from = square, *to = interleaved;
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++)
                square[k] = scaled_sum((i + MIN(k, height - 1)) * width + j, rest, x_bf16, more_bf16, x, more, factor);
#pragma GCC unroll 4
            for (int step = 1; step < LANES; step *= 2) {  // each interleaves the two halves of the rows
#pragma GCC unroll 16
                for (int k = 0; k < LANES; k++) to[k] = interleave(from[k / 2], from[k / 2 + LANES / 2], k % 2);
                vec *swap = from;
                from = to, to = swap;
            }
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++)
                if (k < rest) store_partial(y_bf16, y, (j + k) * rows + i, from[k], height);
        }
}
