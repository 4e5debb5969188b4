/* The ops that rotate by positions and frequencies. */
#include "backend.h"
#include "ops.h"
#include "rows.h"
#include "sizes.h"

#include <string.h>

/* The settings that all rotations by positions and frequencies share, as they stand at the end of the schemas. */
typedef struct {
    int64_t heads; /* 0: the embeddings have dims of heads and channels; else both are in the last dim */
    int64_t block, rotary_offset, prefix;
    int head_first, inverse;
} settings;

enum { SETTINGS = 6 };

static settings read_settings(const torch_value *stack) {
    settings s = {(int64_t)stack[0], (int64_t)stack[1], (int64_t)stack[2],
                  (int64_t)stack[3], flag(stack[4]),    flag(stack[5])};
    return s;
}

/* [..., heads * D] as [..., heads, D]. The tensor then points into itself and may not be copied. */
static void split_heads(call *c, tensor *t, const settings *s) {
    if (s->heads == 0 || c->error) return;
    if (s->heads < 0 || s->head_first || t->dims < 1 || t->dims >= ROPE_MAX_DIMS ||
        t->sizes[t->dims - 1] < s->heads || t->sizes[t->dims - 1] % s->heads) {
        fail(c, "the last dim of the embeddings can't be split into heads");
        return;
    }
    const int last = t->dims - 1;
    memcpy(t->split_sizes, t->sizes, (size_t)last * sizeof *t->sizes);
    memcpy(t->split_strides, t->strides, (size_t)last * sizeof *t->strides);
    t->split_sizes[last] = s->heads;
    t->split_sizes[last + 1] = t->sizes[last] / s->heads;
    /* of an empty tensor this may overflow, but leads nowhere */
    t->split_strides[last] = (int64_t)((uint64_t)t->strides[last] * (uint64_t)t->split_sizes[last + 1]);
    t->split_strides[last + 1] = t->strides[last];
    t->sizes = t->split_sizes;
    t->strides = t->split_strides;
    t->dims++;
}

/* Which of so many dims of embeddings is that of heads, and of tokens. */
static int head_at(int dims, const settings *s) { return dims - (s->head_first ? 3 : 2); }
static int token_at(int dims, const settings *s) { return dims - (s->head_first ? 2 : 3); }

/* The parts of a call by positions and frequencies; y and saved may be NULL. */
typedef struct {
    const tensor *x, *y, *saved, *positions, *freqs, *grad_positions, *grad_freqs;
    int saved_is_input;
} parts;

static void check_parts(call *c, const parts *p, const settings *s) {
    const tensor *x = p->x, *positions = p->positions, *freqs = p->freqs;
    if (c->error) return;
    check_embeddings(c, x);
    if (positions->dtype == ROPE_UNSUPPORTED) fail(c, "positions must be integers or floating point");
    if (freqs->dtype >= ROPE_EMBEDDING_DTYPES) fail(c, "freqs must be floating point");
    if (positions->dims < 1 || freqs->dims != 3) fail(c, "positions need 1 dim or more, and freqs 3");
    if (c->error) return;
    if (x->dims < 3 && (s->head_first || s->prefix)) fail(c, "embeddings need a dim of tokens");
    if (c->error) return;
    const int64_t heads = x->sizes[head_at(x->dims, s)], head_dim = x->sizes[x->dims - 1], pairs = freqs->sizes[2];
    if (freqs->sizes[0] < 1 || freqs->sizes[0] != positions->sizes[positions->dims - 1])
        fail(c, "freqs and positions must have the same number of axes, at least 1");
    if (freqs->sizes[1] != 1 && freqs->sizes[1] != heads)
        fail(c, "freqs must have 1 head or those of the embeddings");
    if (s->rotary_offset < 0 || s->rotary_offset > head_dim || pairs > (head_dim - s->rotary_offset) / 2)
        fail(c, "the rotated channels must lie inside the head");
    if (s->block < 2 || s->block % 2 != 0 || (2 * pairs) % s->block != 0)
        fail(c, "the rotated channels must be whole blocks of an even number of channels");
    if (s->prefix < 0 || (s->prefix && s->prefix > x->sizes[token_at(x->dims, s)]))
        fail(c, "there are fewer tokens than prefix tokens");
}

