/* What a compiled program tells of each kernel: between compile.py's modules and driver.c. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* A module begins with this and its size; what follows is a shared object. */
#define STANDIN_MAGIC "standin\0"

struct standin_span {
    uint64_t address;
    size_t bytes;
    int write;
};

struct standin_kernel {
    const char *name;
    int count; /* of parameters */
    const size_t *sizes;
    void (*run)(void **arguments, const unsigned *grid, const unsigned *block, size_t shared);
    int (*spans)(void **arguments, struct standin_span *spans);
};
