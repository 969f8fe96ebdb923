// Cross-entropy and its gradient, row by row: a row of logits is read from memory once and written once.
// gradients.py says what is computed, and calls `cross_entropy`.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, BLOCK = 32 * LANES };  // features that are summed in float, before they go to double
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
#define AT(p, i) (*(lanes *)((p) + (i)))
#define INLINE static inline __attribute__((always_inline))

INLINE lanes pick(ints which, lanes a, lanes b) { return (lanes)((which & (ints)a) | (~which & (ints)b)); }

// exp(x) of x ≤ 0, to 2 units in the last place; what is below -87 counts as -87, whose exponential is 10^-38.
INLINE lanes exponential(lanes x) {
    const float round = 0x1.8p23f;  // added, it leaves a whole number in the last bits
    x = pick(x < -87, (lanes){0} - 87, x);
    lanes shifted = x * 0x1.715476p0f + round, n = shifted - round;         // x = n log 2 + r
    lanes r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f, power = r / 5040;  // exp r by its series
    const float factorials[] = {720, 120, 24, 6, 2, 1, 1};
    for (int i = 0; i < 7; i++) power = power + 1 / factorials[i], power = i < 6 ? power * r : power;
    return (lanes)((ints)power + ((ints)shifted << 23));
}

// Rows of `width` logits become softmax less 1 at the target; losses get -log softmax at the target.
// room: width, rounded up to a multiple of LANES, floats for each of `chunks`, into which the rows are divided.
void cross_entropy(int64_t rows, int64_t width, int64_t chunks, int32_t bf16, void *logits, const int64_t *targets,
                   float *losses, float *rooms) {
    int64_t chunk_rows = (rows + chunks - 1) / chunks, stride = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t i = 0; i < chunks * chunk_rows; i++) {
        if (i >= rows) continue;
        float *restrict row = rooms + i / chunk_rows * stride, *restrict whole = (float *)logits + i * width;
        uint16_t *restrict half = (uint16_t *)logits + i * width;
        uint32_t *restrict bits = (uint32_t *)row;
        if (bf16)
            for (int64_t j = 0; j < width; j++) bits[j] = (uint32_t)half[j] << 16;
        else
            memcpy(row, whole, width * sizeof(float));
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

        float share = (float)(1 / sum);
        row[targets[i]] -= (float)sum;
        if (bf16)
            for (int64_t j = 0; j < width; j++) {  // to the nearest, ties to even
                float value = row[j] * share;
                uint32_t word;
                memcpy(&word, &value, 4);
                half[j] = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
            }
        else
            for (int64_t j = 0; j < width; j++) whole[j] = row[j] * share;
    }
}
