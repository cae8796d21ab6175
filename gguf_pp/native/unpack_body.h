/* From blocks of the file to tiles, for the types whose blocks stay as they are: see planes.h, and
 * planes.c, which includes this. Block layouts: ggml-quants.h, as the gguf package reads them. */
#include "lanes.h"

typedef int8_t codes8 __attribute__((vector_size(8)));
typedef uint8_t bytes8 __attribute__((vector_size(8)));
typedef uint16_t words8 __attribute__((vector_size(16)));

/* 32 columns of one row. */
struct run {
    float scale[2]; /* of each half */
    codes8 codes[4];
};

static int8_t grid_iq2_xxs[256][8], grid_iq2_xs[512][8], grid_iq2_s[1024][8], grid_iq1[2048][8];
static int8_t grid_iq3_xxs[256][4], grid_iq3_s[512][4];

static struct codebook {
    enum kind kind;
    void *entries;
    size_t n_bytes;
    int is_known;
} codebooks[] = {
    {KIND_IQ2_XXS, grid_iq2_xxs, sizeof grid_iq2_xxs, 0},
    {KIND_IQ2_XS, grid_iq2_xs, sizeof grid_iq2_xs, 0},
    {KIND_IQ2_S, grid_iq2_s, sizeof grid_iq2_s, 0},
    {KIND_IQ3_XXS, grid_iq3_xxs, sizeof grid_iq3_xxs, 0},
    {KIND_IQ3_S, grid_iq3_s, sizeof grid_iq3_s, 0},
    {KIND_IQ1_S, grid_iq1, sizeof grid_iq1, 0},
};

static struct codebook *codebook_of(enum kind kind)
{
    for (size_t i = 0; i < sizeof codebooks / sizeof *codebooks; i++)
        if (codebooks[i].kind == (kind == KIND_IQ1_M ? KIND_IQ1_S : kind))
            return &codebooks[i];
    return NULL;
}

int codebook_is_missing(enum kind kind)
{
    const struct codebook *c = codebook_of(kind);
    return c && !c->is_known;
}

int codebook_set(enum kind kind, const void *entries, size_t n_bytes)
{
    struct codebook *c = codebook_of(kind);
    if (!c || n_bytes != c->n_bytes)
        return -1;
    if (!c->is_known)
        memcpy(c->entries, entries, n_bytes);
    c->is_known = 1;
    return 0;
}

INLINE uint32_t u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

INLINE codes8 load_codes(const void *p)
{
    codes8 v;
    memcpy(&v, p, 8);
    return v;
}

INLINE codes8 load_pair(const void *first, const void *second)
{
    return (codes8)(u32(first) | (uint64_t)u32(second) << 32);
}

/* Bit i of `signs` makes code i negative. */
INLINE codes8 with_signs(codes8 v, uint32_t signs)
{
    const codes8 bits = {1, 2, 4, 8, 16, 32, 64, -128};
    codes8 minus = (codes8)(((codes8)(signs * 0x0101010101010101u) & bits) != 0);
    return (v ^ minus) - minus;
}

/* Seven signs are coded, the eighth makes their number even. */
INLINE uint32_t eight_signs(uint32_t code)
{
    code &= 127;
    return code | (uint32_t)__builtin_parity(code) << 7;
}

INLINE void set_scales(struct run *out, float first, float second)
{
    out->scale[0] = first;
    out->scale[1] = second;
}

INLINE void read_iq2_xxs(const uint8_t *p, int g, struct run *out)
{
    const uint8_t *q = p + 2 + 8 * g;
    uint32_t word = u32(q + 4);
    float d = half_to_float(u16(p)) * (0.5f + (float)(word >> 28)) * 0.25f;
    set_scales(out, d, d);
    for (int i = 0; i < 4; i++)
        out->codes[i] = with_signs(load_codes(grid_iq2_xxs[q[i]]), eight_signs(word >> 7 * i));
}

