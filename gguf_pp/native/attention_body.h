/* Compiled once per instruction set: see attention.c.
 *
 * The bits of a row never depend on the other rows of its tile: scores are lanes of cells, each
 * summed over the head's elements in order; the running maximum and sum move on once per block of
 * cells at a fixed place; values are summed over the cells in order. */
#include "lanes_body.h"

INLINE void FN(rotate_pairs)(float *restrict x, const float *restrict cosine,
                             const float *restrict sine, int64_t n, int64_t step, int64_t apart)
{
    for (int64_t i = 0; i < n; i++) {
        const float a = x[i * step], b = x[i * step + apart];
        x[i * step] = a * cosine[i] - b * sine[i];
        x[i * step + apart] = a * sine[i] + b * cosine[i];
    }
}

INLINE void FN(rotate)(const attention_call *c, float *x, int64_t position)
{
    const int64_t n = c->n_rot / 2;
    const float *cosine = c->cosine + position * n, *sine = c->sine + position * n;
    if (c->neox)
        FN(rotate_pairs)(x, cosine, sine, n, 1, n);
    else
        FN(rotate_pairs)(x, cosine, sine, n, 2, 1);
}

/* One head of one row of q or k, normed, rotated and scaled. */
INLINE void FN(turn)(const attention_call *c, float *y, const float *x, const float *norm,
                     int64_t position, float scale)
{
    const int64_t n = c->head_size;
    if (norm) {
        const float to_unit = FN(rms_scale)(x, n, c->eps);
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] * to_unit * norm[i];
    } else {
        memcpy(y, x, (size_t)n * sizeof *y);
    }
    FN(rotate)(c, y, position);
    for (int64_t i = 0; i < n; i++)
        y[i] *= scale;
}

/* x has padded_head_size elements. */
INLINE void FN(store_key)(const attention_call *c, const float *x, int64_t i_head, const row *r)
{
    const int64_t n = c->head_size, lane = r->position % 8;
    const int64_t at = key_offset(c, r->slot, i_head, r->position / 8) + lane;
    if (c->k_is_half) {
        uint16_t halves[MAX_HEAD_SIZE];
        for (int64_t i = 0; i < n; i += 8)
            FN(store_half)(halves + i, FN(load)(x + i));
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)c->k)[at + i * 8] = halves[i];
    } else {
        for (int64_t i = 0; i < n; i++)
            ((float *)c->k)[at + i * 8] = x[i];
    }
}

INLINE void FN(store_value)(const attention_call *c, const float *x, int64_t i_head, const row *r)
{
    const int64_t at = value_offset(c, r->slot, i_head, r->position);
    for (int64_t i = 0; i < c->padded_head_size; i += 8) {
        if (c->v_is_half)
            FN(store_half)((uint16_t *)c->v + at + i, FN(load)(x + i));
        else
            FN(store)((float *)c->v + at + i, FN(load)(x + i));
    }
}

/* First of the two phases: queries to scratch [K][T][H/K][D], keys and values to the cache. */
static void FN(prepare)(void *arg, int i_job)
{
    const attention_call *c = arg;
    const int64_t n = c->head_size, group = c->n_heads / c->n_kv_heads;
    float x[MAX_HEAD_SIZE] = {0};
    const int64_t stop = min_of((i_job + 1) * ROWS_PER_STORE, c->n_rows);
    for (int64_t t = i_job * ROWS_PER_STORE; t < stop; t++) {
        const row *r = c->rows + t;
        const float *q = c->qkv + t * (c->n_heads + 2 * c->n_kv_heads) * n;
        const float *k = q + c->n_heads * n, *v = k + c->n_kv_heads * n;
        for (int64_t h = 0; h < c->n_heads; h++) {
            float *to = c->q + ((h / group * c->n_rows + t) * group + h % group) * n;
            FN(turn)(c, to, q + h * n, c->q_norm, r->position, c->scale);
        }
        for (int64_t h = 0; h < c->n_kv_heads; h++) {
            FN(turn)(c, x, k + h * n, c->k_norm, r->position, 1);
            FN(store_key)(c, x, h, r);
            memcpy(x, v + h * n, (size_t)n * sizeof *x);
            FN(store_value)(c, x, h, r);
        }
    }
}

/* out [n_rows][n_cols * 8] += a [n_rows][n_terms] b, where b holds eight lanes for each term and
 * column. Steps are in elements. */
typedef struct {
    const float *a;
    const void *b;
    float *out;
    int64_t n_terms, a_step, term_step, column_step, out_step;
} FN(product);

INLINE v8 FN(load_cached)(const void *p, int64_t at, int is_half)
{
    return is_half ? FN(load_half)((const uint16_t *)p + at) : FN(load)((const float *)p + at);
}

