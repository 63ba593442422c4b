// Stands in for the main memory of a node. Offloaded training of a large model takes hundreds of GB, more than this
// machine may have.
//
// All large blocks are views of the same SHARED bytes. They can be written and read, but each write to one block also
// changes the others. This library is preloaded, so every large tensor on the CPU is such a block.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "main_memory.h"

#define SHARED (64ul << 20)
#define SPACE (64ul << 40)  // bytes of address space for all blocks of a process, one after the other
#define MAX_BLOCKS 65536

static struct block {
    char *start;
    size_t size;
} blocks[MAX_BLOCKS];
static char *space, *next;
static size_t used, peak;
static int shared_bytes = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int reserve(void) {
    if (space) return 1;
    shared_bytes = memfd_create("shared_bytes", MFD_CLOEXEC);
    if (shared_bytes < 0 || ftruncate(shared_bytes, SHARED)) return 0;
    char *start = mmap(0, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    space = next = start;
    return 1;
}

static int map(char *start, size_t size) {
    for (size_t done = 0; done < size; done += SHARED) {
        size_t part = size - done < SHARED ? size - done : SHARED;
        if (mmap(start + done, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, shared_bytes, 0) == MAP_FAILED)
            return 0;
    }
    return 1;
}

void *take_main_memory(size_t size) {
    void *taken = NULL;
    size = (size + 4095) & ~4095ul;
    pthread_mutex_lock(&lock);
    if (reserve() && next + size <= space + SPACE && map(next, size)) {
        for (int i = 0; i < MAX_BLOCKS; i++) {
            if (blocks[i].start) continue;
            blocks[i] = (struct block){next, size};
            taken = next;
            next += size;
            used += size;
            if (used > peak) peak = used;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

int return_main_memory(void *pointer) {
    if (!space || (char *)pointer < space || (char *)pointer >= space + SPACE) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_BLOCKS; i++) {
        if (blocks[i].start != pointer) continue;
        mmap(pointer, blocks[i].size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        used -= blocks[i].size;
        blocks[i].start = NULL;
        break;
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

size_t fake_gpu_main_memory_peak(void) { return peak; }
void fake_gpu_reset_main_memory_peak(void) { peak = used; }

// torch allocates and frees tensors on the CPU with these two functions
int posix_memalign(void **pointer, size_t alignment, size_t size) {
    static int (*real)(void **, size_t, size_t);
    if (size >= LARGE) return (*pointer = take_main_memory(size)) ? 0 : ENOMEM;
    if (!real) real = dlsym(RTLD_NEXT, "posix_memalign");
    return real(pointer, alignment, size);
}

void free(void *pointer) {
    static void (*real)(void *);
    if (return_main_memory(pointer)) return;
    if (!real) real = dlsym(RTLD_NEXT, "free");
    real(pointer);
}
