/* Eight floats at a time, for the bodies that are compiled once per instruction set.
 *
 * The includer defines FN(name), which gives each copy its own names, and VEC_AVX2 where AVX2, FMA
 * and F16C are there. No step depends on where a value stands among its neighbours. */
INLINE v8 FN(load)(const float *p) { return *(const v8_at_float *)p; }
INLINE void FN(store)(float *p, v8 x) { *(v8_at_float *)p = x; }
INLINE v8 FN(splat)(float x) { return (v8){x, x, x, x, x, x, x, x}; }

/* `mask` is all ones or all zeros in each lane. */
INLINE v8 FN(pick)(i8 mask, v8 yes, v8 no) { return (v8)((mask & (i8)yes) | (~mask & (i8)no)); }

/* a * b + c, rounded once where the machine can. */
INLINE v8 FN(fma)(v8 a, v8 b, v8 c)
{
#if VEC_AVX2
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < 8; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE v8 FN(load_half)(const uint16_t *p)
{
#if VEC_AVX2
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    v8 x;
    for (int i = 0; i < 8; i++)
        x[i] = half_to_float(p[i]);
    return x;
#endif
}

INLINE void FN(store_half)(uint16_t *p, v8 x)
{
#if VEC_AVX2
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, 0));
#else
    for (int i = 0; i < 8; i++)
        p[i] = float_to_half(x[i]);
#endif
}

INLINE v8 FN(round_to_half)(v8 x)
{
    uint16_t halves[8];
    FN(store_half)(halves, x);
    return FN(load_half)(halves);
}

INLINE float FN(sum)(v8 x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

INLINE float FN(max)(v8 x)
{
    float m = x[0];
    for (int i = 1; i < 8; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

/* exp(x) = scale * (1 + result), |result| < 0.42: x = n ln 2 + r, scale = 2^n, and the Taylor
 * series of exp(r) - 1 up to r^7 (relative error 5e-9). x is taken as at least -87.3 and at
 * most 88. */
INLINE v8 FN(exp_parts)(v8 x, v8 *scale)
{
    const v8 low = FN(splat)(-87.3f), high = FN(splat)(88.0f);
    const v8 shift = FN(splat)(0x1.8p23f); /* adding it rounds to an integer, in the low bits */
    x = FN(pick)(x < low, low, x);
    x = FN(pick)(x > high, high, x);
    const v8 shifted = FN(fma)(x, FN(splat)(0x1.715476p0f), shift);
    const v8 n = shifted - shift;
    v8 r = FN(fma)(n, FN(splat)(-0x1.62e400p-1f), x); /* ln 2 in two parts: n times the first */
    r = FN(fma)(n, FN(splat)(-0x1.7f7d1cp-20f), r);   /* is exact */
    *scale = (v8)(((i8)shifted << 23) + 0x3f800000);
    v8 p = FN(splat)(1.0f / 5040);
    p = FN(fma)(p, r, FN(splat)(1.0f / 720));
    p = FN(fma)(p, r, FN(splat)(1.0f / 120));
    p = FN(fma)(p, r, FN(splat)(1.0f / 24));
    p = FN(fma)(p, r, FN(splat)(1.0f / 6));
    p = FN(fma)(p, r, FN(splat)(0.5f));
    return FN(fma)(p, r * r, r);
}

/* 0 below -87.3, 1.7e38 above 88. */
INLINE v8 FN(exp)(v8 x)
{
    v8 scale;
    const v8 rest = FN(exp_parts)(x, &scale);
    return FN(pick)(x < FN(splat)(-87.3f), FN(splat)(0.0f), FN(fma)(scale, rest, scale));
}

/* m / (m + 2) of m = exp(2 |x|) - 1, which keeps its digits near 0. */
INLINE v8 FN(tanh)(v8 x)
{
    const i8 sign = (i8)x & INT32_MIN;
    v8 twice = (v8)((i8)x ^ sign) * 2.0f, scale;
    twice = FN(pick)(twice > FN(splat)(40.0f), FN(splat)(40.0f), twice);
    const v8 rest = FN(exp_parts)(twice, &scale);
    const v8 m = FN(fma)(scale, rest, scale - 1.0f);
    return (v8)((i8)(m / (m + 2.0f)) | sign);
}

/* 1 / sqrt(mean(x²) + eps). Squares are summed in eight lanes of double, then the lanes. */
INLINE float FN(rms_scale)(const float *x, int64_t n, double eps)
{
    d4 low = {0}, high = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const d4 a = __builtin_convertvector(*(const v4_at_float *)(x + i), d4);
        const d4 b = __builtin_convertvector(*(const v4_at_float *)(x + i + 4), d4);
        low += a * a;
        high += b * b;
    }
    double sum = 0;
    for (; i < n; i++)
        sum += (double)x[i] * x[i];
    low += high;
    sum += (low[0] + low[2]) + (low[1] + low[3]);
    return (float)(1 / sqrt(sum / (double)n + eps));
}