INLINE void FN(multiply_tile)(const FN(product) * p, int n_rows, int n_cols, int is_half,
                              int64_t i_col)
{
    v8 sums[12];
    const float *a = p->a;
    const int64_t a_step = p->a_step, term_step = p->term_step, column_step = p->column_step;
    int64_t at = i_col * column_step;
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < n_cols; c++)
            sums[r * n_cols + c] = FN(load)(p->out + r * p->out_step + (i_col + c) * 8);
    for (int64_t term = 0; term < p->n_terms; term++, at += term_step, a++) {
        v8 b[8];
#pragma GCC unroll 8
        for (int c = 0; c < n_cols; c++)
            b[c] = FN(load_cached)(p->b, at + c * column_step, is_half);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++) {
            const v8 factor = FN(splat)(a[r * a_step]);
#pragma GCC unroll 8
            for (int c = 0; c < n_cols; c++)
                sums[r * n_cols + c] = FN(fma)(factor, b[c], sums[r * n_cols + c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < n_cols; c++)
            FN(store)(p->out + r * p->out_step + (i_col + c) * 8, sums[r * n_cols + c]);
}

/* Eight to twelve sums at a time keep both multipliers busy; the order of each sum is the same. */
INLINE void FN(multiply_as)(const FN(product) * p, int n_rows, int64_t n_cols, int is_half)
{
    int64_t i = 0;
#define COLUMNS(rows, columns)                 \
    for (; i + (columns) <= n_cols; i += (columns)) \
    FN(multiply_tile)(p, rows, columns, is_half, i)
    switch (n_rows) {
    case 1:
        COLUMNS(1, 8);
        COLUMNS(1, 4);
        COLUMNS(1, 1);
        break;
    case 2:
        COLUMNS(2, 4);
        COLUMNS(2, 1);
        break;
    case 3:
        COLUMNS(3, 4);
        COLUMNS(3, 1);
        break;
    case 4:
        COLUMNS(4, 2);
        COLUMNS(4, 1);
        break;
    case 5:
        COLUMNS(5, 2);
        COLUMNS(5, 1);
        break;
    default:
        COLUMNS(6, 2);
        COLUMNS(6, 1);
    }
#undef COLUMNS
}

static void FN(multiply)(const FN(product) * p, int n_rows, int64_t n_cols, int is_half)
{
    if (is_half)
        FN(multiply_as)(p, n_rows, n_cols, 1);
    else
        FN(multiply_as)(p, n_rows, n_cols, 0);
}

/* At most TILE_ROWS rows of one slot and kv head, in order of position. */
typedef struct {
    float scores[TILE_ROWS][BLOCK];
    float sums[TILE_ROWS * MAX_HEAD_SIZE]; /* [n_rows][padded_head_size] */
    v8 weights[TILE_ROWS];                 /* sum of exp(score - top), by lanes */
    float top[TILE_ROWS];
    int64_t lo[TILE_ROWS], hi[TILE_ROWS];   /* cells seen: [lo, hi) */
    int64_t from[TILE_ROWS], to[TILE_ROWS]; /* the same within the block at hand */
} FN(tile);

static void FN(score)(const attention_call *c, FN(tile) * t, const float *q, int64_t keys,
                      int64_t r, int n_rows)
{
    const int64_t n = c->head_size;
    const int64_t i_group = t->from[r] / 8, n_groups = (t->to[r + n_rows - 1] + 7) / 8 - i_group;
    float *out = t->scores[r] + i_group * 8;
    for (int i = 0; i < n_rows; i++)
        memset(out + i * BLOCK, 0, (size_t)n_groups * 8 * sizeof *out);
    const int64_t at = keys + i_group * n * 8;
    const FN(product) p = {q + r * n, at_element(c->k, at, c->k_is_half), out, n, n, 8, n * 8,
                           BLOCK};
    FN(multiply)(&p, n_rows, n_groups, c->k_is_half);
}

/* Scores to weights; lanes of cells that the row does not see hold anything, NaN included. */
static void FN(soften)(const attention_call *c, FN(tile) * t, int64_t r)
{
    float *scores = t->scores[r];
    const int32_t from = (int32_t)t->from[r], to = (int32_t)t->to[r];
    const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    v8 top = FN(splat)(t->top[r]);
    for (int32_t j = from / 8 * 8; j < to; j += 8) {
        v8 s = FN(load)(scores + j);
        if (c->softcap > 0)
            s = c->softcap * FN(tanh)(s);
        s = FN(pick)((lanes + j >= from) & (lanes + j < to), s, FN(splat)(-INFINITY));
        top = FN(pick)(s > top, s, top);
        FN(store)(scores + j, s);
    }
    const float new_top = FN(max)(top);
    v8 weights = {0};
    for (int32_t j = from / 8 * 8; j < to; j += 8) {
        const v8 w = FN(exp)(FN(load)(scores + j) - new_top);
        weights += w;
        FN(store)(scores + j, w);
    }
    const v8 shrink = FN(exp)(FN(splat)(t->top[r] - new_top));
    t->weights[r] = FN(fma)(t->weights[r], shrink, weights);
    t->top[r] = new_top;
    float *sums = t->sums + r * c->padded_head_size;
    if (shrink[0] != 1)
        for (int64_t i = 0; i < c->padded_head_size; i += 8)
            FN(store)(sums + i, FN(load)(sums + i) * shrink);
}

static void FN(gather)(const attention_call *c, FN(tile) * t, int64_t values, int64_t r, int n_rows,
                       int64_t from, int64_t to)
{
    const int64_t n = c->padded_head_size;
    if (from >= to)
        return;
    const FN(product) p = {t->scores[r] + from, at_element(c->v, values + from * n, c->v_is_half),
                           t->sums + r * n, to - from, BLOCK, n, 8, n};
    FN(multiply)(&p, n_rows, n / 8, c->v_is_half);
}

/* Cells that all rows see are summed together, those before and after row by row: a cell that a row
 * does not see may hold NaN, which no weight of 0 takes away. */
static void FN(gather_rows)(const attention_call *c, FN(tile) * t, int64_t values, int64_t r,
                            int n_rows)
{
    int64_t from = t->from[r + n_rows - 1], to = t->to[r];
    if (from >= to)
        from = to = BLOCK;
    for (int i = 0; i < n_rows; i++)
        FN(gather)(c, t, values, r + i, 1, t->from[r + i], min_of(from, t->to[r + i]));
    FN(gather)(c, t, values, r, n_rows, from, to);
    for (int i = 0; i < n_rows; i++)
        FN(gather)(c, t, values, r + i, 1, to, t->to[r + i]);
}

/* Few rows wait for memory: fetch values during the scores, the next keys during the values. */
static void FN(attend_block)(const attention_call *c, FN(tile) * t, const float *q, int64_t keys,
                             int64_t values, int64_t r, int64_t stop)
{
    const int is_streaming = stop - r <= TILE_STEP;
    if (is_streaming)
        prefetch(at_element(c->v, values, c->v_is_half), t->to[stop - 1] * c->padded_head_size,
                 c->v_is_half);
    for (int64_t i = r; i < stop; i += TILE_STEP)
        FN(score)(c, t, q, keys, i, (int)min_of(TILE_STEP, stop - i));
    for (int64_t i = r; i < stop; i++)
        FN(soften)(c, t, i);
    if (is_streaming)
        prefetch(at_element(c->k, keys + BLOCK * c->head_size, c->k_is_half), BLOCK * c->head_size,
                 c->k_is_half);
    for (int64_t i = r; i < stop; i += TILE_STEP)
        FN(gather_rows)(c, t, values, i, (int)min_of(TILE_STEP, stop - i));
}

/* Rows [first, stop) of a kv head's [T][H/K], all of one span. */
static void FN(attend)(const attention_call *c, int64_t i_head, int64_t first, int64_t stop)
{
    const int64_t n = c->padded_head_size, n_rows = stop - first;
    const int64_t group = c->n_heads / c->n_kv_heads;
    const float *q = c->q + (i_head * c->n_rows * group + first) * c->head_size;
    const int64_t slot = c->rows[first / group].slot;
    FN(tile) t;
    memset(t.sums, 0, (size_t)(n_rows * n) * sizeof *t.sums);
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t position = c->rows[(first + r) / group].position;
        t.lo[r] = c->window && position >= c->window ? position - c->window + 1 : 0;
        t.hi[r] = position + 1;
        t.weights[r] = FN(splat)(0);
        t.top[r] = -FLT_MAX;
    }
    for (int64_t cell = t.lo[0] / BLOCK * BLOCK; cell < t.hi[n_rows - 1]; cell += BLOCK) {
        int64_t begin = n_rows, end = 0;
        for (int64_t r = 0; r < n_rows; r++) {
            t.from[r] = t.lo[r] > cell ? t.lo[r] - cell : 0;
            t.to[r] = min_of(t.hi[r] - cell, BLOCK);
            if (t.from[r] < t.to[r]) {
                begin = min_of(begin, r);
                end = r + 1;
            }
        }
        FN(attend_block)(c, &t, q, key_offset(c, slot, i_head, cell / 8),
                         value_offset(c, slot, i_head, cell), begin, end);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const float total = FN(sum)(t.weights[r]);
        const int64_t i_row = (first + r) / group, i_query = i_head * group + (first + r) % group;
        float *out = c->out + (i_row * c->n_heads + i_query) * c->head_size;
        for (int64_t i = 0; i < c->head_size; i++)
            out[i] = t.sums[r * n + i] / total;
    }
}

/* Second phase. A job is a kv head and a tile of rows; the last rows see most and come first. */
static void FN(attend_tile)(void *arg, int i_job)
{
    const attention_call *c = arg;
    const int64_t group = c->n_heads / c->n_kv_heads, n_flat = c->n_rows * group;
    const int64_t i_tile = (n_flat - 1) / c->tile_rows - i_job / c->n_kv_heads;
    int64_t first = i_tile * c->tile_rows;
    const int64_t stop = min_of(first + c->tile_rows, n_flat);
    while (first < stop) {
        const int64_t end = min_of(stop, c->rows[first / group].span_end * group);
        FN(attend)(c, i_job % c->n_kv_heads, first, end);
        first = end;
    }
}