/* Sizes and strides of the leading dims of an embedding tensor: all but heads and channels. */
static int lead_of(const tensor *t, const settings *s, int64_t *sizes, int64_t *strides) {
    int dims = 0;
    const int heads = head_at(t->dims, s);
    for (int d = 0; d < t->dims - 1; d++)
        if (d != heads) {
            sizes[dims] = t->sizes[d];
            strides[dims++] = t->strides[d];
        }
    return dims;
}

static void broadcast(call *c, const parts *p, const settings *s, lead_dims *lead) {
    const tensor *embeddings[] = {[LEAD_X] = p->x, [LEAD_Y] = p->y, [LEAD_SAVED] = p->saved};
    const tensor *positions[] = {p->positions, p->grad_positions};
    lead->dims = p->x->dims - 2 > p->positions->dims - 1 ? p->x->dims - 2 : p->positions->dims - 1;
    for (int d = 0; d < lead->dims; d++)
        lead->size[d] = 1;
    for (int w = 0; w < 3; w++) {
        int64_t sizes[ROPE_MAX_DIMS], strides[ROPE_MAX_DIMS];
        if (embeddings[w] && embeddings[w]->dims - 2 <= lead->dims)
            add_lead(c, lead, w, lead_of(embeddings[w], s, sizes, strides), sizes, strides, s->prefix);
    }
    for (int w = 0; w < 2; w++)
        if (positions[w])
            add_lead(c, lead, LEAD_ANGLES + w, positions[w]->dims - 1, positions[w]->sizes, positions[w]->strides, 0);
}

/* Whether broadcasting leaves the leading dims of x as they are. */
static int has_broadcast_shape(call *c, const parts *p, const settings *s) {
    lead_dims lead = {0};
    int64_t sizes[ROPE_MAX_DIMS], strides[ROPE_MAX_DIMS];
    broadcast(c, p, s, &lead);
    int same = lead.dims == lead_of(p->x, s, sizes, strides);
    for (int d = 0; same && d < lead.dims; d++)
        same = lead.size[d] == sizes[d] - (d == lead.dims - 1 ? s->prefix : 0);
    return same;
}

/* The tokens before the positions start: copied. The kernel does it too, as rows without pairs. */
static void copy_prefix(call *c, const rope_args *args, const lead_dims *lead, int64_t prefix, int64_t x_stride,
                        int64_t y_stride) {
    rope_args copy = *args;
    lead_dims rows = *lead;
    rows.size[rows.dims - 1] = prefix;
    /* not those of lead, which are 0 where one token follows the prefix */
    rows.stride[LEAD_X][rows.dims - 1] = x_stride;
    rows.stride[LEAD_Y][rows.dims - 1] = y_stride;
    memset(rows.stride[LEAD_ANGLES], 0, 2 * sizeof rows.stride[0]);
    memset(&copy.positions, 0, sizeof copy.positions);
    memset(&copy.saved, 0, sizeof copy.saved);
    memset(&copy.grad_positions, 0, sizeof copy.grad_positions);
    memset(&copy.grad_freqs, 0, sizeof copy.grad_freqs);
    copy.pairs = 0;
    copy.axes = 1;
    set_rows(&copy, &rows);
    run_rows(c, &copy);
}

/* How many elements lie from one tensor to the other. */
static int64_t step_between(const tensor *a, const tensor *b) {
    return (int64_t)((intptr_t)b->data - (intptr_t)a->data) / rope_size_of(a->dtype);
}

/* Whether both are one tensor with one more dim. Strides of dims of size 1 mean nothing; compilers let them vary. */
static int lie_alike(const tensor *a, const tensor *b) {
    if (!same_shape(a, b) || a->dtype != b->dtype) return 0;
    for (int d = 0; d < a->dims; d++)
        if (a->sizes[d] != 1 && a->strides[d] != b->strides[d]) return 0;
    return (intptr_t)a->data + step_between(a, b) * rope_size_of(a->dtype) == (intptr_t)b->data;
}

