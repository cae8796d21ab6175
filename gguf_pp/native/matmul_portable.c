#include "matmul.h"

#define KERNELS matmul_portable
#include "matmul_body.h"
