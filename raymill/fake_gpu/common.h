// Functions that runtime.c and driver.c share. Environment variables describe the fake GPU.
#pragma once
#include <stdlib.h>

#define DONE return 0

static long variable(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

static int gpu_count(void) { return variable("FAKE_GPU_COUNT", 1); }
static size_t gpu_memory(void) { return (size_t)variable("FAKE_GPU_MIB", 40960) << 20; }
static int gpu_capability(void) { return variable("FAKE_GPU_CAPABILITY", 80); }  // 80: an A100's 8.0
static const char *gpu_name(void) {
    const char *name = getenv("FAKE_GPU_NAME");
    return name ? name : "NVIDIA A100-SXM4-40GB";
}

// No code looks inside streams, events, kernels and similar objects, so each handle is just a new number.
static void *new_handle(void) {
    static long last = 0x10000;
    return (void *)__sync_add_and_fetch(&last, 64);
}

static int do_nothing(void) { DONE; }
