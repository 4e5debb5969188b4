/* Tensors of one call into a kernel: taken from torch's stack, allocated, and given back.
 *
 * A kernel owns every handle on its stack, errors included: `take` counts a handle in, `finish` frees them all and
 * only then raises, by a C++ exception thrown through these frames (hence -fexceptions). */
#ifndef TORCH_TENSORS_H
#define TORCH_TENSORS_H

#include "abi.h"
#include "rope.h"

typedef struct {
    torch_tensor handle;
    int dims;
    const int64_t *sizes, *strides;
    int64_t split_sizes[ROPE_MAX_DIMS], split_strides[ROPE_MAX_DIMS]; /* what those point to after split_heads */
    int32_t torch_dtype;
    rope_dtype dtype;
    const void *data;
} tensor;

enum { MAX_TENSORS = 16 };

/* One call: what must be freed, the device, which is that of the first tensor, and the first error. */
typedef struct {
    torch_tensor handles[MAX_TENSORS];
    int count;
    int32_t device_type, device_index;
    const char *error;
} call;

/* Notes the first error; the kernel goes on to `finish` without touching memory. */
void fail(call *c, const char *error);

/* Arguments: a tensor, to be read, and a bool. */
tensor take(call *c, torch_value value);
static inline int flag(torch_value value) { return (value & 0xff) != 0; }

/* A tensor of embeddings, to be written to. */
void write_to(call *c, tensor *t);

void check_embeddings(call *c, const tensor *t);

/* A new tensor; with strides == NULL contiguous. */
tensor allocate(call *c, int dims, const int64_t *sizes, const int64_t *strides, int32_t dtype);

/* A contiguous tensor for the gradient of `t`; empty where it is not wanted. */
tensor allocate_gradient(call *c, const tensor *t, int wanted);

/* Gives the results to the stack, frees everything else, raises the error if there was one. */
void finish(call *c, torch_value *stack, const tensor *results, int result_count);

int64_t count_of(const tensor *t);
size_t bytes_of(const tensor *t);
int same_shape(const tensor *a, const tensor *b);
int non_overlapping_and_dense(const tensor *t);

/* Handles taken and not yet given back; 0 between calls. */
int64_t torch_live_handles(void);

#endif
