#ifndef TORCH_OPS_H
#define TORCH_OPS_H

/* Registers the CPU kernels of the nd_rotary ops; 0 on success. */
int torch_ops_register(void);

#endif
