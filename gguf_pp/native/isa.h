/* Which instructions the kernels use. A kernel's source is compiled once per level, between
 * ISA_BEGIN_x and ISA_END, and the copy is chosen at run time. */
#ifndef GGUF_PP_ISA_H
#define GGUF_PP_ISA_H

enum isa { ISA_PORTABLE, ISA_AVX2, ISA_AVX512, ISA_AVX512_VNNI };

/* The best level of this CPU, or the lower one that GGUF_PP_ISA asks for. */
enum isa isa_level(void);
const char *isa_name(enum isa level);

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ISA_X86 1
#include <immintrin.h>
#else
#define ISA_X86 0
#endif

#define ISA_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define ISA_BEGIN(features) \
    ISA_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ISA_END _Pragma("clang attribute pop")
#else
#define ISA_BEGIN(features) _Pragma("GCC push_options") ISA_PRAGMA(GCC target(features))
#define ISA_END _Pragma("GCC pop_options")
#endif

#define ISA_BEGIN_AVX2 ISA_BEGIN("avx2,fma,f16c")
#define ISA_BEGIN_AVX512 ISA_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define ISA_BEGIN_AVX512_VNNI \
    ISA_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

#endif
