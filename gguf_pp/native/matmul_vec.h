/* The few vector operations of the kernels, for the level that the including file is compiled for.
 *
 * Vectors are the compiler's own; only what it would not find by itself is spelled per level:
 * fused multiply-add, f16, table look-up, and products of bytes. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t i8x8 __attribute__((vector_size(8)));

INLINE f32x8 load_f32(const float *p) { f32x8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, f32x8 v) { memcpy(p, &v, sizeof v); }
INLINE void store_u8(uint8_t *p, u8x32 v) { memcpy(p, &v, sizeof v); }
INLINE u8x32 load_u8(const uint8_t *p) { u8x32 v; memcpy(&v, p, sizeof v); return v; }
INLINE f32x8 splat(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }
INLINE f32x8 to_f32(i32x8 v) { return __builtin_convertvector(v, f32x8); }

INLINE f32x8 f32_of_u8(const uint8_t *p)
{
    u8x8 v;
    memcpy(&v, p, sizeof v);
    return to_f32(__builtin_convertvector(v, i32x8));
}

INLINE f32x8 f32_of_i8(const uint8_t *p)
{
    i8x8 v;
    memcpy(&v, p, sizeof v);
    return to_f32(__builtin_convertvector(v, i32x8));
}

INLINE u32x8 u32_of_u16(const uint8_t *p)
{
    u16x8 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, u32x8);
}

/* Shift 16-bit lanes, left if n > 0; the caller masks what crosses a byte. */
INLINE u8x32 shift(u8x32 v, int n)
{
    return n >= 0 ? (u8x32)((u16x16)v << n) : (u8x32)((u16x16)v >> -n);
}

/* Four consecutive bytes in every lane. */
INLINE u8x32 splat_quad(const int8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return (u8x32)(i32x8){x, x, x, x, x, x, x, x};
}

INLINE i32x8 pair_sums(i16x16 v) { return ((i32x8)v << 16 >> 16) + ((i32x8)v >> 16); }

#if defined(VEC_AVX2) || defined(VEC_VNNI)

enum { TILE_ROWS = DOT_ROWS };
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

INLINE f32x8 fma_f32(f32x8 a, f32x8 b, f32x8 c) { return _mm256_fmadd_ps(a, b, c); }

INLINE f32x8 f32_of_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE u8x32 look_up(const int8_t *table, u8x32 v)
{
    __m128i t = _mm_loadu_si128((const __m128i *)table);
    return (u8x32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)v);
}

#else

enum { TILE_ROWS = 1 };
#define UNROLL _Pragma("GCC unroll 1")

INLINE f32x8 fma_f32(f32x8 a, f32x8 b, f32x8 c) { return a * b + c; }

/* Moving the bits gives the value times 2^-112, subnormals included; only the exponent of
 * infinities and NaNs needs another 112. */
INLINE f32x8 f32_of_f16(const uint8_t *p)
{
    u32x8 h = u32_of_u16(p), magnitude = (h & 0x7fff) << 13;
    u32x8 special = (u32x8)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
    u32x8 value = (u32x8)((f32x8)magnitude * splat(0x1p112f));
    return (f32x8)(value | special | (h & 0x8000) << 16);
}

INLINE u8x32 look_up(const int8_t *table, u8x32 v)
{
    uint8_t bytes[32];
    memcpy(bytes, &v, sizeof bytes);
    for (int i = 0; i < 32; i++)
        bytes[i] = (uint8_t)table[bytes[i]];
    return load_u8(bytes);
}

#endif

/* Sums of products in each row's lane: `add_products` of unsigned codes by signed activations,
 * `widen` after as many of them as 16 bits hold, `add_signed` of signed codes plus SIGNED_OFFSET. */
#if defined(VEC_VNNI)

enum { SIGNED_OFFSET = 128 };
typedef i32x8 sums;

INLINE sums add_products(sums a, u8x32 codes, u8x32 x)
{
    return (sums)_mm256_dpbusd_epi32((__m256i)a, (__m256i)codes, (__m256i)x);
}
INLINE i32x8 widen(sums a) { return a; }
INLINE i32x8 add_signed(i32x8 a, u8x32 codes, u8x32 x) { return add_products(a, codes ^ 128, x); }

#elif defined(VEC_AVX2)

enum { SIGNED_OFFSET = 0 };
typedef i16x16 sums;

INLINE sums add_products(sums a, u8x32 codes, u8x32 x)
{
    return a + (i16x16)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
}
INLINE i32x8 widen(sums a) { return (i32x8)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
INLINE i32x8 add_signed(i32x8 a, u8x32 codes, u8x32 x)
{
    __m256i c = (__m256i)codes, signed_x = _mm256_sign_epi8((__m256i)x, c);
    return a + widen((i16x16)_mm256_maddubs_epi16(_mm256_abs_epi8(c), signed_x));
}

#else

enum { SIGNED_OFFSET = 0 };
typedef i16x16 sums;

INLINE i16x16 even_bytes(u8x32 v) { return (i16x16)((u16x16)v << 8) >> 8; }
INLINE i16x16 odd_bytes(u8x32 v) { return (i16x16)v >> 8; }

INLINE sums add_products(sums a, u8x32 codes, u8x32 x)
{
    i16x16 even = (i16x16)((u16x16)codes & 255), odd = (i16x16)((u16x16)codes >> 8);
    return a + even * even_bytes(x) + odd * odd_bytes(x);
}
INLINE i32x8 widen(sums a) { return pair_sums(a); }
INLINE i32x8 add_signed(i32x8 a, u8x32 codes, u8x32 x)
{
    return a + widen(even_bytes(codes) * even_bytes(x) + odd_bytes(codes) * odd_bytes(x));
}

#endif
