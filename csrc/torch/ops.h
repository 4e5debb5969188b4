/* The kernels that torch's dispatcher calls: arguments from the stack into rope_args, a backend, results back. The
 * schemas are in nd_rotary_encodings/_ops.py; the order of arguments here must be theirs. */
#ifndef TORCH_OPS_H
#define TORCH_OPS_H

#include "abi.h"

/* rotate.c */
torch_kernel kernel_rotate, kernel_rotate_, kernel_rotate_backward, kernel_rotate_qk, kernel_rotate_qk_backward;
/* angles.c */
torch_kernel kernel_rotate_by_angles, kernel_rotate_by_angles_, kernel_rotate_by_angles_backward;
torch_kernel kernel_calculate_angles;

/* Registers them, for CUDA too where it is wanted; 0 on success. */
int torch_ops_register(void);

#endif
