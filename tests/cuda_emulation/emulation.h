/* What a C compiler needs to take cuda/kernels.cu: CUDA's words, and the threads of a block as coroutines. Included
 * before everything else by the compiler's command line; emulation.c runs the blocks. */
#ifndef EMULATION_H
#define EMULATION_H

#include <stddef.h>
#include <stdint.h>

#define __device__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define ROPE_KERNEL(blocks) static void

typedef struct {
    uint32_t x, y, z, w;
} __attribute__((aligned(16))) uint4;

typedef struct {
    unsigned x, y, z;
} emulation_index;

extern emulation_index emulation_thread, emulation_block, emulation_threads, emulation_blocks;
#define threadIdx emulation_thread
#define blockIdx emulation_block
#define blockDim emulation_threads
#define gridDim emulation_blocks

/* A block's memory: exactly as many bytes as the launch asked for can be used, and they start as NaNs. */
extern uint4 emulation_memory[];
#define ROPE_BLOCK_MEMORY(name) uint4 *const name = emulation_memory

/* Each waits for the others at the same line; all else is an error that ends the launch. */
void emulation_barrier(int line);
void emulation_shuffle_down(void *value, size_t size, unsigned mask, unsigned delta, int width, int line);

#define __syncthreads() emulation_barrier(__LINE__)
#define __shfl_down_sync(mask, value, delta, width)                                                                  \
    __extension__({                                                                                                  \
        __typeof__(value) value_ = (value);                                                                          \
        emulation_shuffle_down(&value_, sizeof value_, mask, (unsigned)(delta), width, __LINE__);                    \
        value_;                                                                                                      \
    })

#endif
