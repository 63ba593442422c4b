// Stand-in for the main memory of a node, for blocks of LARGE bytes or more.
#pragma once
#include <stddef.h>
#include <unistd.h>

#define LARGE (32ul << 20)

void *take_main_memory(size_t size);      // returns NULL on failure
int return_main_memory(void *pointer);    // returns 0 if the pointer is not from take_main_memory