/* With `keys`, which lie alike, both are rotated, and gradients are sums over both. */
static void run_parts(call *c, const parts *p, const parts *keys, const settings *s) {
    lead_dims lead = {0};
    broadcast(c, p, s, &lead);
    if (c->error) return;
    const tensor *x = p->x;
    rope_args args = {.dtype = x->dtype,
                      .heads = x->sizes[head_at(x->dims, s)],
                      .head_dim = x->sizes[x->dims - 1],
                      .pairs = p->freqs->sizes[2],
                      .rotary_offset = s->rotary_offset,
                      .block = s->block,
                      .inverse = s->inverse,
                      .axes = p->freqs->sizes[0],
                      .freq_heads = p->freqs->sizes[1],
                      .saved_is_input = p->saved_is_input};
    set_rope_tensor(&args.x, x, head_at(x->dims, s));
    if (p->y) set_rope_tensor(&args.y, p->y, head_at(p->y->dims, s));
    if (p->saved) set_rope_tensor(&args.saved, p->saved, head_at(p->saved->dims, s));
    if (keys) {
        args.repeat_dims = 1;
        args.repeat_size[0] = 2;
        args.x.repeat[0] = step_between(x, keys->x);
        if (p->y) args.y.repeat[0] = step_between(p->y, keys->y);
        if (p->saved) args.saved.repeat[0] = step_between(p->saved, keys->saved);
    }
    const int axis_at = p->positions->dims - 1;
    set_rope_operand(&args.positions, p->positions, axis_at, NONE, NONE);
    set_rope_operand(&args.freqs, p->freqs, 0, 1, 2);
    if (p->grad_positions) set_rope_operand(&args.grad_positions, p->grad_positions, axis_at, NONE, NONE);
    if (p->grad_freqs) set_rope_operand(&args.grad_freqs, p->grad_freqs, 0, 1, 2);
    if (s->prefix && p->y && p->y->data != x->data)
        copy_prefix(c, &args, &lead, s->prefix, x->strides[token_at(x->dims, s)],
                    p->y->strides[token_at(p->y->dims, s)]);
    if (s->prefix) {
        if (lead.size[lead.dims - 1] == 0) { /* all tokens are prefix tokens; a step past them may lead anywhere */
            if (p->grad_positions) fill_with_zeros(c, p->grad_positions);
            if (p->grad_freqs) fill_with_zeros(c, p->grad_freqs);
            return;
        }
        const tensor *embeddings[] = {x, p->y, p->saved};
        rope_tensor *rows[] = {&args.x, &args.y, &args.saved};
        for (int i = 0; i < 3; i++)
            if (embeddings[i]) {
                const int64_t stride = embeddings[i]->strides[token_at(embeddings[i]->dims, s)];
                rows[i]->data = (char *)rows[i]->data + s->prefix * stride * rope_size_of(x->dtype);
            }
    }
    set_rows(&args, &lead);
    if (!c->error) run_rows(c, &args);
}

/* A new tensor like the embeddings t but of the given shape, both with heads split; itself not split yet. It has the
 * strides of t where that is the shape of t and t is dense, else it is contiguous. */
static tensor allocate_like(call *c, const tensor *t, int dims, const int64_t *sizes, const settings *s) {
    const int same = dims == t->dims && memcmp(sizes, t->sizes, (size_t)dims * sizeof *sizes) == 0;
    int64_t joined_sizes[ROPE_MAX_DIMS], joined_strides[ROPE_MAX_DIMS];
    memcpy(joined_sizes, sizes, (size_t)dims * sizeof *sizes);
    memcpy(joined_strides, t->strides, (size_t)t->dims * sizeof *t->strides);
    if (s->heads) {
        dims--;
        joined_sizes[dims - 1] *= joined_sizes[dims];
        joined_strides[t->dims - 2] = joined_strides[t->dims - 1];
    }
    return allocate(c, dims, joined_sizes, same && non_overlapping_and_dense(t) ? joined_strides : NULL,
                    t->torch_dtype);
}

