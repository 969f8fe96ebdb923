// What gradients.py says is computed, in one pass over memory each. No result depends on the number of threads.

#include <math.h>

#include "vectors.h"

enum { ALONE = 1 << 15 };     // features that one thread does as soon as it could wake another
enum { BLOCK = 32 * LANES };  // exponentials that are summed in float, before they go to double
#define EACH(j, n) for (int64_t j = 0; j < (n); j += LANES)

#define NOTHING ((lanes){0} - INFINITY)

// Calls a function of one row whose first argument, whether x is bfloat16, is a constant, which makes it quick.
#define ROW(function, ...) (bf16 ? function(1, __VA_ARGS__) : function(0, __VA_ARGS__))

// --- cross-entropy ---

INLINE void cross_entropy_of(int bf16, int64_t row, int64_t width, void *logits, int64_t target, float *loss,
                             float *restrict powers) {
    int64_t at = row * width, stride = (width + LANES - 1) / LANES * LANES;
    lanes highest = NOTHING;
    EACH(j, width) {
        AT(powers, j) = until(width - j, load_some(bf16, logits, at + j, width - j), NOTHING);
        highest = larger(AT(powers, j), highest);
    }
    float top = largest(highest), wanted = powers[target];
    double sum = 0;
    for (int64_t begin = 0; begin < stride; begin += BLOCK) {
        lanes some = {0};
        for (int64_t j = begin; j < stride && j < begin + BLOCK; j += LANES)
            some += AT(powers, j) = exponential(AT(powers, j) - top);
        sum += total(some);
    }
    *loss = (float)log(sum) - (wanted - top);
    powers[target] -= (float)sum;
    float share = (float)(1 / sum);
    EACH(j, width) store_some(bf16, logits, at + j, AT(powers, j) * share, width - j);
}

// Rows of `width` logits become softmax less 1 at the target; losses get -log softmax at the target.
// room: `width`, rounded up to a multiple of LANES, floats for each of `chunks`, into which the rows are divided.
void cross_entropy(int64_t rows, int64_t width, int64_t bf16, int64_t chunks, void *logits, const int64_t *targets,
                   float *losses, float *room) {
    int64_t each = (rows + chunks - 1) / chunks, stride = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t i = chunk * each; i < rows && i < (chunk + 1) * each; i++)
            ROW(cross_entropy_of, i, width, logits, targets[i], losses + i, room + chunk * stride);
}

// --- transposition ---

// Rows become columns: each round weaves the first half of the rows into the other, and four of them do it.
INLINE void turn(lanes *square) {
    lanes woven[LANES];
    const int half = LANES / 2;
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        lanes *from = round % 2 ? woven : square, *to = round % 2 ? square : woven;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) to[i] = weave(from[i / 2], from[i / 2 + half], i % 2 * half);
    }
}

typedef struct {
    int64_t height, width, x_bf16, more_bf16, y_bf16;
    const void *x, *more;  // of the same shape
    float scale;
    void *y;
} Transposition;

INLINE lanes term(const Transposition *t, int64_t at, int64_t some) {
    lanes v = load_some(t->x_bf16, t->x, at, some);
    return (t->more ? v + load_some(t->more_bf16, t->more, at, some) : v) * t->scale;
}

// A square of x that begins at row i and column j.
INLINE void transpose_square(const Transposition *t, int64_t i, int64_t j) {
    lanes square[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) square[k] = term(t, (i + k) * t->width + j, LANES);
    turn(square);
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) store(t->y_bf16, t->y, (j + k) * t->height + i, square[k]);
}

// The rows of y are the columns of scale · (x + more); without `more` and `scale`, of x.
void transpose(int64_t rows, int64_t width, int64_t x_bf16, int64_t more_bf16, int64_t y_bf16, const void *x,
               const void *more, const float *scale, void *y) {
    const Transposition t = {rows, width, x_bf16, more_bf16, y_bf16, x, more, scale ? *scale : 1, y};
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < width; j += LANES) {
            int64_t bottom = LEAST(i + LANES, rows), right = LEAST(j + LANES, width);
            if (bottom - i == LANES && right - j == LANES)
                transpose_square(&t, i, j);
            else
                for (int64_t k = i; k < bottom; k++)
                    for (int64_t l = j; l < right; l++)
                        store_some(y_bf16, y, l * rows + k, term(&t, k * width + l, 1), 1);
        }
}

// --- rotation ---

typedef struct {
    int64_t batch, length, heads, half;  // a head has 2 · half features, one after the other
    int64_t source[3], target[3];        // how far apart sequences, tokens and heads are, in x and in y
    int64_t bf16;
    float sign;                          // -1 turns back
} Turn;

