/* Planes: how quantized matrices lie in memory while they are multiplied.
 *
 * Eight rows are interleaved, so that a vector lane is a row. A row block (eight rows, all columns)
 * is a run of records; a record holds as many columns as one block of the GGUF type (32 or 256):
 *
 *     record = head, then per group of 32 columns: sub-scales, low bits, high bits
 *
 * A group has eight quads of four columns. Byte 4 r + b of a quad is row r, column 4 j + b.
 *
 *     low 4   4 x 32 bytes   vector j holds quad j in the low and quad j + 4 in the high nibbles
 *     low 2   2 x 32 bytes   vector v holds quad 4 v + s in bits 2 s and 2 s + 1
 *     low 8   8 x 32 bytes   vector j holds quad j, signed
 *     high 1  1 x 32 bytes   bit j belongs to quad j
 *     high 2  2 x 32 bytes   as low 2
 *
 * Floating point types have one group to a record: 32 columns of eight rows each.
 */
#ifndef GGUF_PP_PLANES_H
#define GGUF_PP_PLANES_H

#include <stddef.h>
#include <stdint.h>

enum { LANES = 8, GROUP = 32 };

enum scale {
    SCALE_NONE,    /* floating point */
    SCALE_D,       /* head: f16 d[8] */
    SCALE_DM,      /* head: f16 d[8], f16 m[8]; weight = d code + m */
    SCALE_E8M0,    /* head: exponent[8]; d = 2^(e - 128) */
    SCALE_K,       /* head: f16 d[8], f16 dmin[8]; sub: u8 sc[8], u8 mn[8] */
    SCALE_K_I8,    /* head: f16 d[8]; sub: i8 sc[8] */
    SCALE_K_I8X2,  /* head: f16 d[8]; sub: i8 sc[2][8], one for each half of the group */
    SCALE_K_U4X2,  /* head: f16 d[8], f16 dmin[8]; sub: u8 [2][8], sc low and mn high nibble */
};

enum table { TABLE_NONE, TABLE_IQ4, TABLE_MXFP4 };

enum kind {
    KIND_Q4_0, KIND_Q4_1, KIND_Q5_0, KIND_Q5_1, KIND_Q8_0, KIND_Q2_K, KIND_Q3_K, KIND_Q4_K,
    KIND_Q5_K, KIND_Q6_K, KIND_IQ4_NL, KIND_IQ4_XS, KIND_MXFP4, KIND_F32, KIND_F16, KIND_BF16,
    N_KINDS,
    N_QUANTIZED = KIND_F32,
};

struct layout {
    int type;        /* GGML type id */
    int block_bytes; /* bytes of one block of the file */
    int n_groups;    /* groups of 32 columns in a block */
    int low, high;   /* bits of a code */
    enum scale scale;
    int offset;      /* weight = scale (code - offset) */
    enum table table;
};

static const struct layout LAYOUTS[N_KINDS] = {
    [KIND_Q4_0] = {2, 18, 1, 4, 0, SCALE_D, 8, TABLE_NONE},
    [KIND_Q4_1] = {3, 20, 1, 4, 0, SCALE_DM, 0, TABLE_NONE},
    [KIND_Q5_0] = {6, 22, 1, 4, 1, SCALE_D, 16, TABLE_NONE},
    [KIND_Q5_1] = {7, 24, 1, 4, 1, SCALE_DM, 0, TABLE_NONE},
    [KIND_Q8_0] = {8, 34, 1, 8, 0, SCALE_D, 0, TABLE_NONE},
    [KIND_Q2_K] = {10, 84, 8, 2, 0, SCALE_K_U4X2, 0, TABLE_NONE},
    [KIND_Q3_K] = {11, 110, 8, 2, 1, SCALE_K_I8X2, 4, TABLE_NONE},
    [KIND_Q4_K] = {12, 144, 8, 4, 0, SCALE_K, 0, TABLE_NONE},
    [KIND_Q5_K] = {13, 176, 8, 4, 1, SCALE_K, 0, TABLE_NONE},
    [KIND_Q6_K] = {14, 210, 8, 4, 2, SCALE_K_I8X2, 32, TABLE_NONE},
    [KIND_IQ4_NL] = {20, 18, 1, 4, 0, SCALE_D, 0, TABLE_IQ4},
    [KIND_IQ4_XS] = {23, 136, 8, 4, 0, SCALE_K_I8, 0, TABLE_IQ4},
    [KIND_MXFP4] = {39, 17, 1, 4, 0, SCALE_E8M0, 0, TABLE_MXFP4},
    [KIND_F32] = {0, 4, 1, 32, 0, SCALE_NONE, 0, TABLE_NONE},
    [KIND_F16] = {1, 2, 1, 16, 0, SCALE_NONE, 0, TABLE_NONE},
    [KIND_BF16] = {30, 2, 1, 16, 0, SCALE_NONE, 0, TABLE_NONE},
};

static inline int head_bytes(struct layout l)
{
    switch (l.scale) {
    case SCALE_NONE: return 0;
    case SCALE_E8M0: return LANES;
    case SCALE_D: case SCALE_K_I8: case SCALE_K_I8X2: return 2 * LANES;
    default: return 4 * LANES;
    }
}

static inline int sub_bytes(struct layout l)
{
    switch (l.scale) {
    case SCALE_K: case SCALE_K_I8X2: case SCALE_K_U4X2: return 2 * LANES;
    case SCALE_K_I8: return LANES;
    default: return 0;
    }
}

/* Scales and minimums differ between the halves of a group. */
static inline int n_halves(struct layout l)
{
    return l.scale == SCALE_K_I8X2 || l.scale == SCALE_K_U4X2 ? 2 : 1;
}

static inline int tile_bytes(struct layout l)
{
    return sub_bytes(l) + (l.low + l.high) * GROUP * LANES / 8;
}

static inline int record_bytes(struct layout l)
{
    return head_bytes(l) + l.n_groups * tile_bytes(l);
}

/* Columns are padded to whole groups; only floating point types may need it. */
static inline size_t row_block_bytes(struct layout l, size_t n_cols)
{
    size_t n_groups = (n_cols + GROUP - 1) / GROUP;
    return n_groups / (size_t)l.n_groups * (size_t)record_bytes(l);
}

/* Fill one row block from up to eight rows of the file; the other lanes become zeros. */
void planes_pack(enum kind kind, const uint8_t *rows, size_t row_bytes, int n_rows, size_t n_cols,
                 uint8_t *row_block);

#endif
