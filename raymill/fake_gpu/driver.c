// CUDA's driver (libcuda.so.1) and NVML (libnvidia-ml.so.1) for a GPU that does not exist: the functions that torch,
// Triton and DeepSpeed need. runtime.c manages the GPU's memory; this file describes the GPU.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "common.h"

#define CONTEXT ((void *)0x1000)
#define NVML_NOT_SUPPORTED 3

int cuDriverGetVersion(int *version) { *version = 13000; DONE; }
int cuDeviceGetCount(int *count) { *count = gpu_count(); DONE; }
int cuDeviceGet(int *gpu, int number) { *gpu = number; DONE; }
int cuDeviceGetName(char *name, int size, int gpu) { snprintf(name, size, "%s", gpu_name()); DONE; }
int cuDeviceTotalMem_v2(size_t *size, int gpu) { *size = gpu_memory(); DONE; }
int cuDeviceGetUuid(char *uuid, int gpu) { memset(uuid, 1 + gpu, 16); DONE; }
int cuDeviceGetUuid_v2(char *uuid, int gpu) { return cuDeviceGetUuid(uuid, gpu); }
int cuDeviceGetAttribute(int *value, int attribute, int gpu) {
    // attributes have the same numbers in the runtime, which is preloaded
    int (*ask)(int *, int, int) = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
    *value = 0;
    return ask ? ask(value, attribute, gpu) : 0;
}
int cuDevicePrimaryCtxGetState(int gpu, unsigned *flags, int *is_active) { *flags = 0; *is_active = 1; DONE; }
int cuDevicePrimaryCtxRetain(void **context, int gpu) { *context = CONTEXT; DONE; }
int cuCtxGetCurrent(void **context) { *context = CONTEXT; DONE; }
int cuCtxGetDevice(int *gpu) { *gpu = 0; DONE; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; DONE; }
int cuModuleLoadData(void **module, const void *image) { *module = new_handle(); DONE; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
    return cuModuleLoadData(module, image);
}
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = new_handle(); DONE; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;  // threads per block; registers
    DONE;
}
int cuOccupancyMaxActiveClusters(int *count, void *function, void *configuration) { *count = 1; DONE; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int block, size_t shared) {
    *count = 2;
    DONE;
}
int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    if (attribute == 2) *(int *)value = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device
    else *(unsigned long long *)value = pointer;
    DONE;
}
int cuGetErrorString(int error, const char **text) { *text = "no error"; DONE; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_SUCCESS"; DONE; }
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = do_nothing;
    if (result) *result = 0;
    DONE;
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count(); DONE; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **gpu) { *gpu = (void *)(long)(number + 1); DONE; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu) { *gpu = (void *)1; DONE; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) { *gpu = (void *)1; DONE; }
int nvmlDeviceGetIndex(void *gpu, unsigned *number) { *number = (long)gpu - 1; DONE; }
int nvmlDeviceGetName(void *gpu, char *name, unsigned size) { snprintf(name, size, "%s", gpu_name()); DONE; }
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%08ld-0000-0000-0000-000000000000", (long)gpu);
    DONE;
}
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    *major = gpu_capability() / 10;
    *minor = gpu_capability() % 10;
    DONE;
}
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *memory) {
    memory[0] = memory[1] = gpu_memory();  // total, free
    memory[2] = 0;                         // used
    DONE;
}
int nvmlSystemGetDriverVersion(char *version, unsigned size) { snprintf(version, size, "580.95.05"); DONE; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; DONE; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; DONE; }
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *rates) { rates[0] = rates[1] = 0; DONE; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *processes) { *count = 0; DONE; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *gpu, void *info) {
    if (!variable("FAKE_GPU_FABRIC", 1)) return NVML_NOT_SUPPORTED;
    memset((char *)info + 4, 0, 32);  // all but the version; state 0: no fabric, which GPUs have since H100
    DONE;
}
const char *nvmlErrorString(int error) { return error ? "not supported" : "no error"; }
