/* From tensors with leading dims that broadcast to the token and repeat dims of rope_args. */
#ifndef TORCH_ROWS_H
#define TORCH_ROWS_H

#include "tensors.h"

/* The leading dims of all operands, aligned to the right and broadcast. */
enum { LEAD_X, LEAD_Y, LEAD_SAVED, LEAD_ANGLES, LEAD_GRAD_ANGLES, LEAD_TENSORS };

typedef struct {
    int dims;
    int64_t size[ROPE_MAX_DIMS];
    int64_t stride[LEAD_TENSORS][ROPE_MAX_DIMS];
} lead_dims;

/* Adds a tensor whose leading dims are sizes[0..dims), the last of them shortened by `skip`. */
void add_lead(call *c, lead_dims *lead, int which, int dims, const int64_t *sizes, const int64_t *strides,
              int64_t skip);

/* Splits the leading dims into token and repeat dims and joins what lies side by side. */
void set_rows(rope_args *args, const lead_dims *lead);

/* `..._at` are the numbers of dims; NONE: the operand, all zero before, has no such dim. */
enum { NONE = -1 };
void set_rope_tensor(rope_tensor *to, const tensor *t, int head_at);
void set_rope_operand(rope_operand *to, const tensor *t, int axis_at, int head_at, int pair_at);

#endif
