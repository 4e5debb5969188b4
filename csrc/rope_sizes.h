/* Arithmetic of sizes, for what cuts a call into pieces. */
#ifndef ROPE_SIZES_H
#define ROPE_SIZES_H

#include <stdint.h>

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
