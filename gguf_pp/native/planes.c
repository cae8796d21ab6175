/* From blocks of the file to planes. Block layouts: ggml-quants.h, as the gguf package reads
 * them in gguf/quants.py. */
#include "planes.h"

#include <string.h>

/* One block of one row. */
struct block {
    uint8_t codes[256];
    uint16_t d, m;
    uint8_t exponent;
    uint8_t sc[16], mn[8];
};

static uint16_t u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static void nibbles(const uint8_t *q, int n, uint8_t *low, uint8_t *high)
{
    for (int i = 0; i < n; i++) {
        low[i] = q[i] & 15;
        high[i] = q[i] >> 4;
    }
}

/* Four runs of 32 codes of two bits from 32 bytes. */
static void crumbs(const uint8_t *q, uint8_t *codes)
{
    for (int s = 0; s < 4; s++)
        for (int i = 0; i < 32; i++)
            codes[32 * s + i] = q[i] >> 2 * s & 3;
}

static void read_nibble_block(const uint8_t *q, struct block *b)
{
    nibbles(q, 16, b->codes, b->codes + 16);
}

static void read_5_bit_block(const uint8_t *q, struct block *b)
{
    uint32_t high;
    memcpy(&high, q, 4);
    read_nibble_block(q + 4, b);
    for (int i = 0; i < 32; i++)
        b->codes[i] |= (uint8_t)((high >> i & 1) << 4);
}

static void read_k_scales(const uint8_t *p, struct block *b)
{
    for (int i = 0; i < 4; i++) {
        b->sc[i] = p[i] & 63;
        b->mn[i] = p[i + 4] & 63;
        b->sc[i + 4] = (uint8_t)((p[i + 8] & 15) | (p[i] >> 6) << 4);
        b->mn[i + 4] = (uint8_t)(p[i + 8] >> 4 | (p[i + 4] >> 6) << 4);
    }
}

static void read_q4_k(const uint8_t *p, const uint8_t *q, struct block *b)
{
    b->d = u16(p);
    b->m = u16(p + 2);
    read_k_scales(p + 4, b);
    for (int c = 0; c < 4; c++)
        nibbles(q + 32 * c, 32, b->codes + 64 * c, b->codes + 64 * c + 32);
}

static void read_q5_k(const uint8_t *p, struct block *b)
{
    const uint8_t *high = p + 16;
    read_q4_k(p, p + 48, b);
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++)
            b->codes[32 * g + i] |= (uint8_t)((high[i] >> g & 1) << 4);
}

static void read_q6_k(const uint8_t *p, struct block *b)
{
    for (int h = 0; h < 2; h++) {
        uint8_t high[128], *codes = b->codes + 128 * h;
        nibbles(p + 64 * h, 64, codes, codes + 64);
        crumbs(p + 128 + 32 * h, high);
        for (int i = 0; i < 128; i++)
            codes[i] |= (uint8_t)(high[i] << 4);
    }
    memcpy(b->sc, p + 192, 16);
    b->d = u16(p + 208);
}

static void read_q3_k(const uint8_t *p, struct block *b)
{
    crumbs(p + 32, b->codes);
    crumbs(p + 64, b->codes + 128);
    for (int g = 0; g < 8; g++)
        for (int i = 0; i < 32; i++)
            b->codes[32 * g + i] |= (uint8_t)((p[i] >> g & 1) << 2);
    memcpy(b->sc, p + 96, 12);
    b->d = u16(p + 108);
}

static void read_q2_k(const uint8_t *p, struct block *b)
{
    memcpy(b->sc, p, 16);
    crumbs(p + 16, b->codes);
    crumbs(p + 48, b->codes + 128);
    b->d = u16(p + 80);
    b->m = u16(p + 82);
}

