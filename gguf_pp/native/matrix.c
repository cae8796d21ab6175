#include "matrix.h"

#include "matmul.h"
#include "module.h"

#include <string.h>

enum {
    X_CACHE_BYTES = 192 * 1024, /* of quantized activations that should stay in the L2 cache */
    DOT_ROWS_AT_ONCE = 256,
    EXACT_ROWS_AT_ONCE = 128,
    EXACT_COLS = 256,
    ITEMS_PER_THREAD = 4,
    QUANTIZE_ROWS = 8,
    PACK_BLOCKS = 16,
    /* With fewer columns, errors of rounding to int8 would not average out. */
    MIN_DOT_COLS = 512,
};

static const struct matmul_kernels *active(void)
{
#if ISA_X86
    if (isa_active == ISA_AVX512_VNNI)
        return &matmul_vnni;
    if (isa_active >= ISA_AVX2)
        return &matmul_avx2;
#endif
    return &matmul_portable;
}

static int min_int(int a, int b) { return a < b ? a : b; }

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static const struct part *part_of_block(const struct matrix *m, int block)
{
    const struct part *part = m->parts;
    while (block >= part->first_block + part->n_blocks)
        part++;
    return part;
}

static const uint8_t *block_of(const struct part *part, int block)
{
    return part->planes + (size_t)(block - part->first_block) * part->block_bytes;
}

struct packing {
    const struct matrix *matrix;
    const uint8_t *const *rows;
    const size_t *row_bytes;
};

static void pack_item(void *arg, int item)
{
    const struct packing *p = arg;
    const struct matrix *m = p->matrix;
    int stop = min_int((item + 1) * PACK_BLOCKS, m->n_blocks);
    for (int block = item * PACK_BLOCKS; block < stop; block++) {
        const struct part *part = part_of_block(m, block);
        int row = (block - part->first_block) * LANES;
        size_t row_bytes = p->row_bytes[part - m->parts];
        planes_pack(part->kind, p->rows[part - m->parts] + (size_t)row * row_bytes, row_bytes,
                    min_int(LANES, part->n_rows - row), (size_t)m->n_cols,
                    (uint8_t *)block_of(part, block));
    }
}

void matrix_pack(const struct matrix *m, const uint8_t *const *rows, const size_t *row_bytes,
                 team *t)
{
    struct packing p = {m, rows, row_bytes};
    team_run(t, pack_item, &p, ceil_div(m->n_blocks, PACK_BLOCKS));
}

struct job {
    const struct product *product;
    const struct matmul_kernels *kernels;
    struct activations *activations;
    int blocks_per_item, exact;
};

/* values [n_rows][n_lanes or more] go to rows from `row` of x and columns from `col` of out. */
static void store(const struct product *p, int row, int n_rows, int col, int n_lanes,
                  const float *values, int values_stride)
{
    for (int r = 0; r < n_rows; r++, values += values_stride) {
        size_t at = (size_t)(row + r) * (size_t)p->stride + (size_t)col;
        for (int i = 0; i < n_lanes; i++) {
            float y = values[i];
            if (p->bias)
                y += p->bias[col + i];
            if (p->add)
                y += p->add[at + (size_t)i];
            p->out[at + (size_t)i] = y;
        }
    }
}

static int lanes_of(const struct part *part, int block)
{
    return min_int(LANES, part->n_rows - (block - part->first_block) * LANES);
}

static int column_of(const struct part *part, int block)
{
    return part->first_row + (block - part->first_block) * LANES;
}

static void multiply_quantized(const struct job *job, const struct part *part, int block, int stop)
{
    const struct product *p = job->product;
    int n_groups = p->matrix->n_cols / GROUP;
    int step = X_CACHE_BYTES / ((int)sizeof(struct activations) * n_groups) / DOT_ROWS * DOT_ROWS;
    step = step < DOT_ROWS ? DOT_ROWS : min_int(step, DOT_ROWS_AT_ONCE);
    for (int row = 0; row < p->n_rows; row += step)
        for (int b = block; b < stop; b++) {
            float y[DOT_ROWS_AT_ONCE * LANES];
            int n_rows = min_int(step, p->n_rows - row);
            memset(y, 0, (size_t)n_rows * LANES * sizeof *y);
            job->kernels->dot[part->kind](
                block_of(part, b), n_groups, job->activations + (size_t)row * (size_t)n_groups,
                n_rows, y);
            store(p, row, n_rows, column_of(part, b), lanes_of(part, b), y, LANES);
        }
}

/* Columns [k, k + n) of a row block as [n][LANES] floats: decoded, or where they are. */
static const float *weights_at(const struct job *job, const struct part *part, int block, int k,
                               int n, float *scratch)
{
    const uint8_t *planes = block_of(part, block);
    if (part->kind == KIND_F32)
        return (const float *)planes + (size_t)k * LANES;
    for (int i = 0; i < n; i += GROUP)
        job->kernels->decode[part->kind](planes, (k + i) / GROUP, scratch + i * LANES);
    return scratch;
}

