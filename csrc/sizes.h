/* Sizes of elements, and arithmetic of sizes. */
#ifndef ROPE_SIZES_H
#define ROPE_SIZES_H

#include "rope.h"

/* In bytes. */
static inline int64_t rope_size_of(rope_dtype dtype) {
    static const unsigned char sizes[ROPE_UNSUPPORTED + 1] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 0};
    return sizes[dtype];
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

static inline int64_t product(int dims, const int64_t *size) {
    int64_t count = 1;
    for (int d = 0; d < dims; d++)
        count *= size[d];
    return count;
}

#endif
