/* Which backend does the work of a call: that of the device its tensors are on. */
#ifndef TORCH_BACKEND_H
#define TORCH_BACKEND_H

#include "tensors.h"

/* Errors are noted in the call. */
void run_rows(call *c, const rope_args *args);
void run_angles(call *c, const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles);
void fill_with_zeros(call *c, const tensor *t);

/* Whether this process's torch has CUDA, for which this binary has kernels that the user wants. */
int cuda_is_wanted(void);

/* For tests: calls on the CPU take the way of CUDA, with this library in place of the driver; NULL: no more. */
void emulate_cuda(const char *driver);

#endif