static void multiply_exact_rows(const struct job *job, const struct part *part, int block,
                                int n_blocks, int row, int n_rows)
{
    float totals[EXACT_ROWS_AT_ONCE * 2 * LANES], scratch[2][EXACT_COLS * LANES];
    const struct product *p = job->product;
    int n_cols = p->matrix->n_cols;
    memset(totals, 0, (size_t)n_rows * 2 * LANES * sizeof *totals);
    for (int k = 0; k < n_cols; k += EXACT_COLS) {
        int n = min_int(EXACT_COLS, n_cols - k);
        const float *w0 = weights_at(job, part, block, k, n, scratch[0]);
        const float *w1 =
            n_blocks == 2 ? weights_at(job, part, block + 1, k, n, scratch[1]) : w0;
        job->kernels->accumulate(w0, w1, n, p->x + (size_t)row * (size_t)n_cols + k,
                                 (size_t)n_cols, n_rows, totals);
    }
    for (int i = 0; i < n_blocks; i++)
        store(p, row, n_rows, column_of(part, block + i), lanes_of(part, block + i),
              totals + i * LANES, 2 * LANES);
}

static void multiply_exact(const struct job *job, const struct part *part, int block, int stop)
{
    int n_rows = job->product->n_rows;
    for (int row = 0; row < n_rows; row += EXACT_ROWS_AT_ONCE)
        for (int b = block; b < stop; b += 2)
            multiply_exact_rows(job, part, b, min_int(2, stop - b), row,
                                min_int(EXACT_ROWS_AT_ONCE, n_rows - row));
}

static void multiply_item(void *arg, int item)
{
    const struct job *job = arg;
    const struct matrix *m = job->product->matrix;
    int block = item * job->blocks_per_item;
    int end = min_int(block + job->blocks_per_item, m->n_blocks);
    while (block < end) {
        const struct part *part = part_of_block(m, block);
        int stop = min_int(end, part->first_block + part->n_blocks);
        if (job->exact || part->kind >= N_QUANTIZED)
            multiply_exact(job, part, block, stop);
        else
            multiply_quantized(job, part, block, stop);
        block = stop;
    }
}

static void quantize_item(void *arg, int item)
{
    const struct job *job = arg;
    const struct product *p = job->product;
    int n_cols = p->matrix->n_cols, n_groups = n_cols / GROUP;
    int stop = min_int((item + 1) * QUANTIZE_ROWS, p->n_rows);
    for (int row = item * QUANTIZE_ROWS; row < stop; row++)
        job->kernels->quantize(p->x + (size_t)row * (size_t)n_cols, n_groups,
                               job->activations + (size_t)row * (size_t)n_groups);
}

static int needs_activations(const struct matrix *m)
{
    for (int i = 0; i < m->n_parts; i++)
        if (m->parts[i].kind < N_QUANTIZED)
            return 1;
    return 0;
}

int matrix_multiply(const struct product *p, team *t)
{
    int n_threads = team_size(t), n_blocks = p->matrix->n_blocks;
    int n_items = n_threads == 1 ? 1 : n_threads * ITEMS_PER_THREAD;
    int exact = p->exact || p->matrix->n_cols < MIN_DOT_COLS;
    struct job job = {p, active(), NULL, ceil_div(n_blocks, n_items), exact};
    if (!n_blocks || !p->n_rows)
        return 0;
    if (!exact && needs_activations(p->matrix)) {
        size_t n = (size_t)p->n_rows * (size_t)(p->matrix->n_cols / GROUP);
        job.activations = team_scratch(t, n * sizeof *job.activations);
        if (!job.activations)
            return -1;
        team_run(t, quantize_item, &job, ceil_div(p->n_rows, QUANTIZE_ROWS));
    }
    team_run(t, multiply_item, &job, ceil_div(n_blocks, job.blocks_per_item));
    return 0;
}

const struct part *matrix_part(const struct matrix *m, int64_t row)
{
    for (int i = 0; i < m->n_parts; i++)
        if (row >= m->parts[i].first_row && row < m->parts[i].first_row + m->parts[i].n_rows)
            return &m->parts[i];
    return NULL;
}

void matrix_rows(const struct matrix *m, const int64_t *ids, int n_rows, float *out)
{
    const struct matmul_kernels *kernels = active();
    float tile[GROUP * LANES];
    for (int r = 0; r < n_rows; r++, out += m->n_cols) {
        const struct part *part = matrix_part(m, ids[r]);
        int row = (int)(ids[r] - part->first_row);
        const uint8_t *planes = part->planes + (size_t)(row / LANES) * part->block_bytes;
        for (int k = 0; k < m->n_cols; k += GROUP) {
            kernels->decode[part->kind](planes, k / GROUP, tile);
            for (int i = 0; i < min_int(GROUP, m->n_cols - k); i++)
                out[k + i] = tile[i * LANES + row % LANES];
        }
    }
}
