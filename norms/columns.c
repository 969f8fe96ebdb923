// Sums over all rows for each column of a matrix, and sums of matrices scaled column by column. norms/columns.py says
// what for, and builds this file.
//
// Sums have an order that is written out: a few rows in float, then double, chunk by chunk. So results do not depend
// on the number of threads.

#include "../vectors.h"

enum { FEW = 16 };  // rows that are summed in float
#define CHUNKS ((rows + chunk - 1) / chunk)

// Below, `with_g` and `bf16` are constants wherever a function is put in.

// Adds what rows `begin` to `end` of `some` columns from j on have to add.
INLINE void add_columns(int with_g, int bf16, int64_t width, const void *x, const float *pivot, const void *g,
                        int64_t begin, int64_t end, double *sums, double *products, int64_t j, int64_t some) {
    lanes from = load_some(0, pivot, j, some), sum = {0}, product = {0};
    for (int64_t at = begin * width + j; at < end * width; at += width) {
        lanes d = load_some(bf16, x, at, some) - from, v = with_g ? load_some(bf16, g, at, some) : d;
        fetch(bf16, x, at + FEW * width);
        if (with_g) fetch(bf16, g, at + FEW * width);
        sum += v, product += v * d;
    }
    WIDE_AT(sums, j) += WIDEN(sum), WIDE_AT(products, j) += WIDEN(product);
}

INLINE void add(int with_g, int bf16, int64_t width, const void *x, const float *pivot, const void *g, int64_t begin,
                int64_t end, double *sums, double *products) {
    EACH_LANES(width, add_columns, with_g, bf16, width, x, pivot, g, begin, end, sums, products)
}

// Of each column, Σ v and Σ v · (x − pivot), v being g; without g, v is x − pivot. sums: (2, stride), stride being
// width rounded up to a multiple of LANES, for each chunk of rows; the first holds the result.
void column_sums(int64_t rows, int64_t width, int64_t chunk, int64_t bf16, const void *x, const float *pivot,
                 const void *g, double *sums) {
    int64_t stride = (width + LANES - 1) / LANES * LANES;
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t c = 0; c < CHUNKS; c++) {
        double *own = sums + c * 2 * stride, *products = own + stride;
        memset(own, 0, 2 * stride * sizeof(double));
        int64_t last = LEAST((c + 1) * chunk, rows), end;
        for (int64_t begin = c * chunk; begin < last; begin = end) {
            end = LEAST(begin + FEW, last);
            if (g)
                bf16 ? add(1, 1, width, x, pivot, g, begin, end, own, products)
                     : add(1, 0, width, x, pivot, g, begin, end, own, products);
            else
                bf16 ? add(0, 1, width, x, pivot, g, begin, end, own, products)
                     : add(0, 0, width, x, pivot, g, begin, end, own, products);
        }
    }
    for (int64_t c = 1; c < CHUNKS; c++)
        for (int64_t j = 0; j < 2 * stride; j += LANES) WIDE_AT(sums, j) += WIDE_AT(sums, c * 2 * stride + j);
}

INLINE void combine_columns(int with_g, int bf16, const void *x, const float *mean, const float *scale,
                            const float *shift, const void *g, const float *gain, void *y, int64_t at, int64_t j,
                            int64_t some) {
    lanes d = load_some(bf16, x, at + j, some) - load_some(0, mean, j, some);
    lanes v = d * load_some(0, scale, j, some) + load_some(0, shift, j, some);
    if (with_g) v += load_some(bf16, g, at + j, some) * load_some(0, gain, j, some);
    store_some(bf16, y, at + j, v, some);
}

// y = (x − mean) · scale + shift, and + g · gain, column by column.
void combine(int64_t rows, int64_t width, int64_t chunk, int64_t bf16, const void *x, const float *mean,
             const float *scale, const float *shift, const void *g, const float *gain, void *y) {
#pragma omp parallel for schedule(static) if (CHUNKS > 1)
    for (int64_t c = 0; c < CHUNKS; c++)
        for (int64_t at = c * chunk * width; at < LEAST((c + 1) * chunk, rows) * width; at += width)
            if (g && bf16)
                EACH_LANES(width, combine_columns, 1, 1, x, mean, scale, shift, g, gain, y, at)
            else if (g)
                EACH_LANES(width, combine_columns, 1, 0, x, mean, scale, shift, g, gain, y, at)
            else if (bf16)
                EACH_LANES(width, combine_columns, 0, 1, x, mean, scale, shift, g, gain, y, at)
            else
                EACH_LANES(width, combine_columns, 0, 0, x, mean, scale, shift, g, gain, y, at)
}
