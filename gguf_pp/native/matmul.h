/* Kernels of y = x Wᵀ, one set per instruction level.
 *
 * An output depends on its row of x and its row of W alone: every reduction has one order, whatever
 * the number of rows in a call. */
#ifndef GGUF_PP_MATMUL_H
#define GGUF_PP_MATMUL_H

#include "isa.h"
#include "planes.h"

enum { DOT_ROWS = 4 };

/* 32 activations: x = d q; sum is d times the sum of q, half_sums of its halves. */
struct activations {
    float d, sum, half_sums[2];
    int8_t q[GROUP];
};

struct matmul_kernels {
    void (*quantize)(const float *x, int n_groups, struct activations *out);
    /* out [n_rows][LANES] += x [n_rows][n_groups] times a row block. */
    void (*dot[N_QUANTIZED])(const uint8_t *row_block, int n_groups, const struct activations *x,
                             int n_rows, float *out);
    /* out [GROUP][LANES]: group `i` of a row block, exactly what the format says. */
    void (*decode[N_KINDS])(const uint8_t *row_block, int i, float *out);
    /* totals [n_rows][2 LANES] += x [n_rows][n_cols] times two weight tiles [n_cols][LANES]. */
    void (*accumulate)(const float *w0, const float *w1, int n_cols, const float *x,
                       size_t x_stride, int n_rows, float *totals);
};

extern const struct matmul_kernels matmul_portable, matmul_avx2, matmul_vnni;

#endif
