// What gradients.py says is computed, in one pass over memory each: a row is read once and written once, and is turned
// into float in between where it is bfloat16. No result depends on the number of threads.

#include <math.h>

#include "vectors.h"

enum { BLOCK = 32 * LANES };  // features that are worked on in one go

INLINE void read(int bf16, const void *from, int64_t at, int64_t width, float *restrict to) {
    if (bf16) {
        const uint16_t *restrict half = (const uint16_t *)from + at;
        uint32_t *restrict bits = (uint32_t *)to;
        for (int64_t j = 0; j < width; j++) bits[j] = (uint32_t)half[j] << 16;
    } else
        memcpy(to, (const float *)from + at, width * sizeof(float));
}

INLINE void write(int bf16, const float *restrict from, int64_t width, void *to, int64_t at) {
    if (bf16) {  // to the nearest, ties to even; what is not a number stays none
        uint16_t *restrict half = (uint16_t *)to + at;
        const uint32_t *restrict bits = (const uint32_t *)from;
        for (int64_t j = 0; j < width; j++) {
            uint32_t nearest = (bits[j] + 0x7fff + ((bits[j] >> 16) & 1)) >> 16;
            half[j] = (bits[j] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest;
        }
    } else
        memcpy((float *)to + at, from, width * sizeof(float));
}

// Rows of `width` logits become softmax less 1 at the target; losses get -log softmax at the target.
// room: width, rounded up to a multiple of LANES, floats for each of `chunks`, into which the rows are divided.
void cross_entropy(int64_t rows, int64_t width, int64_t chunks, int64_t bf16, void *logits, const int64_t *targets,
                   float *losses, float *rooms) {
    int64_t each = (rows + chunks - 1) / chunks, stride = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(static) if (rows * width > 1 << 15)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t i = chunk * each; i < rows && i < (chunk + 1) * each; i++) {
            float *restrict row = rooms + chunk * stride;
            read(bf16, logits, i * width, width, row);
            for (int64_t j = width; j < stride; j++) row[j] = -INFINITY;
            lanes highest = AT(row, 0);
            for (int64_t j = LANES; j < stride; j += LANES) highest = pick(AT(row, j) > highest, AT(row, j), highest);
            float top = highest[0], wanted = row[targets[i]];
            for (int k = 1; k < LANES; k++) top = highest[k] > top ? highest[k] : top;

            double sum = 0;
            for (int64_t begin = 0; begin < stride; begin += BLOCK) {
                lanes some = {0};
                for (int64_t j = begin; j < stride && j < begin + BLOCK; j += LANES)
                    some += AT(row, j) = exponential(AT(row, j) - top);
                for (int k = 0; k < LANES; k++) sum += some[k];
            }
            losses[i] = (float)log(sum) - (wanted - top);
            row[targets[i]] -= (float)sum;
            float share = (float)(1 / sum);
            for (int64_t j = 0; j < stride; j += LANES) AT(row, j) *= share;
            write(bf16, row, width, logits, i * width);
        }
}

// (a, b) becomes (a cos − b sin, b cos + a sin), a and b the halves of each of a token's `heads`, which has 2 · half
// features; token i stands at position i % length. sign: −1 turns back. x and y may be the same.
void rotate(int64_t tokens, int64_t length, int64_t heads, int64_t half, int64_t bf16, int64_t sign, const void *x,
            const float *cosines, const float *sines, void *y) {
#pragma omp parallel for schedule(static) if (tokens * heads * half > 1 << 15)
    for (int64_t i = 0; i < tokens; i++) {
        const float *restrict cosine = cosines + i % length * half, *restrict sine = sines + i % length * half;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t begin = 0; begin < half; begin += BLOCK) {
                int64_t at = (i * heads + head) * 2 * half + begin, n = half - begin < BLOCK ? half - begin : BLOCK;
                float a[BLOCK], b[BLOCK], c[BLOCK], d[BLOCK];
                read(bf16, x, at, n, a), read(bf16, x, at + half, n, b);
                for (int64_t j = 0; j < n; j++) {
                    float s = sine[begin + j] * sign;
                    c[j] = a[j] * cosine[begin + j] - b[j] * s, d[j] = b[j] * cosine[begin + j] + a[j] * s;
                }
                write(bf16, c, n, y, at), write(bf16, d, n, y, at + half);
            }
    }
}

// With grad_y, the gradients of gate and up under y = silu(gate) · up; without it, y in the place of grad_gate.
void swiglu(int64_t size, int64_t bf16, const void *gate, const void *up, const void *grad_y, void *grad_gate,
            void *grad_up) {
#pragma omp parallel for schedule(static) if (size > 1 << 15)
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t n = size - begin < BLOCK ? size - begin : BLOCK;
        float g[BLOCK] = {0}, u[BLOCK] = {0}, y[BLOCK] = {0};
        read(bf16, gate, begin, n, g), read(bf16, up, begin, n, u);
        if (grad_y) read(bf16, grad_y, begin, n, y);
        for (int64_t j = 0; j < n; j += LANES) {
            lanes x = AT(g, j), small = exponential(pick(x < 0, x, -x));  // exp(−|x|)
            lanes sigmoid = pick(x < 0, small, (lanes){0} + 1) / (1 + small), silu = x * sigmoid;
            if (grad_y) {
                AT(g, j) = AT(y, j) * AT(u, j) * (sigmoid + silu * (1 - sigmoid));
                AT(u, j) = AT(y, j) * silu;
            } else
                AT(g, j) = silu * AT(u, j);
        }
        write(bf16, g, n, grad_gate, begin);
        if (grad_y) write(bf16, u, n, grad_up, begin);
    }
}
