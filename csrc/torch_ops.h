#ifndef TORCH_OPS_H
#define TORCH_OPS_H

/* Registers the kernels of the nd_rotary ops, for CUDA too where it is wanted; 0 on success. */
int torch_ops_register(void);

#endif
