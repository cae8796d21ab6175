#include "matmul.h"

#if ISA_X86
#define KERNELS matmul_avx2
#define VEC_AVX2
ISA_BEGIN_AVX2
#include "matmul_body.h"
ISA_END
#endif
