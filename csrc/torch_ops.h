#ifndef TORCH_OPS_H
#define TORCH_OPS_H

#include <stdint.h>

/* Registers the CPU kernels of the nd_rotary ops; 0 on success. */
int torch_ops_register(void);

/* Tensor handles taken from torch and not yet given back; 0 between calls. */
int64_t torch_ops_live_handles(void);

#endif