INLINE void rotate_token(int bf16, int64_t token, const Turn *t, const void *x, const float *cosines,
                         const float *sines, void *y) {
    int64_t half = t->half, b = token / t->length, i = token % t->length;
    for (int64_t head = 0; head < t->heads; head++) {
        int64_t from = b * t->source[0] + i * t->source[1] + head * t->source[2];
        int64_t to = b * t->target[0] + i * t->target[1] + head * t->target[2];
        EACH(j, half) {
            int64_t some = half - j;
            lanes a = load_some(bf16, x, from + j, some), b = load_some(bf16, x, from + half + j, some);
            lanes c = load_some(0, cosines, i * half + j, some), s = load_some(0, sines, i * half + j, some) * t->sign;
            store_some(bf16, y, to + j, a * c - b * s, some);
            store_some(bf16, y, to + half + j, b * c + a * s, some);
        }
    }
}

// (a, b) becomes (a cos - b sin, b cos + a sin), a and b the halves of each head.
void rotate(const Turn *t, const void *x, const float *cosines, const float *sines, void *y) {
    int64_t bf16 = t->bf16, tokens = t->batch * t->length;
#pragma omp parallel for schedule(static) if (tokens * t->heads * t->half > ALONE)
    for (int64_t token = 0; token < tokens; token++) ROW(rotate_token, token, t, x, cosines, sines, y);
}

// --- the gate ---

INLINE void swiglu_of(int bf16, int64_t row, int64_t width, const void *x, const void *grad_y, void *out) {
    EACH(j, width) {
        int64_t some = width - j, gate = 2 * row * width + j, up = gate + width, at = row * width + j;
        lanes g = load_some(bf16, x, gate, some), u = load_some(bf16, x, up, some);
        lanes open = sigmoid(g), silu = g * open;
        if (grad_y) {
            lanes grad = load_some(bf16, grad_y, at, some);
            store_some(bf16, out, gate, grad * u * (open + silu * (1 - open)), some);
            store_some(bf16, out, up, grad * silu, some);
        } else
            store_some(bf16, out, at, silu * u, some);
    }
}

// y = silu(gate) · up of rows x = (gate, up), each `width` wide; with grad_y, the gradient of x instead.
void swiglu(int64_t rows, int64_t width, int64_t bf16, const void *x, const void *grad_y, void *out) {
#pragma omp parallel for schedule(static) if (rows * width > ALONE)
    for (int64_t row = 0; row < rows; row++)
        if (grad_y)
            ROW(swiglu_of, row, width, x, grad_y, out);
        else
            ROW(swiglu_of, row, width, x, NULL, out);
}

// --- causal softmax ---

INLINE void causal_softmax_of(int bf16, int64_t row, int64_t length, float scale, void *scores, void *grad) {
    int64_t at = row * length, seen = row % length + 1;
    lanes highest = NOTHING, sums = {0}, products = {0};
#define SCORES(j) (load_some(bf16, scores, at + (j), length - (j)) * scale)
    EACH(j, seen) highest = larger(until(seen - j, SCORES(j), NOTHING), highest);
    float top = largest(highest);
    EACH(j, seen) sums += until(seen - j, exponential(SCORES(j) - top), (lanes){0});
    top += logf(total(sums));
    EACH(j, length) {
        lanes p = {0};
        if (j < seen) {
            p = until(seen - j, exponential(SCORES(j) - top), (lanes){0});
            products += until(seen - j, p * load_some(bf16, grad, at + j, length - j), (lanes){0});
        }
        store_some(bf16, scores, at + j, p, length - j);
    }
    float along = total(products);
    EACH(j, length) {
        lanes grad_score = {0};
        if (j < seen) {
            lanes p = load_some(bf16, scores, at + j, length - j), g = load_some(bf16, grad, at + j, length - j);
            grad_score = until(seen - j, p * (g - along) * scale, (lanes){0});
        }
        store_some(bf16, grad, at + j, grad_score, length - j);
    }
}

// Squares of scores, `length` each way, become p = softmax(scale · scores) of what a row may see, columns 0 to its own;
// the others get 0. grad, of p, becomes that of the scores.
void causal_softmax(int64_t squares, int64_t length, int64_t bf16, float scale, void *scores, void *grad) {
#pragma omp parallel for schedule(static) if (squares * length * length > ALONE)
    for (int64_t row = 0; row < squares * length; row++)
        ROW(causal_softmax_of, row, length, scale, scores, grad);
}
