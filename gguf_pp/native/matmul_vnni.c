#include "matmul.h"

#if ISA_X86
#define KERNELS matmul_vnni
#define VEC_VNNI
ISA_BEGIN_AVX512_VNNI
#include "matmul_body.h"
ISA_END
#endif
