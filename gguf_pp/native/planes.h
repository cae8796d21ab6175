/* Planes: how quantized matrices lie in memory while they are multiplied.
 *
 * Types whose codes are not packed bit by bit (SCALE_BLOCKS) have no planes: a record is one block
 * of each of eight rows, as in the file, and its groups become tiles when they are used.
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
 *     low 3   3 x 32 bytes   vector v holds quad 2 v in bits 0 to 2, quad 2 v + 1 in bits 3 to 5;
 *                            bits 6 and 7 are the lower bits of quads 6 (v = 0) and 7 (v = 1), or
 *                            the upper bit of quad 6 and of quad 7 (v = 2)
 *     low 8   8 x 32 bytes   vector j holds quad j, signed
 *     high 1  1 x 32 bytes   bit j belongs to quad j
 *     high 2  2 x 32 bytes   as low 2
 *
 * Scale s of the 16 of SCALE_K_I6X2, two to a group, is six bits offset by 32: four in nibble s / 8
 * of low[s % 8], two in bits 2 (s / 4) of high[s % 4].
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
    SCALE_K_I6X2,  /* head: f16 d[8], u8 low[8][8], u8 high[4][8] */
    SCALE_F32X2,   /* tiles; sub: f32 [2][8], one for each half of the group */
    SCALE_BLOCKS,
    SCALE_K_U4X2,  /* head: f16 d[8], f16 dmin[8]; sub: u8 [2][8], sc low and mn high nibble */
};

enum table { TABLE_NONE, TABLE_IQ4, TABLE_MXFP4 };

enum kind {
    KIND_Q4_0, KIND_Q4_1, KIND_Q5_0, KIND_Q5_1, KIND_Q8_0, KIND_Q2_K, KIND_Q3_K, KIND_Q4_K,
    KIND_Q5_K, KIND_Q6_K, KIND_IQ4_NL, KIND_IQ4_XS, KIND_MXFP4, KIND_TQ2_0, KIND_IQ2_XXS,
    KIND_IQ2_XS, KIND_IQ2_S, KIND_IQ3_XXS, KIND_IQ3_S, KIND_IQ1_S, KIND_IQ1_M, KIND_TQ1_0,
    KIND_NVFP4, KIND_F32, KIND_F16, KIND_BF16,
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
    [KIND_Q3_K] = {11, 110, 8, 3, 0, SCALE_K_I6X2, 4, TABLE_NONE},
    [KIND_Q4_K] = {12, 144, 8, 4, 0, SCALE_K, 0, TABLE_NONE},
    [KIND_Q5_K] = {13, 176, 8, 4, 1, SCALE_K, 0, TABLE_NONE},
    [KIND_Q6_K] = {14, 210, 8, 4, 2, SCALE_K_I8X2, 32, TABLE_NONE},
    [KIND_IQ4_NL] = {20, 18, 1, 4, 0, SCALE_D, 0, TABLE_IQ4},
    [KIND_IQ4_XS] = {23, 136, 8, 4, 0, SCALE_K_I8, 0, TABLE_IQ4},
    [KIND_MXFP4] = {39, 17, 1, 4, 0, SCALE_E8M0, 0, TABLE_MXFP4},
    [KIND_TQ2_0] = {35, 66, 8, 2, 0, SCALE_D, 1, TABLE_NONE},
    [KIND_IQ2_XXS] = {16, 66, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ2_XS] = {17, 74, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ2_S] = {22, 82, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ3_XXS] = {18, 98, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ3_S] = {21, 110, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ1_S] = {19, 50, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_IQ1_M] = {29, 56, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_TQ1_0] = {34, 54, 8, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_NVFP4] = {40, 36, 2, 0, 0, SCALE_BLOCKS, 0, TABLE_NONE},
    [KIND_F32] = {0, 4, 1, 32, 0, SCALE_NONE, 0, TABLE_NONE},
    [KIND_F16] = {1, 2, 1, 16, 0, SCALE_NONE, 0, TABLE_NONE},
    [KIND_BF16] = {30, 2, 1, 16, 0, SCALE_NONE, 0, TABLE_NONE},
};

/* A group of 32 columns of eight rows, as a kind of its own. */
struct tile {
    float scales[2][LANES];
    int8_t codes[8][LANES][4];
};

static const struct layout TILE = {.n_groups = 1, .low = 8, .scale = SCALE_F32X2};

static inline int head_bytes(struct layout l)
{
    switch (l.scale) {
    case SCALE_NONE: case SCALE_BLOCKS: case SCALE_F32X2: return 0;
    case SCALE_E8M0: return LANES;
    case SCALE_D: case SCALE_K_I8: case SCALE_K_I8X2: return 2 * LANES;
    case SCALE_K_I6X2: return (2 + 12) * LANES;
    default: return 4 * LANES;
    }
}

static inline int sub_bytes(struct layout l)
{
    switch (l.scale) {
    case SCALE_K: case SCALE_K_I8X2: case SCALE_K_U4X2: return 2 * LANES;
    case SCALE_K_I8: return LANES;
    case SCALE_F32X2: return sizeof(float) * 2 * LANES;
    default: return 0;
    }
}

/* Scales and minimums differ between the halves of a group. */
static inline int n_halves(struct layout l)
{
    switch (l.scale) {
    case SCALE_K_I8X2: case SCALE_K_I6X2: case SCALE_K_U4X2: case SCALE_F32X2: return 2;
    default: return 1;
    }
}

static inline int tile_bytes(struct layout l)
{
    return sub_bytes(l) + (l.low + l.high) * GROUP * LANES / 8;
}

static inline int record_bytes(struct layout l)
{
    if (l.scale == SCALE_BLOCKS)
        return LANES * l.block_bytes;
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

/* Group `i` of a row block of SCALE_BLOCKS. */
void blocks_unpack(enum kind kind, const uint8_t *row_block, int i, struct tile *tile);

/* Whether the type of `kind` has a codebook that nobody has set yet. */
int codebook_is_missing(enum kind kind);

/* Once: entries of four or eight codes, those of IQ1_S eight-fold. 0, or -1 if it is not that long
 * or there is no such codebook. */
int codebook_set(enum kind kind, const void *entries, size_t n_bytes);

#endif
