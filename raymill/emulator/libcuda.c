// CUDA's driver (libcuda.so.1) on an emulated host: the two functions that raymill/node/gpu_check.py calls.
// /etc/gpus has the number of GPUs. As on a machine whose fabric manager starts late, the first cuInit fails.
#include <fcntl.h>
#include <stdio.h>

#define NO_DEVICE 100
#define SYSTEM_NOT_READY 802

int cuDeviceGetCount(int *count) {
    FILE *file = fopen("/etc/gpus", "r");
    *count = 0;
    if (file) {
        if (fscanf(file, "%d", count) != 1) *count = 0;
        fclose(file);
    }
    return 0;
}

int cuInit(unsigned flags) {
    int count;
    cuDeviceGetCount(&count);
    if (!count) return NO_DEVICE;
    return open("/dev/shm/fabric-manager", O_CREAT | O_EXCL, 0600) < 0 ? 0 : SYSTEM_NOT_READY;
}
