/* The kernels of matmul.h, in terms of matmul_vec.h; included once per instruction level, which
 * defines KERNELS, the name of the set. The layout, the number of rows and the quad are constants
 * wherever functions below are inlined. */
#include "matmul_vec.h"

enum {
    EXACT_ROWS = 4,
    PREFETCH_BYTES = 1536, /* further than the hardware looks when memory is what limits */
    TILES_AT_ONCE = 16,    /* unpacked, to stay in the first cache */
};

static const int8_t TABLES[][16] = {
    [TABLE_IQ4] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    [TABLE_MXFP4] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

struct head {
    f32x8 d, m;
};

/* weight = scale code + min */
struct scales {
    f32x8 scale, min;
};

INLINE int is_signed(struct layout l) { return l.low == 8 || l.table != TABLE_NONE; }

INLINE int has_min(struct layout l)
{
    return l.scale == SCALE_DM || l.scale == SCALE_K || l.scale == SCALE_K_U4X2;
}

INLINE u8x32 high_bits(struct layout l, const uint8_t *p, int quad)
{
    if (l.high == 1)
        return shift(load_u8(p), l.low - quad) & (uint8_t)(1 << l.low);
    return shift(load_u8(p + GROUP * (quad / 4)), l.low - 2 * (quad % 4)) & (uint8_t)(3 << l.low);
}

/* Codes of a quad of columns, all eight rows. */
INLINE u8x32 codes_of(struct layout l, const uint8_t *p, int quad)
{
    u8x32 v;
    if (l.low == 8)
        v = load_u8(p + GROUP * quad);
    else if (l.low == 4)
        v = shift(load_u8(p + GROUP * (quad % 4)), quad < 4 ? 0 : -4) & 15;
    else if (l.low == 2)
        v = shift(load_u8(p + GROUP * (quad / 4)), -2 * (quad % 4)) & 3;
    else if (quad < 6)
        v = shift(load_u8(p + GROUP * (quad / 2)), -3 * (quad % 2)) & 7;
    else
        v = (shift(load_u8(p + GROUP * (quad - 6)), -6) & 3) |
            (shift(load_u8(p + GROUP * 2), 2 - quad) & 4);
    if (l.high)
        v |= high_bits(l, p + GROUP * l.low, quad);
    return l.table ? look_up(TABLES[l.table], v) : v;
}

INLINE struct head read_head(struct layout l, const uint8_t *p)
{
    struct head h = {{0}, {0}};
    if (!head_bytes(l))
        return h;
    if (l.scale == SCALE_E8M0) {
        u8x8 bytes;
        memcpy(&bytes, p, sizeof bytes);
        u32x8 e = __builtin_convertvector(bytes, u32x8), tiny = (u32x8)(e < 2);
        h.d = (f32x8)((tiny & (e + 1) * 0x00200000u) | (~tiny & (e - 1) << 23));
    } else
        h.d = f32_of_f16(p);
    if (has_min(l) && l.scale != SCALE_E8M0)
        h.m = f32_of_f16(p + 2 * LANES);
    return h;
}

/* Scales of groups 2 i and 2 i + 1, from a head that has them, as others have them in the group. */
INLINE u8x32 unpack_scales(const uint8_t *head, int i)
{
    const uint8_t *low = head + 2 * LANES;
    u8x32 nibbles = shift(load_u8(low + i % 2 * GROUP), -(i / 2 * 4)) & 15;
    u8x32 high = shift(load_u8(low + 8 * LANES), 4 - 2 * i) & 48;
    return (nibbles | high) - 32;
}

INLINE struct scales read_scales(struct layout l, struct head h, const uint8_t *sub, int half)
{
    struct scales s = {h.d, h.m};
    if (l.scale == SCALE_F32X2)
        s.scale = load_f32((const float *)sub + LANES * half);
    else if (l.scale == SCALE_K) {
        s.scale = h.d * f32_of_u8(sub);
        s.min = -(h.m * f32_of_u8(sub + LANES));
    } else if (l.scale == SCALE_K_U4X2) {
        u8x8 both;
        memcpy(&both, sub + LANES * half, sizeof both);
        s.scale = h.d * to_f32(__builtin_convertvector(both & 15, i32x8));
        s.min = -(h.m * to_f32(__builtin_convertvector(both >> 4, i32x8)));
    } else if (l.scale == SCALE_K_I8 || n_halves(l) == 2)
        s.scale = h.d * f32_of_i8(sub + LANES * half);
    return s;
}

/* How many products of codes by 127 a 16-bit lane holds, two to an `add_products`. */
INLINE int products_per_lane(struct layout l)
{
    int bits = l.low + l.high;
    return bits >= 6 ? 2 : bits == 5 ? 4 : 8;
}

/* sums of quads [first, first + n) */
INLINE void dot_quads(struct layout l, int n_rows, const uint8_t *codes, int first, int n,
                      const struct activations *x, size_t stride, i32x8 *out)
{
    int run = products_per_lane(l) < n ? products_per_lane(l) : n;
    UNROLL
    for (int i = 0; i < n; i += run) {
        sums a[DOT_ROWS];
        for (int r = 0; r < n_rows; r++)
            a[r] = (sums){0};
        UNROLL
        for (int j = i; j < i + run; j++) {
            int quad = n == 8 && l.low == 4 ? j / 2 + j % 2 * 4 : first + j;
            u8x32 c = codes_of(l, codes, quad);
            for (int r = 0; r < n_rows; r++) {
                u8x32 xr = splat_quad(x[(size_t)r * stride].q + 4 * quad);
                if (is_signed(l))
                    out[r] = add_signed(out[r], c, xr);
                else
                    a[r] = add_products(a[r], c, xr);
            }
        }
        for (int r = 0; r < n_rows && !is_signed(l); r++)
            out[r] += widen(a[r]);
    }
}

INLINE void dot_group(struct layout l, int n_rows, struct head h, const uint8_t *sub,
                      const uint8_t *codes, const struct activations *x, size_t stride, f32x8 *acc)
{
    int halves = n_halves(l), offset = is_signed(l) ? SIGNED_OFFSET : l.offset;
    UNROLL
    for (int half = 0; half < halves; half++) {
        struct scales s = read_scales(l, h, sub, half);
        f32x8 min = offset ? s.scale * splat((float)-offset) : s.min;
        i32x8 dots[DOT_ROWS] = {{0}};
        dot_quads(l, n_rows, codes, half * 4, 8 / halves, x, stride, dots);
        for (int r = 0; r < n_rows; r++) {
            const struct activations *xr = x + (size_t)r * stride;
            acc[r] = fma_f32(to_f32(dots[r]), s.scale * splat(xr->d), acc[r]);
            if (has_min(l) || offset)
                acc[r] = fma_f32(min, splat(halves == 2 ? xr->half_sums[half] : xr->sum), acc[r]);
        }
    }
}

INLINE void dot_rows(struct layout l, int n_rows, const uint8_t *w, int n_groups,
                     const struct activations *x, size_t stride, float *out)
{
    f32x8 acc[DOT_ROWS];
    for (int r = 0; r < n_rows; r++)
        acc[r] = load_f32(out + LANES * r);
    for (int i = 0; i < n_groups; i += l.n_groups) {
        uint8_t scales[8 * 2 * LANES];
        struct head h = read_head(l, w);
        for (int j = 0; j < 4 && l.scale == SCALE_K_I6X2; j++)
            store_u8(scales + GROUP * j, unpack_scales(w, j));
        w += head_bytes(l);
        for (int g = 0; g < l.n_groups; g++, x++, w += tile_bytes(l)) {
            for (int line = 0; line < tile_bytes(l) && l.scale != SCALE_F32X2; line += 64)
                __builtin_prefetch(w + PREFETCH_BYTES + line);
            const uint8_t *sub = l.scale == SCALE_K_I6X2 ? scales + 2 * LANES * g : w;
            dot_group(l, n_rows, h, sub, w + sub_bytes(l), x, stride, acc);
        }
    }
    for (int r = 0; r < n_rows; r++)
        store_f32(out + LANES * r, acc[r]);
}

/* out [n_rows][LANES] += x [n_rows][n_groups of stride] times columns of a row block. */
INLINE void dot(struct layout l, const uint8_t *w, int n_groups, const struct activations *x,
                size_t stride, int n_rows, float *out)
{
    while (n_rows > 0) {
        int n = n_rows >= TILE_ROWS ? TILE_ROWS : n_rows > 1 ? 2 : 1;
        if (n == TILE_ROWS)
            dot_rows(l, TILE_ROWS, w, n_groups, x, stride, out);
        else if (n == 2)
            dot_rows(l, 2, w, n_groups, x, stride, out);
        else
            dot_rows(l, 1, w, n_groups, x, stride, out);
        n_rows -= n;
        x += (size_t)n * stride;
        out += n * LANES;
    }
}

static void dot_tiles(const struct tile *tiles, int n_tiles, const struct activations *x,
                      size_t stride, int n_rows, float *out)
{
    dot(TILE, (const uint8_t *)tiles, n_tiles, x, stride, n_rows, out);
}

INLINE void dot_blocks(enum kind kind, const uint8_t *w, int n_groups, const struct activations *x,
                       int n_rows, float *out)
{
    struct tile tiles[TILES_AT_ONCE];
    for (int i = 0; i < n_groups; i += TILES_AT_ONCE) {
        int n = n_groups - i < TILES_AT_ONCE ? n_groups - i : TILES_AT_ONCE;
        for (int j = 0; j < n; j++)
            blocks_unpack(kind, w, i + j, &tiles[j]);
        dot_tiles(tiles, n, x + i, (size_t)n_groups, n_rows, out);
    }
}

INLINE void decode_quad(u8x32 codes, int offset, struct scales s, int add_min, float *out)
{
    for (int b = 0; b < 4; b++) {
        i32x8 code = (i32x8)((u32x8)codes >> 8 * b & 255) - offset;
        f32x8 w = s.scale * to_f32(code);
        store_f32(out + LANES * b, add_min ? w + s.min : w);
    }
}

INLINE void decode(struct layout l, const uint8_t *w, int i, float *out)
{
    w += (size_t)(i / l.n_groups) * (size_t)record_bytes(l);
    uint8_t scales[2 * 2 * LANES];
    struct head h = read_head(l, w);
    i %= l.n_groups;
    if (l.scale == SCALE_K_I6X2)
        store_u8(scales, unpack_scales(w, i / 2));
    w += head_bytes(l) + i * tile_bytes(l);
    const uint8_t *sub = l.scale == SCALE_K_I6X2 ? scales + 2 * LANES * (i % 2) : w;
    struct scales s[2] = {read_scales(l, h, sub, 0), read_scales(l, h, sub, n_halves(l) - 1)};
    UNROLL
    for (int quad = 0; quad < 8; quad++, out += 4 * LANES) {
        u8x32 codes = codes_of(l, w + sub_bytes(l), quad);
        if (is_signed(l))
            decode_quad(codes ^ 128, 128, s[quad / 4], 0, out);
        else
            decode_quad(codes, l.offset, s[quad / 4], has_min(l), out);
    }
}

static void decode_tile(const struct tile *tile, float *out)
{
    decode(TILE, (const uint8_t *)tile, 0, out);
}

static void decode_f32(const uint8_t *w, int i, float *out)
{
    memcpy(out, w + (size_t)i * GROUP * LANES * 4, GROUP * LANES * 4);
}

static void decode_f16(const uint8_t *w, int i, float *out)
{
    for (int k = 0; k < GROUP; k++)
        store_f32(out + LANES * k, f32_of_f16(w + ((size_t)i * GROUP + (size_t)k) * LANES * 2));
}

static void decode_bf16(const uint8_t *w, int i, float *out)
{
    for (int k = 0; k < GROUP; k++) {
        u32x8 bits = u32_of_u16(w + ((size_t)i * GROUP + (size_t)k) * LANES * 2) << 16;
        store_f32(out + LANES * k, (f32x8)bits);
    }
}

INLINE void accumulate_rows(int n_rows, const float *w0, const float *w1, int n_cols,
                            const float *x, size_t x_stride, float *totals)
{
    f32x8 a[EXACT_ROWS][2] = {{{0}}};
    for (int k = 0; k < n_cols; k++) {
        f32x8 v0 = load_f32(w0 + LANES * k), v1 = load_f32(w1 + LANES * k);
        for (int r = 0; r < n_rows; r++) {
            f32x8 xr = splat(x[(size_t)r * x_stride + (size_t)k]);
            a[r][0] = fma_f32(v0, xr, a[r][0]);
            a[r][1] = fma_f32(v1, xr, a[r][1]);
        }
    }
    for (int r = 0; r < n_rows; r++, totals += 2 * LANES) {
        store_f32(totals, load_f32(totals) + a[r][0]);
        store_f32(totals + LANES, load_f32(totals + LANES) + a[r][1]);
    }
}

static void accumulate(const float *w0, const float *w1, int n_cols, const float *x,
                       size_t x_stride, int n_rows, float *totals)
{
    while (n_rows > 0) {
        int n = n_rows >= EXACT_ROWS ? EXACT_ROWS : n_rows >= 2 ? 2 : 1;
        if (n == EXACT_ROWS)
            accumulate_rows(EXACT_ROWS, w0, w1, n_cols, x, x_stride, totals);
        else if (n == 2)
            accumulate_rows(2, w0, w1, n_cols, x, x_stride, totals);
        else
            accumulate_rows(1, w0, w1, n_cols, x, x_stride, totals);
        x += (size_t)n * x_stride;
        totals += (size_t)n * 2 * LANES;
        n_rows -= n;
    }
}

INLINE f32x8 abs_f32(f32x8 v) { return (f32x8)((u32x8)v & 0x7fffffffu); }

INLINE f32x8 max_f32(f32x8 a, f32x8 b)
{
    u32x8 greater = (u32x8)(a > b);
    return (f32x8)((greater & (u32x8)a) | (~greater & (u32x8)b));
}

/* d such that the largest magnitude becomes 127; not finite if one of the values is not. */
INLINE float scale_of(const float *x)
{
    f32x8 largest = {0}, zero = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        f32x8 v = load_f32(x + i);
        largest = max_f32(abs_f32(v), largest);
        zero += v * splat(0);
    }
    float max = 0, sum = 0;
    for (int i = 0; i < LANES; i++) {
        max = largest[i] > max ? largest[i] : max;
        sum += zero[i];
    }
    return max / 127 + sum;
}