static tensor allocate_output(call *c, const parts *p, const settings *s) {
    lead_dims lead = {0};
    tensor none = {0};
    broadcast(c, p, s, &lead);
    if (c->error) return none;
    const tensor *x = p->x;
    int64_t sizes[ROPE_MAX_DIMS];
    const int dims = lead.dims + 2;
    if (dims > ROPE_MAX_DIMS) {
        fail(c, "the result would have more than 16 dimensions");
        return none;
    }
    for (int d = 0, from = 0; d < dims - 1; d++) {
        if (d == head_at(dims, s)) {
            sizes[d] = x->sizes[head_at(x->dims, s)];
            continue;
        }
        sizes[d] = lead.size[from++];
        if (from == lead.dims) sizes[d] += s->prefix;
    }
    sizes[dims - 1] = x->sizes[x->dims - 1];
    return allocate_like(c, x, dims, sizes, s);
}

/* The rotation of x into a new tensor, as far as before it runs. */
static void prepare_rotation(call *c, parts *p, tensor *x, tensor *y, const settings *s) {
    p->x = x;
    split_heads(c, x, s);
    check_parts(c, p, s);
    if (!c->error) *y = allocate_output(c, p, s);
    split_heads(c, y, s);
    p->y = y;
}

/* rotate(x, positions, freqs, heads, block, rotary_offset, num_prefix_tokens, head_first, inverse) -> y */
void kernel_rotate(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor x = take(&c, stack[0]), positions = take(&c, stack[1]), freqs = take(&c, stack[2]), y = {0};
    settings s = read_settings(stack + 3);
    parts p = {.positions = &positions, .freqs = &freqs};
    prepare_rotation(&c, &p, &x, &y, &s);
    if (!c.error && count_of(&y) > 0) run_parts(&c, &p, NULL, &s);
    finish(&c, stack, &y, 1);
}

/* rotate_qk(query, key, positions, freqs, heads, block, rotary_offset, num_prefix_tokens, head_first, inverse)
 * -> (y_query, y_key) */
void kernel_rotate_qk(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor query = take(&c, stack[0]), key = take(&c, stack[1]), results[2] = {{0}};
    tensor positions = take(&c, stack[2]), freqs = take(&c, stack[3]);
    settings s = read_settings(stack + 4);
    parts queries = {.positions = &positions, .freqs = &freqs}, keys = queries;
    prepare_rotation(&c, &queries, &query, &results[0], &s);
    prepare_rotation(&c, &keys, &key, &results[1], &s);
    const int some = !c.error && count_of(&results[0]) > 0, others = !c.error && count_of(&results[1]) > 0;
    if (some && others && lie_alike(&query, &key) && lie_alike(&results[0], &results[1])) {
        run_parts(&c, &queries, &keys, &s);
    } else {
        if (some) run_parts(&c, &queries, NULL, &s);
        if (others) run_parts(&c, &keys, NULL, &s);
    }
    finish(&c, stack, results, 2);
}

/* rotate_(x, positions, freqs, heads, block, rotary_offset, num_prefix_tokens, head_first, inverse) */
void kernel_rotate_(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor x = take(&c, stack[0]), positions = take(&c, stack[1]), freqs = take(&c, stack[2]);
    settings s = read_settings(stack + 3);
    parts p = {.x = &x, .y = &x, .positions = &positions, .freqs = &freqs};
    split_heads(&c, &x, &s);
    check_parts(&c, &p, &s);
    if (!c.error && !has_broadcast_shape(&c, &p, &s))
        fail(&c, "in place, positions may not have more or larger leading dims than the embeddings");
    write_to(&c, &x);
    if (!c.error && count_of(&x) > 0) run_parts(&c, &p, NULL, &s);
    finish(&c, stack, NULL, 0);
}