/* Of IQ2_XS and IQ2_S: a nibble for each half of a group. */
INLINE void set_iq2_scales(struct run *out, float d, uint8_t nibbles)
{
    set_scales(out, d * (0.5f + (float)(nibbles & 15)) * 0.25f,
               d * (0.5f + (float)(nibbles >> 4)) * 0.25f);
}

INLINE void read_iq2_xs(const uint8_t *p, int g, struct run *out)
{
    set_iq2_scales(out, half_to_float(u16(p)), p[66 + g]);
    for (int i = 0; i < 4; i++) {
        uint32_t word = u16(p + 2 + 8 * g + 2 * i);
        out->codes[i] = with_signs(load_codes(grid_iq2_xs[word & 511]), eight_signs(word >> 9));
    }
}

INLINE void read_iq2_s(const uint8_t *p, int g, struct run *out)
{
    set_iq2_scales(out, half_to_float(u16(p)), p[74 + g]);
    for (int i = 0; i < 4; i++) {
        int index = p[2 + 4 * g + i] | (p[66 + g] >> 2 * i & 3) << 8;
        out->codes[i] = with_signs(load_codes(grid_iq2_s[index]), p[34 + 4 * g + i]);
    }
}

INLINE void read_iq3_xxs(const uint8_t *p, int g, struct run *out)
{
    const uint8_t *q = p + 2 + 8 * g;
    uint32_t word = u32(p + 66 + 4 * g);
    float d = half_to_float(u16(p)) * (0.5f + (float)(word >> 28)) * 0.5f;
    set_scales(out, d, d);
    for (int i = 0; i < 4; i++) {
        codes8 v = load_pair(grid_iq3_xxs[q[2 * i]], grid_iq3_xxs[q[2 * i + 1]]);
        out->codes[i] = with_signs(v, eight_signs(word >> 7 * i));
    }
}

INLINE void read_iq3_s(const uint8_t *p, int g, struct run *out)
{
    const uint8_t *q = p + 2 + 8 * g;
    float d = half_to_float(u16(p)) * (float)(1 + 2 * (p[106 + g / 2] >> g % 2 * 4 & 15));
    set_scales(out, d, d);
    for (int i = 0; i < 4; i++) {
        int high = p[66 + g] >> 2 * i;
        codes8 v = load_pair(grid_iq3_s[q[2 * i] | (high & 1) << 8],
                            grid_iq3_s[q[2 * i + 1] | (high >> 1 & 1) << 8]);
        out->codes[i] = with_signs(v, p[74 + 4 * g + i]);
    }
}

/* An eighth is added to each entry of -1, 0 and 1, or taken away; all are held eight-fold. */
INLINE codes8 shifted_entry(int index, int is_negative)
{
    int8_t shift = is_negative ? -1 : 1;
    return load_codes(grid_iq1[index]) + shift;
}

INLINE void read_iq1_s(const uint8_t *p, int g, struct run *out)
{
    uint32_t word = u16(p + 34 + 2 * g);
    float d = half_to_float(u16(p)) * (float)(2 * (word >> 12 & 7) + 1) * 0.125f;
    set_scales(out, d, d);
    for (int i = 0; i < 4; i++) {
        int index = p[2 + 4 * g + i] | (int)(word >> 3 * i & 7) << 8;
        out->codes[i] = shifted_entry(index, (int)word >> 15);
    }
}

INLINE void read_iq1_m(const uint8_t *p, int g, struct run *out)
{
    uint32_t d_bits = 0, scales = u16(p + 48 + g / 2 * 2) >> g % 2 * 6;
    for (int i = 0; i < 4; i++)
        d_bits |= (uint32_t)u16(p + 48 + 2 * i) >> 12 << 4 * i;
    float d = half_to_float((uint16_t)d_bits) * 0.125f;
    set_scales(out, d * (float)(2 * (scales & 7) + 1), d * (float)(2 * (scales >> 3 & 7) + 1));
    for (int i = 0; i < 4; i++) {
        int high = p[32 + 2 * g + i / 2] >> i % 2 * 4;
        out->codes[i] = shifted_entry(p[4 * g + i] | (high & 7) << 8, high >> 3 & 1);
    }
}

