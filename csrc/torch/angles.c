/* The ops that rotate by given angles, and the one that calculates angles. */
#include "backend.h"
#include "ops.h"
#include "rows.h"

#include <string.h>

/* Rotation by given angles [..., H | 1, F]; y, saved and grad_angles may be NULL. */
static void rotate_by_angles(call *c, const tensor *x, const tensor *y, const tensor *saved, const tensor *angles,
                             const tensor *grad_angles, int inverse) {
    lead_dims lead = {.dims = y ? y->dims - 2 : x->dims - 2};
    const tensor *operands[LEAD_TENSORS] = {x, y, saved, angles, grad_angles};
    for (int d = 0; d < lead.dims; d++)
        lead.size[d] = 1;
    for (int w = 0; w < LEAD_TENSORS; w++)
        if (operands[w]) add_lead(c, &lead, w, operands[w]->dims - 2, operands[w]->sizes, operands[w]->strides, 0);
    if (c->error || count_of(y ? y : x) == 0) return;
    const int64_t heads = x->sizes[x->dims - 2], pairs = angles->sizes[angles->dims - 1];
    rope_args args = {.dtype = x->dtype,
                      .heads = heads,
                      .head_dim = 2 * pairs,
                      .pairs = pairs,
                      .block = 2,
                      .inverse = inverse,
                      .axes = 1,
                      .freq_heads = angles->sizes[angles->dims - 2],
                      .saved_is_input = 1};
    set_rope_tensor(&args.x, x, x->dims - 2);
    if (y) set_rope_tensor(&args.y, y, y->dims - 2);
    if (saved) set_rope_tensor(&args.saved, saved, saved->dims - 2);
    set_rope_operand(&args.freqs, angles, NONE, angles->dims - 2, angles->dims - 1);
    if (grad_angles) set_rope_operand(&args.grad_freqs, grad_angles, NONE, angles->dims - 2, angles->dims - 1);
    set_rows(&args, &lead);
    run_rows(c, &args);
}

static void check_angles(call *c, const tensor *x, const tensor *angles) {
    if (c->error) return;
    check_embeddings(c, x);
    if (angles->dtype >= ROPE_EMBEDDING_DTYPES) fail(c, "angles must be floating point");
    if (angles->dims != x->dims) fail(c, "embeddings and angles must have the same number of dims");
    if (c->error) return;
    if (x->sizes[x->dims - 1] != 2 * angles->sizes[angles->dims - 1])
        fail(c, "angles must have half as many channels as the embeddings");
    const int64_t heads = angles->sizes[angles->dims - 2];
    if (heads != 1 && heads != x->sizes[x->dims - 2]) fail(c, "angles must have 1 head or those of the embeddings");
}

/* Whether broadcasting leaves the leading dims of x as they are. */
static int has_broadcast_shape(const tensor *x, const tensor *angles) {
    int same = 1;
    for (int d = 0; d < x->dims - 2; d++)
        same &= angles->sizes[d] == 1 || angles->sizes[d] == x->sizes[d];
    return same;
}

/* rotate_by_angles(x, angles) -> y, contiguous */
void kernel_rotate_by_angles(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor x = take(&c, stack[0]), angles = take(&c, stack[1]), y = {0};
    int64_t sizes[ROPE_MAX_DIMS];
    check_angles(&c, &x, &angles);
    for (int d = 0; !c.error && d < x.dims; d++)
        sizes[d] = d < x.dims - 2 && x.sizes[d] == 1 ? angles.sizes[d] : x.sizes[d];
    if (!c.error) y = allocate(&c, x.dims, sizes, NULL, x.torch_dtype);
    if (!c.error) rotate_by_angles(&c, &x, &y, NULL, &angles, NULL, 0);
    finish(&c, stack, &y, 1);
}

/* rotate_by_angles_(x, angles) */
void kernel_rotate_by_angles_(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor x = take(&c, stack[0]), angles = take(&c, stack[1]);
    check_angles(&c, &x, &angles);
    if (!c.error && !has_broadcast_shape(&x, &angles))
        fail(&c, "in place, angles may not have larger leading dims than the embeddings");
    write_to(&c, &x);
    if (!c.error) rotate_by_angles(&c, &x, &x, NULL, &angles, NULL, 0);
    finish(&c, stack, NULL, 0);
}

/* rotate_by_angles_backward(grad, x, angles, need_x, need_angles) -> (grad_x, grad_angles), contiguous */
void kernel_rotate_by_angles_backward(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor grad = take(&c, stack[0]), x = take(&c, stack[1]), angles = take(&c, stack[2]), results[2] = {{0}};
    const int need_x = flag(stack[3]), need_angles = flag(stack[4]);
    check_angles(&c, &grad, &angles);
    if (!c.error && (!same_shape(&grad, &x) || grad.dtype != x.dtype))
        fail(&c, "the gradient must have the shape and dtype of the embeddings");
    if (!c.error && !has_broadcast_shape(&x, &angles)) fail(&c, "angles must broadcast to the embeddings");
    results[0] = allocate_gradient(&c, &x, need_x);
    results[1] = allocate_gradient(&c, &angles, need_angles);
    if (!c.error && count_of(&grad) == 0)
        fill_with_zeros(&c, &results[1]);
    else if (!c.error)
        rotate_by_angles(&c, &grad, need_x ? &results[0] : NULL, need_angles ? &x : NULL, &angles,
                         need_angles ? &results[1] : NULL, 1);
    finish(&c, stack, results, 2);
}

/* calculate_angles(positions, freqs) -> angles [..., H, F], contiguous */
void kernel_calculate_angles(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor positions = take(&c, stack[0]), freqs = take(&c, stack[1]), angles = {0};
    int64_t sizes[ROPE_MAX_DIMS];
    if (!c.error && positions.dtype == ROPE_UNSUPPORTED) fail(&c, "positions must be integers or floating point");
    if (!c.error && freqs.dtype >= ROPE_EMBEDDING_DTYPES) fail(&c, "freqs must be floating point");
    if (!c.error && (positions.dims < 2 || positions.dims >= ROPE_MAX_DIMS || freqs.dims != 4))
        fail(&c, "positions need 2 to 15 dims, and freqs 4");
    if (!c.error && (freqs.sizes[0] < 1 || freqs.sizes[0] != positions.sizes[positions.dims - 1]))
        fail(&c, "freqs and positions must have the same number of axes, at least 1");
    if (!c.error) {
        memcpy(sizes, positions.sizes, (size_t)(positions.dims - 1) * sizeof *sizes);
        sizes[positions.dims - 1] = freqs.sizes[2];
        sizes[positions.dims] = freqs.sizes[3];
        angles = allocate(&c, positions.dims + 1, sizes, NULL, freqs.torch_dtype);
    }
    if (!c.error && count_of(&angles) > 0) {
        rope_args args = {.axes = freqs.sizes[0], .freq_heads = freqs.sizes[2], .pairs = freqs.sizes[3]};
        rope_operand out = {0};
        set_rope_operand(&args.positions, &positions, positions.dims - 1, NONE, NONE);
        set_rope_operand(&args.freqs, &freqs, 0, 2, 3);
        set_rope_operand(&out, &angles, NONE, angles.dims - 2, angles.dims - 1);
        args.token_dims = positions.dims - 1;
        for (int d = 0; d < args.token_dims; d++) {
            args.token_size[d] = positions.sizes[d];
            args.positions.token[d] = positions.strides[d];
            out.token[d] = angles.strides[d];
        }
        run_angles(&c, &args, freqs.sizes[1], freqs.strides[1], &out);
    }
    finish(&c, stack, &angles, 1);
}