static void quantize(const float *x, int n_groups, struct activations *out)
{
    const f32x8 magic = splat(0x1.8p23f);
    for (int g = 0; g < n_groups; g++, x += GROUP, out++) {
        int sums[2] = {0, 0};
        float d = scale_of(x);
        f32x8 divisor = splat(d > 0 ? d : 1);
        for (int i = 0; i < GROUP; i += LANES) {
            /* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, in the low bits. */
            i32x8 q = (i32x8)(load_f32(x + i) / divisor + magic) - (i32x8)magic;
            i8x8 bytes = __builtin_convertvector(q, i8x8);
            memcpy(out->q + i, &bytes, sizeof bytes);
            for (int j = 0; j < LANES; j++)
                sums[i / 16] += bytes[j];
        }
        out->d = d;
        out->sum = d * (float)(sums[0] + sums[1]);
        out->half_sums[0] = d * (float)sums[0];
        out->half_sums[1] = d * (float)sums[1];
    }
}

#define DEFINE(k)                                                                              \
    static void dot_##k(const uint8_t *w, int n_groups, const struct activations *x,          \
                        int n_rows, float *out)                                                \
    {                                                                                          \
        dot(LAYOUTS[KIND_##k], w, n_groups, x, (size_t)n_groups, n_rows, out);                 \
    }                                                                                          \
    static void decode_##k(const uint8_t *w, int i, float *out)                                \
    {                                                                                          \
        decode(LAYOUTS[KIND_##k], w, i, out);                                                  \
    }

#define DEFINE_BLOCKS(k)                                                                      \
    static void dot_##k(const uint8_t *w, int n_groups, const struct activations *x,          \
                        int n_rows, float *out)                                                \
    {                                                                                          \
        dot_blocks(KIND_##k, w, n_groups, x, n_rows, out);                                     \
    }                                                                                          \
    static void decode_##k(const uint8_t *w, int i, float *out)                                \
    {                                                                                          \
        struct tile tile;                                                                      \
        blocks_unpack(KIND_##k, w, i, &tile);                                                  \
        decode_tile(&tile, out);                                                               \
    }

#define EACH_KIND(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) \
    X(IQ4_XS) X(MXFP4) X(TQ2_0)
#define EACH_BLOCK_KIND(X) \
    X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M) X(TQ1_0) X(NVFP4)
#define DOT_ENTRY(k) [KIND_##k] = dot_##k,
#define DECODE_ENTRY(k) [KIND_##k] = decode_##k,

EACH_KIND(DEFINE)
EACH_BLOCK_KIND(DEFINE_BLOCKS)

const struct matmul_kernels KERNELS = {
    .quantize = quantize,
    .dot = {EACH_KIND(DOT_ENTRY) EACH_BLOCK_KIND(DOT_ENTRY)},
    .decode = {EACH_KIND(DECODE_ENTRY) EACH_BLOCK_KIND(DECODE_ENTRY)[KIND_F32] = decode_f32,
               [KIND_F16] = decode_f16,
               [KIND_BF16] = decode_bf16},
    .accumulate = accumulate,
};
