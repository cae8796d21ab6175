/* Eight floats at a time: types, and what is the same for all instruction sets. */
#ifndef GGUF_PP_LANES_H
#define GGUF_PP_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
typedef float v8_at_float __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4_at_float __attribute__((vector_size(16), aligned(4), may_alias));

/* IEEE 754 binary16, for machines without conversion instructions. */
INLINE float half_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float f;
    if (rest >= 0x0f800000) { /* infinity, NaN */
        const uint32_t bits = sign | 0x70000000 | rest;
        memcpy(&f, &bits, 4);
        return f;
    }
    memcpy(&f, &rest, 4);
    f *= 0x1p112f; /* exact, subnormals included */
    return sign ? -f : f;
}

/* Round to nearest even. */
INLINE uint16_t float_to_half(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00;
    if (bits >= 0x477ff000) /* 65520 and more */
        return sign | 0x7c00;
    if (bits < 0x38800000) { /* below 2^-14: the sum's last place is 2^-24 */
        float sum;
        memcpy(&sum, &bits, 4);
        sum += 0.5f;
        memcpy(&bits, &sum, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
#endif
