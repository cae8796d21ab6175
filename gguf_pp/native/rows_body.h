/* Compiled once per instruction set: see rows.c. */
#include "lanes_body.h"

INLINE void FN(rms_norm_row)(const float *restrict x, const float *restrict weight,
                             const float *restrict add, float *restrict out, int64_t n, double eps)
{
    const float scale = FN(rms_scale)(x, n, eps);
    if (add)
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] * scale * weight[i] + add[i];
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] * scale * weight[i];
}

static void FN(rms_norm)(void *arg, int i_job)
{
    const rms_norm_call *c = arg;
    const int64_t n = c->n_cols;
    const int64_t stop = end_of_job(i_job, c->rows_per_job, c->n_rows);
    for (int64_t row = i_job * c->rows_per_job; row < stop; row++)
        FN(rms_norm_row)(c->x + row * n, c->weight, c->add ? c->add + row * n : NULL,
                         c->out + row * n, n, c->eps);
}

/* As ggml's table has it: argument and result rounded to binary16, x / 2 (1 + tanh(u)) in between
 * (the cancellation left of 0 included), and the ends cut off. */
INLINE v8 FN(gelu_tanh)(v8 x)
{
    const v8 short_x = FN(round_to_half)(x);
    const v8 u = (float)(M_2_SQRTPI * M_SQRT1_2) * short_x * (1 + 0.044715f * short_x * short_x);
    const v8 y = FN(round_to_half)(0.5f * short_x * (1 + FN(tanh)(u)));
    return FN(pick)(x <= -10, FN(splat)(0), FN(pick)(x >= 10, x, y));
}

INLINE v8 FN(activate)(enum activation kind, v8 x)
{
    if (kind == SILU)
        return x / (1 + FN(exp)(-x));
    if (kind == GELU_TANH)
        return FN(gelu_tanh)(x);
    for (int i = 0; i < 8; i++)
        x[i] *= 0.5f * (1 + erff(x[i] * (float)M_SQRT1_2));
    return x;
}

INLINE void FN(gated_row)(enum activation kind, const float *gate, float *out, int64_t n)
{
    const float *up = gate + n;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        FN(store)(out + i, FN(activate)(kind, FN(load)(gate + i)) * FN(load)(up + i));
    if (i < n) {
        float g[8] = {0}, u[8] = {0};
        memcpy(g, gate + i, (size_t)(n - i) * sizeof *g);
        memcpy(u, up + i, (size_t)(n - i) * sizeof *u);
        FN(store)(g, FN(activate)(kind, FN(load)(g)) * FN(load)(u));
        memcpy(out + i, g, (size_t)(n - i) * sizeof *g);
    }
}

static void FN(gated)(void *arg, int i_job)
{
    const gated_call *c = arg;
    const int64_t n = c->n_cols;
    const int64_t stop = end_of_job(i_job, c->rows_per_job, c->n_rows);
    for (int64_t row = i_job * c->rows_per_job; row < stop; row++) {
        const float *gate = c->x + 2 * row * n;
        float *out = c->out + row * n;
        if (c->activation == SILU)
            FN(gated_row)(SILU, gate, out, n);
        else if (c->activation == GELU_TANH)
            FN(gated_row)(GELU_TANH, gate, out, n);
        else
            FN(gated_row)(GELU_ERF, gate, out, n);
    }
}
