/* Work on torch's threads. */
#ifndef TORCH_PARALLEL_H
#define TORCH_PARALLEL_H

#include "rope.h"

/* To be called once, before the first work; 0 on success. */
int torch_parallel_init(void);

/* A rope_parallel_for that also works in the child of a fork. */
int torch_parallel(int64_t count, int64_t grain, rope_task *task, void *context);

#endif
