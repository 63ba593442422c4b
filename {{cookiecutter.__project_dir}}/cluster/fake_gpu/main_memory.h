// Main memory of the node, for blocks of LARGE bytes or more.
#pragma once
#include <stddef.h>
#include <unistd.h>

#define LARGE (32ul << 20)

void *take_main_memory(size_t size);      // NULL if there is none
int return_main_memory(void *pointer);    // 0 if the pointer is not a block of it