/* The backward of a rotation from y and its gradient to that of x, as far as before it runs. */
static void prepare_backward(call *c, parts *p, tensor *grad, tensor *y, tensor *grad_x, const settings *s,
                             int need_x) {
    p->x = grad;
    p->saved = y;
    split_heads(c, grad, s);
    split_heads(c, y, s);
    check_parts(c, p, s);
    if (!c->error && (!same_shape(grad, y) || grad->dtype != y->dtype))
        fail(c, "the gradient must have the shape and dtype of the output");
    if (!c->error && p->positions->dims - 1 > grad->dims - 2) fail(c, "positions have more dims than the gradient");
    if (!c->error && !has_broadcast_shape(c, p, s)) fail(c, "the gradient must have the broadcast shape");
    if (c->error || !need_x) {
        *grad_x = allocate_gradient(c, y, 0);
        return;
    }
    *grad_x = allocate_like(c, y, y->dims, y->sizes, s);
    split_heads(c, grad_x, s);
    p->y = grad_x;
}

/* Gradients of positions and frequencies into results[0] and [1]. */
static void prepare_sums(call *c, parts *p, const torch_value *needs, tensor *results) {
    const int need_positions = flag(needs[0]), need_freqs = flag(needs[1]);
    if (need_positions && p->positions->dtype >= ROPE_EMBEDDING_DTYPES) fail(c, "integer positions have no gradient");
    results[0] = allocate_gradient(c, need_positions ? p->positions : p->saved, need_positions);
    results[1] = allocate_gradient(c, p->freqs, need_freqs);
    if (need_positions) p->grad_positions = &results[0];
    if (need_freqs) p->grad_freqs = &results[1];
}

static void run_backward(call *c, const parts *p, const parts *keys, const settings *s, tensor *sums) {
    if (!c->error && count_of(p->x) > 0)
        run_parts(c, p, keys, s);
    else if (!c->error)
        for (int i = 0; i < 2; i++)
            fill_with_zeros(c, &sums[i]);
}

/* rotate_backward(grad, y, positions, freqs, heads, block, rotary_offset, num_prefix_tokens, head_first, inverse,
 *                 need_x, need_positions, need_freqs) -> (grad_x, grad_positions, grad_freqs) */
void kernel_rotate_backward(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor grad = take(&c, stack[0]), y = take(&c, stack[1]), results[3] = {{0}};
    tensor positions = take(&c, stack[2]), freqs = take(&c, stack[3]);
    settings s = read_settings(stack + 4);
    const torch_value *needs = stack + 4 + SETTINGS;
    parts p = {.positions = &positions, .freqs = &freqs};
    s.inverse = !s.inverse;
    prepare_backward(&c, &p, &grad, &y, &results[0], &s, flag(needs[0]));
    prepare_sums(&c, &p, needs + 1, &results[1]);
    run_backward(&c, &p, NULL, &s, &results[1]);
    finish(&c, stack, results, 3);
}

/* rotate_qk_backward(grad_y_query, grad_y_key, y_query, y_key, positions, freqs, heads, block, rotary_offset,
 *                    num_prefix_tokens, head_first, inverse, need_x, need_positions, need_freqs)
 * -> (grad_query, grad_key, grad_positions, grad_freqs) */
void kernel_rotate_qk_backward(torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    call c = {0};
    tensor grad_query = take(&c, stack[0]), grad_key = take(&c, stack[1]), results[4] = {{0}};
    tensor query = take(&c, stack[2]), key = take(&c, stack[3]);
    tensor positions = take(&c, stack[4]), freqs = take(&c, stack[5]);
    settings s = read_settings(stack + 6);
    const torch_value *needs = stack + 6 + SETTINGS;
    parts queries = {.positions = &positions, .freqs = &freqs}, keys = queries;
    s.inverse = !s.inverse;
    prepare_backward(&c, &queries, &grad_query, &query, &results[0], &s, flag(needs[0]));
    prepare_backward(&c, &keys, &grad_key, &key, &results[1], &s, flag(needs[0]));
    prepare_sums(&c, &queries, needs + 1, &results[2]);
    if (!c.error && (!lie_alike(&grad_query, &grad_key) || !lie_alike(&query, &key)))
        fail(&c, "queries and keys, and their gradients, must lie alike in memory");
    run_backward(&c, &queries, &keys, &s, &results[2]);
    finish(&c, stack, results, 4);
}
