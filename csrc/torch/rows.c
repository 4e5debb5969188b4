#include "rows.h"

void add_lead(call *c, lead_dims *lead, int which, int dims, const int64_t *sizes, const int64_t *strides,
              int64_t skip) {
    for (int d = 0; d < dims; d++) {
        const int at = lead->dims - dims + d;
        const int64_t size = d == dims - 1 ? sizes[d] - skip : sizes[d];
        if (size == 1) continue; /* stride 0: broadcast */
        if (lead->size[at] != 1 && lead->size[at] != size)
            fail(c, "leading dims of the embeddings and of the positions or angles can't be broadcast");
        lead->size[at] = size;
        lead->stride[which][at] = strides[d];
    }
}

static void append(int *count, int64_t *sizes, int64_t *strides[LEAD_TENSORS], int64_t size,
                   const int64_t step[LEAD_TENSORS]) {
    const int last = *count - 1;
    int joins = last >= 0;
    for (int w = 0; joins && w < LEAD_TENSORS; w++)
        joins = strides[w][last] == step[w] * size;
    const int at = joins ? last : (*count)++;
    sizes[at] = joins ? sizes[at] * size : size;
    for (int w = 0; w < LEAD_TENSORS; w++)
        strides[w][at] = step[w];
}

void set_rows(rope_args *args, const lead_dims *lead) {
    rope_operand *angles = args->positions.data ? &args->positions : &args->freqs;
    rope_operand *grad = args->positions.data ? &args->grad_positions : &args->grad_freqs;
    int64_t unused[2][ROPE_MAX_DIMS] = {{0}}; /* as of repeat dims that were there before */
    int64_t *token[] = {args->x.token, args->y.token, args->saved.token, angles->token, grad->token};
    int64_t *repeat[] = {args->x.repeat, args->y.repeat, args->saved.repeat, unused[0], unused[1]};
    for (int d = 0; d < lead->dims; d++) {
        int64_t step[LEAD_TENSORS];
        if (lead->size[d] == 1) continue;
        for (int w = 0; w < LEAD_TENSORS; w++)
            step[w] = lead->stride[w][d];
        if (step[LEAD_ANGLES] != 0 || step[LEAD_GRAD_ANGLES] != 0)
            append(&args->token_dims, args->token_size, token, lead->size[d], step);
        else
            append(&args->repeat_dims, args->repeat_size, repeat, lead->size[d], step);
    }
}

void set_rope_tensor(rope_tensor *to, const tensor *t, int head_at) {
    to->data = (void *)(uintptr_t)t->data;
    to->head = t->sizes[head_at] == 1 ? 0 : t->strides[head_at];
    to->channel = t->strides[t->dims - 1];
}

void set_rope_operand(rope_operand *to, const tensor *t, int axis_at, int head_at, int pair_at) {
    to->data = (void *)(uintptr_t)t->data;
    to->dtype = t->dtype;
    if (axis_at != NONE) to->axis = t->strides[axis_at];
    if (head_at != NONE) to->head = t->strides[head_at];
    if (pair_at != NONE) to->pair = t->strides[pair_at];
}