static void read_iq4_xs(const uint8_t *p, struct block *b)
{
    b->d = u16(p);
    for (int g = 0; g < 8; g++) {
        int low = p[4 + g / 2] >> g % 2 * 4 & 15, high = u16(p + 2) >> 2 * g & 3;
        b->sc[g] = (uint8_t)((low | high << 4) - 32);
        nibbles(p + 8 + 16 * g, 16, b->codes + 32 * g, b->codes + 32 * g + 16);
    }
}

static void read_block(enum kind kind, const uint8_t *p, struct block *b)
{
    switch (kind) {
    case KIND_Q4_K: read_q4_k(p, p + 16, b); return;
    case KIND_Q5_K: read_q5_k(p, b); return;
    case KIND_Q6_K: read_q6_k(p, b); return;
    case KIND_Q3_K: read_q3_k(p, b); return;
    case KIND_Q2_K: read_q2_k(p, b); return;
    case KIND_IQ4_XS: read_iq4_xs(p, b); return;
    case KIND_TQ2_0:
        crumbs(p, b->codes);
        crumbs(p + 32, b->codes + 128);
        b->d = u16(p + 64);
        return;
    case KIND_MXFP4:
        b->exponent = p[0];
        read_nibble_block(p + 1, b);
        return;
    default: b->d = u16(p);
    }
    switch (kind) {
    case KIND_Q4_1:
        b->m = u16(p + 2);
        read_nibble_block(p + 4, b);
        return;
    case KIND_Q5_1:
        b->m = u16(p + 2);
        read_5_bit_block(p + 4, b);
        return;
    case KIND_Q5_0: read_5_bit_block(p + 2, b); return;
    case KIND_Q8_0: memcpy(b->codes, p + 2, 32); return;
    default: read_nibble_block(p + 2, b);
    }
}

enum { ONES = 0x01010101 };

/* Two bits of each code, four quads to a vector. */
static uint8_t *put_crumbs(uint32_t quads[LANES][8], int shift, uint8_t *out)
{
    for (int v = 0; v < 2; v++, out += GROUP)
        for (int r = 0; r < LANES; r++) {
            uint32_t word = 0;
            for (int s = 0; s < 4; s++)
                word |= (quads[r][4 * v + s] >> shift & 3 * ONES) << 2 * s;
            memcpy(out + 4 * r, &word, 4);
        }
    return out;
}

/* Three bits of each code: three pairs of quads, and a pair in what they leave. */
static uint8_t *put_3_bits(uint32_t quads[LANES][8], uint8_t *out)
{
    for (int v = 0; v < 3; v++, out += GROUP)
        for (int r = 0; r < LANES; r++) {
            const uint32_t *q = quads[r];
            uint32_t upper = (q[6] >> 2 & ONES) | (q[7] >> 1 & 2 * ONES);
            uint32_t rest = v < 2 ? q[6 + v] & 3 * ONES : upper;
            uint32_t word = q[2 * v] | q[2 * v + 1] << 3 | rest << 6;
            memcpy(out + 4 * r, &word, 4);
        }
    return out;
}

static uint8_t *put_low(struct layout l, uint32_t quads[LANES][8], uint8_t *out)
{
    if (l.low == 2)
        return put_crumbs(quads, 0, out);
    if (l.low == 3)
        return put_3_bits(quads, out);
    for (int j = 0; j < l.low; j++, out += GROUP)
        for (int r = 0; r < LANES; r++) {
            uint32_t word = quads[r][j];
            if (l.low == 4)
                word = (word & 15 * ONES) | (quads[r][j + 4] & 15 * ONES) << 4;
            memcpy(out + 4 * r, &word, 4);
        }
    return out;
}

static void put_high(struct layout l, uint32_t quads[LANES][8], uint8_t *out)
{
    if (l.high == 2)
        put_crumbs(quads, l.low, out);
    if (l.high != 1)
        return;
    for (int r = 0; r < LANES; r++) {
        uint32_t word = 0;
        for (int j = 0; j < 8; j++)
            word |= (quads[r][j] >> l.low & ONES) << j;
        memcpy(out + 4 * r, &word, 4);
    }
}

