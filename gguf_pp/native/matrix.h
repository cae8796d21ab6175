/* A matrix of planes: parts of different types, stacked by rows. */
#ifndef GGUF_PP_MATRIX_H
#define GGUF_PP_MATRIX_H

#include "arena.h"
#include "planes.h"
#include "team.h"

struct part {
    enum kind kind;
    int first_row, n_rows;     /* of the output */
    int first_block, n_blocks; /* counted through all parts */
    size_t block_bytes;        /* of one row block */
    uint8_t *planes;
    chunk *owner; /* of the planes */
};

struct matrix {
    int n_cols, n_parts, n_blocks;
    struct part parts[];
};

/* One product: out [n_rows][stride] = x [n_rows][n_cols] Wᵀ + bias [stride] + add [n_rows][stride].
 * `bias` and `add` may be NULL, `add` may be `out`. Rows of W that no part has leave `out` as is. */
struct product {
    const struct matrix *matrix;
    const float *x;
    float *out;
    const float *bias, *add;
    int n_rows, stride, exact;
};

void matrix_pack(const struct matrix *m, const uint8_t *const *rows, const size_t *row_bytes,
                 team *t);

/* Returns 0, or -1 if memory is lacking. */
int matrix_multiply(const struct product *p, team *t);

/* out [n_rows][n_cols] = rows `ids` of W, which the caller has checked. */
void matrix_rows(const struct matrix *m, const int64_t *ids, int n_rows, float *out);

/* The part that has row `row` of the output, or NULL. */
const struct part *matrix_part(const struct matrix *m, int64_t row);

#endif
