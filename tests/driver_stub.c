/* A driver of CUDA with one device that computes nothing: as much as Triton asks of one.

   Stands in for libcuda.so.1, so that Triton's own code compiles, loads and launches kernels on a
   machine without a GPU. Notes every launch, and refuses what a device would refuse. Declarations
   are those of the cuda.h that Triton brings. */

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAME = 64, MAX_LAUNCHES = 1 << 16, MAX_GRID_YZ = 65535, MAX_THREADS = 1024 };

struct launch {
  char kernel[MAX_NAME];
  void *function;
  unsigned grid[3], threads, shared;
};

static struct launch launches[MAX_LAUNCHES];
static int n_launches, max_shared;
static int context;

void stub_reset(int shared_bytes) {
  max_shared = shared_bytes;
  n_launches = 0;
}

int stub_launches(struct launch **first) {
  *first = launches;
  return n_launches;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "unknown error";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int i) {
  *device = i;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = max_shared; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 1 << 16; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 108; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
  *made = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  /* What ptxas makes is an ELF file. */
  if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)&context;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  /* Lives as long as the process, as a loaded kernel does. */
  char *copy = calloc(1, MAX_NAME);
  if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
  strncpy(copy, name, MAX_NAME - 1);
  *function = (CUfunction)copy;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return value > max_shared ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ ||
      config->gridDimY > MAX_GRID_YZ || config->gridDimZ > MAX_GRID_YZ ||
      config->blockDimX > MAX_THREADS || config->sharedMemBytes > (unsigned)max_shared ||
      n_launches == MAX_LAUNCHES)
    return CUDA_ERROR_INVALID_VALUE;
  struct launch *launch = &launches[n_launches++];
  memcpy(launch->kernel, (const char *)function, MAX_NAME);
  launch->function = (void *)function;
  launch->grid[0] = config->gridDimX;
  launch->grid[1] = config->gridDimY;
  launch->grid[2] = config->gridDimZ;
  launch->threads = config->blockDimX;
  launch->shared = config->sharedMemBytes;
  return CUDA_SUCCESS;
}