static void put_head(struct layout l, const struct block *blocks, uint8_t *out)
{
    for (int r = 0; r < LANES; r++)
        if (l.scale == SCALE_E8M0)
            out[r] = blocks[r].exponent;
        else {
            memcpy(out + 2 * r, &blocks[r].d, 2);
            if (l.scale == SCALE_K_I6X2)
                for (int i = 0; i < 12; i++)
                    out[(2 + i) * LANES + r] = blocks[r].sc[i];
            else if (head_bytes(l) > 2 * LANES)
                memcpy(out + 2 * (LANES + r), &blocks[r].m, 2);
        }
}

static void put_sub(struct layout l, const struct block *blocks, int g, uint8_t *out)
{
    for (int r = 0; r < LANES && sub_bytes(l); r++) {
        const struct block *b = &blocks[r];
        if (n_halves(l) == 2) {
            out[r] = b->sc[2 * g];
            out[LANES + r] = b->sc[2 * g + 1];
        } else if (l.scale == SCALE_K) {
            out[r] = b->sc[g];
            out[LANES + r] = b->mn[g];
        } else if (l.scale == SCALE_K_I8)
            out[r] = b->sc[g];
    }
}

static void put_record(struct layout l, const struct block *blocks, uint8_t *out)
{
    put_head(l, blocks, out);
    out += head_bytes(l);
    for (int g = 0; g < l.n_groups; g++, out += tile_bytes(l)) {
        uint32_t quads[LANES][8];
        for (int r = 0; r < LANES; r++)
            memcpy(quads[r], blocks[r].codes + GROUP * g, GROUP);
        put_sub(l, blocks, g, out);
        put_high(l, quads, put_low(l, quads, out + sub_bytes(l)));
    }
}

static void pack_floats(struct layout l, const uint8_t *rows, size_t row_bytes, int n_rows,
                        size_t n_cols, uint8_t *row_block)
{
    size_t size = (size_t)l.low / 8;
    memset(row_block, 0, row_block_bytes(l, n_cols));
    for (size_t k = 0; k < n_cols; k++)
        for (int r = 0; r < n_rows; r++) {
            const uint8_t *from = rows + (size_t)r * row_bytes + k * size;
            uint8_t *to = row_block + (k * LANES + (size_t)r) * size;
            if (size == 4)
                memcpy(to, from, 4);
            else
                memcpy(to, from, 2);
        }
}

static void pack_blocks(struct layout l, const uint8_t *rows, size_t row_bytes, int n_rows,
                        size_t n_cols, uint8_t *row_block)
{
    size_t size = (size_t)l.block_bytes, n_blocks = row_bytes / size;
    memset(row_block, 0, row_block_bytes(l, n_cols));
    for (size_t i = 0; i < n_blocks; i++)
        for (size_t r = 0; r < (size_t)n_rows; r++)
            memcpy(row_block + (i * LANES + r) * size, rows + r * row_bytes + i * size, size);
}

void planes_pack(enum kind kind, const uint8_t *rows, size_t row_bytes, int n_rows, size_t n_cols,
                 uint8_t *row_block)
{
    struct layout l = LAYOUTS[kind];
    if (l.scale == SCALE_NONE) {
        pack_floats(l, rows, row_bytes, n_rows, n_cols, row_block);
        return;
    }
    if (l.scale == SCALE_BLOCKS) {
        pack_blocks(l, rows, row_bytes, n_rows, n_cols, row_block);
        return;
    }
    struct block blocks[LANES];
    memset(blocks, 0, sizeof blocks);
    size_t n_blocks = n_cols / (size_t)(GROUP * l.n_groups);
    for (size_t i = 0; i < n_blocks; i++, row_block += record_bytes(l)) {
        for (int r = 0; r < n_rows; r++)
            read_block(kind, rows + (size_t)r * row_bytes + i * (size_t)l.block_bytes, &blocks[r]);
        put_record(l, blocks, row_block);
    }
}

#include "unpack_body.h"