/* Bytes are fractions of 256 in base three; `powers` of three bring a digit to the front. */
INLINE codes8 trits(codes8 bytes, words8 powers)
{
    words8 fractions = __builtin_convertvector((bytes8)bytes, words8) * powers & 255;
    return __builtin_convertvector(fractions * 3 >> 8, codes8) - 1;
}

/* Digits of 32 bytes, then of 16, then of 4. */
INLINE void read_tq1_0(const uint8_t *p, int g, struct run *out)
{
    static const uint16_t powers[] = {1, 3, 9, 27, 81};
    const words8 last[] = {{1, 1, 1, 1, 3, 3, 3, 3}, {9, 9, 9, 9, 27, 27, 27, 27}}, zero = {0};
    float d = half_to_float(u16(p + 52));
    set_scales(out, d, d);
    for (int i = 0, n = 4 * g; i < 4; i++, n++)
        if (n < 20)
            out->codes[i] = trits(load_codes(p + n % 4 * 8), zero + powers[n / 4]);
        else if (n < 30)
            out->codes[i] = trits(load_codes(p + 32 + n % 2 * 8), zero + powers[n / 2 - 10]);
        else
            out->codes[i] = trits(load_pair(p + 48, p + 48), last[n - 30]);
}

/* Of E4M3 without a sign, halved, because codes are doubled; 0x7f is no number, and 0 here. */
INLINE float nvfp4_scale(uint8_t x)
{
    int exponent = x >> 3 & 15, mantissa = x & 7;
    if (x == 0x7f)
        return 0;
    if (!exponent)
        return (float)mantissa * 0x1p-10f;
    return (float)((8 + mantissa) << exponent) * 0x1p-11f;
}

INLINE void read_nvfp4(const uint8_t *p, int g, struct run *out)
{
    static const uint8_t values[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
    const uint8_t *q = p + 4 + 16 * g;
    set_scales(out, nvfp4_scale(p[2 * g]), nvfp4_scale(p[2 * g + 1]));
    for (int half = 0; half < 2; half++, q += 8) {
        uint64_t low = 0, high = 0;
        for (int i = 0; i < 8; i++) {
            low |= (uint64_t)values[q[i] & 15] << 8 * i;
            high |= (uint64_t)values[q[i] >> 4] << 8 * i;
        }
        out->codes[2 * half] = (codes8)low;
        out->codes[2 * half + 1] = (codes8)high;
    }
}

INLINE void unpack(size_t block_bytes, void (*read)(const uint8_t *, int, struct run *),
                   const uint8_t *record, int g, struct tile *tile)
{
    for (int r = 0; r < LANES; r++) {
        struct run run;
        read(record + (size_t)r * block_bytes, g, &run);
        tile->scales[0][r] = run.scale[0];
        tile->scales[1][r] = run.scale[1];
        for (int quad = 0; quad < 8; quad++)
            memcpy(tile->codes[quad][r], (const char *)run.codes + 4 * quad, 4);
    }
}

#define UNPACK(K, k)                                                                     \
    case KIND_##K:                                                                       \
        unpack((size_t)LAYOUTS[KIND_##K].block_bytes, read_##k, record, i % l.n_groups, tile); \
        return;

void blocks_unpack(enum kind kind, const uint8_t *row_block, int i, struct tile *tile)
{
    struct layout l = LAYOUTS[kind];
    const uint8_t *record = row_block + (size_t)(i / l.n_groups) * (size_t)record_bytes(l);
    switch (kind) {
        UNPACK(IQ2_XXS, iq2_xxs)
        UNPACK(IQ2_XS, iq2_xs)
        UNPACK(IQ2_S, iq2_s)
        UNPACK(IQ3_XXS, iq3_xxs)
        UNPACK(IQ3_S, iq3_s)
        UNPACK(IQ1_S, iq1_s)
        UNPACK(IQ1_M, iq1_m)
        UNPACK(TQ1_0, tq1_0)
        UNPACK(NVFP4, nvfp4)
    default: return;
    }
}
