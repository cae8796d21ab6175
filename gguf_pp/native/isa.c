#include "isa.h"

#include <stdlib.h>
#include <string.h>

static const char *const NAMES[] = {"portable", "avx2", "avx512", "avx512-vnni"};

const char *isa_name(enum isa level) { return NAMES[level]; }

static enum isa detect(void)
{
#if ISA_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return ISA_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return ISA_AVX2;
    return __builtin_cpu_supports("avx512vnni") ? ISA_AVX512_VNNI : ISA_AVX512;
#else
    return ISA_PORTABLE;
#endif
}

enum isa isa_level(void)
{
    enum isa level = detect();
    const char *asked = getenv("GGUF_PP_ISA");
    for (int i = 0; asked && i < (int)level; i++)
        if (!strcmp(asked, NAMES[i]))
            return (enum isa)i;
    return level;
}
