/* The CUDA backend: cuts a call into pieces of work and launches the kernels of kernels.cu. */
#include "plan.h"

#include "driver.h"
#include "error.h"
#include "sizes.h"

static rope_tensor *tensor_of(rope_args *args, int i) { return i == 0 ? &args->x : i == 1 ? &args->y : &args->saved; }

/* Heads that share frequencies are one more repeat dim, joined to the one before where that is possible. */
static void heads_as_repeats(rope_args *args) {
    if (args->freq_heads != 1 || args->heads == 1) return;
    const int last = args->repeat_dims - 1;
    int joins = last >= 0;
    for (int i = 0; i < 3; i++)
        joins = joins && tensor_of(args, i)->repeat[last] == tensor_of(args, i)->head * args->heads;
    const int at = joins ? last : args->repeat_dims++;
    args->repeat_size[at] = joins ? args->repeat_size[at] * args->heads : args->heads;
    for (int i = 0; i < 3; i++)
        tensor_of(args, i)->repeat[at] = tensor_of(args, i)->head;
    args->heads = 1;
}

/* Whether every access of a whole vector of a tensor is aligned. */
static int aligned(const rope_args *args, const rope_tensor *t) {
    const int64_t size = rope_size_of(args->dtype), per_vector = ROPE_VECTOR / size;
    if (!t->data) return 1;
    int64_t strides = args->heads > 1 ? t->head : 0;
    for (int d = 0; d < args->token_dims; d++)
        strides |= t->token[d];
    for (int d = 0; d < args->repeat_dims; d++)
        strides |= t->repeat[d];
    return t->channel == 1 && strides % per_vector == 0 && (uintptr_t)t->data % ROPE_VECTOR == 0;
}

static int layout_of(const rope_args *args, int copies) {
    const int64_t per_vector = ROPE_VECTOR / rope_size_of(args->dtype);
    const int64_t width = args->block == 2 ? 2 * args->pairs : args->block / 2; /* channels that lie together */
    if (width % per_vector || args->rotary_offset % per_vector || (copies && args->head_dim % per_vector) ||
        !aligned(args, &args->x) || !aligned(args, &args->y) || !aligned(args, &args->saved))
        return ROPE_SCALAR;
    return args->block == 2 ? ROPE_INTERLEAVED : ROPE_HALVES;
}

/* Slots, lanes and pieces of work for one layout. Returns the bytes of a block's memory, or -1 where counts take more
 * than 32 bits (31 for pieces of work: blocks add the grid, as large again, to their number). */
static int64_t cut(rope_cuda_plan *plan, int64_t tokens, int64_t repeats, int layout, int copies, int64_t threads,
                   int64_t turns) {
    const rope_args *args = &plan->args;
    const int64_t size = rope_size_of(args->dtype), per_vector = ROPE_VECTOR / size;
    const int64_t pairs = layout == ROPE_INTERLEAVED ? per_vector / 2 : layout == ROPE_HALVES ? per_vector : 1;
    const int backward = args->saved.data != NULL;
    const int64_t rotated = args->pairs / pairs;
    const int64_t copied = copies ? (args->head_dim - 2 * args->pairs) / (layout == ROPE_SCALAR ? 1 : per_vector) : 0;
    const int64_t slots = args->heads * (rotated + copied);

    /* as many lanes of a warp as leave no more than an eighth of them idle */
    int log2 = 5;
    while (pieces(slots, 1 << log2) * 7 << log2 > slots * 8)
        log2--;
    const int64_t lanes = 1 << log2, tiles = pieces(slots, lanes), token_lanes = threads / lanes;

    /* enough work for all multiprocessors: repeats are cut where tokens are few, and where there are many each thread
     * takes several, as a piece of work begins with reading frequencies and ends with a sum */
    const int64_t enough = backward ? 512 : 1024, rows = larger(tiles * pieces(tokens, token_lanes), 1);
    const int64_t wanted_units = larger(smaller(pieces(repeats, 4), enough / rows), 1);
    const int64_t unit_repeats = larger(pieces(repeats, wanted_units), 1),
                  repeat_units = pieces(repeats, unit_repeats);
    const int64_t unit_tokens = token_lanes * larger(smaller(rows / enough, turns), 1);
    const int64_t token_units = pieces(tokens, unit_tokens), work = tiles * token_units * repeat_units;
    if ((slots | tokens | repeats | args->pairs | args->block) >> 32 || work >> 31) return -1;

    plan->tokens = (uint32_t)tokens, plan->repeats = (uint32_t)repeats;
    plan->slots = (uint32_t)slots, plan->head_slots = (uint32_t)(rotated + copied);
    plan->head_rotated = (uint32_t)rotated;
    plan->lanes = (uint32_t)lanes, plan->lanes_log2 = (uint32_t)log2, plan->tiles = (uint32_t)tiles;
    plan->token_lanes = (uint32_t)token_lanes, plan->unit_tokens = (uint32_t)unit_tokens;
    plan->token_units = (uint32_t)token_units, plan->unit_repeats = (uint32_t)unit_repeats;
    plan->repeat_units = (uint32_t)repeat_units, plan->work = (uint32_t)work;

    const int64_t slot_bytes = lanes * (int64_t)sizeof(rope_slot);
    if (!args->positions.data) return slot_bytes;
    const int64_t real = size == 8 ? 8 : 4, sums = backward && args->grad_freqs.data ? pairs * threads : 0;
    return slot_bytes + real * args->axes * (2 * pairs * lanes + 2 * unit_tokens + sums);
}

static const char *launch(int function, int64_t work, int64_t threads, int64_t shared, void *plan,
                          const rope_cuda_call *call) {
    const rope_driver *driver;
    const char *error = NULL;
    const rope_device *device = rope_driver_device(call->device, &driver, &error);
    if (!device) return error;
    if (work == 0) return NULL;
    void *popped, *parameters[] = {plan};
    int result = driver->cuCtxPushCurrent_v2(device->context);
    if (result) return rope_driver_failure(driver, "cuCtxPushCurrent", result);
    result = driver->cuLaunchKernel(device->functions[function], (unsigned)smaller(work, device->max_grid), 1, 1,
                                    (unsigned)threads, 1, 1, (unsigned)shared, call->stream, parameters, NULL);
    if (result) error = rope_driver_failure(driver, "cuLaunchKernel", result);
    driver->cuCtxPopCurrent_v2(&popped);
    return error;
}

static const char *launch_sum(rope_cuda_sum *sum, const rope_operand *out, const double *sums, int64_t parts,
                              const rope_cuda_call *call) {
    sum->sums = sums;
    sum->parts = parts;
    sum->count = product(sum->dims, sum->size);
    sum->lanes = parts >= 32 ? 32 : 1;
    sum->out = out->data;
    sum->dtype = out->dtype;
    return launch(ROPE_FUNCTION_SUM, pieces(sum->count * sum->lanes, ROPE_CUDA_THREADS), ROPE_CUDA_THREADS,
                  ROPE_CUDA_THREADS * (int64_t)sizeof(double), sum, call);
}

static void add_dim(rope_cuda_sum *sum, int64_t size, int64_t stride) {
    sum->size[sum->dims] = size;
    sum->stride[sum->dims++] = stride;
}

static void add_token_dims(rope_cuda_sum *sum, const rope_args *args, const rope_operand *out) {
    for (int d = 0; d < args->token_dims; d++)
        add_dim(sum, args->token_size[d], out->token[d]);
}

/* Chooses a layout and cuts the call for it; gives the layout, a block's threads and the bytes of its memory. */
static const char *fit(rope_cuda_plan *plan, int *layout, int64_t *threads, int64_t *shared) {
    const rope_args *args = &plan->args;
    const int64_t tokens = product(args->token_dims, args->token_size);
    const int64_t repeats = product(args->repeat_dims, args->repeat_size);
    const int copies = args->y.data && args->y.data != args->x.data && 2 * args->pairs < args->head_dim;
    int64_t turns = 16;
    *layout = layout_of(args, copies);
    *threads = ROPE_CUDA_THREADS;
    /* a block's memory grows with the axes: then less work at a time, smaller blocks, and last no vectors */
    while ((*shared = cut(plan, tokens, repeats, *layout, copies, *threads, turns)) > ROPE_CUDA_SHARED / 2) {
        if (turns > 1)
            turns /= 2;
        else if (*threads > ROPE_CUDA_WARP)
            *threads /= 2;
        else if (*layout != ROPE_SCALAR) {
            *layout = ROPE_SCALAR;
            *threads = ROPE_CUDA_THREADS;
        } else
            break;
    }
    if (*shared < 0)
        return rope_cuda_error("%lld tokens of %lld heads, repeated %lld times, are too many for the CUDA kernels",
                               (long long)tokens, (long long)args->heads, (long long)repeats);
    if (*shared > ROPE_CUDA_SHARED)
        return rope_cuda_error("positions with %lld axes are too many for the CUDA kernels", (long long)args->axes);
    return NULL;
}

static int64_t freq_parts(const rope_cuda_plan *plan) { return (int64_t)plan->token_units * plan->repeat_units; }
static int64_t position_parts(const rope_cuda_plan *plan) { return (int64_t)plan->repeat_units * plan->tiles; }

/* Memory for the sums of all pieces of work. */
static const char *allocate_sums(rope_cuda_plan *plan, const rope_cuda_call *call) {
    const rope_args *args = &plan->args;
    const int64_t row = args->heads * args->pairs, axes = args->axes, tokens = plan->tokens;
    const int given = args->positions.data == NULL;
    const int64_t freqs = !given && args->grad_freqs.data ? freq_parts(plan) * axes * row : 0;
    const int64_t positions = !given && args->grad_positions.data ? position_parts(plan) * tokens * axes : 0;
    const int64_t angles = given && plan->repeat_units > 1 ? plan->repeat_units * tokens * row : 0;
    if (freqs + positions + angles == 0) return NULL;
    double *memory = call->allocate((size_t)(freqs + positions + angles) * sizeof(double), call->context);
    if (!memory) return "out of memory on the CUDA device";
    if (freqs) plan->freq_sums = memory;
    if (positions) plan->position_sums = memory + freqs;
    if (angles) plan->angle_sums = memory;
    return NULL;
}

/* From the sums of all pieces of work to gradients. */
static const char *add_up(const rope_cuda_plan *plan, const rope_cuda_call *call) {
    const rope_args *args = &plan->args;
    const char *error = NULL;
    if (plan->freq_sums) {
        const rope_operand *out = &args->grad_freqs;
        rope_cuda_sum sum = {.scale = 1};
        add_dim(&sum, args->axes, out->axis);
        add_dim(&sum, args->heads, out->head);
        add_dim(&sum, args->pairs, out->pair);
        error = launch_sum(&sum, out, plan->freq_sums, freq_parts(plan), call);
    }
    if (!error && plan->position_sums) {
        const rope_operand *out = &args->grad_positions;
        rope_cuda_sum sum = {.scale = 0x1.921fb54442d18p+1}; /* frequencies were in half turns */
        add_token_dims(&sum, args, out);
        add_dim(&sum, args->axes, out->axis);
        error = launch_sum(&sum, out, plan->position_sums, position_parts(plan), call);
    }
    if (!error && plan->angle_sums) {
        const rope_operand *out = &args->grad_freqs;
        rope_cuda_sum sum = {.scale = 1};
        add_token_dims(&sum, args, out);
        add_dim(&sum, args->heads, out->head);
        add_dim(&sum, args->pairs, out->pair);
        error = launch_sum(&sum, out, plan->angle_sums, plan->repeat_units, call);
    }
    return error;
}

const char *rope_cuda_run(const rope_args *args, const rope_cuda_call *call) {
    rope_cuda_plan plan = {.args = *args};
    const int backward = args->saved.data != NULL;
    int layout;
    int64_t threads, shared;
    heads_as_repeats(&plan.args);
    const char *error = fit(&plan, &layout, &threads, &shared);
    if (!error && backward) error = allocate_sums(&plan, call);
    if (!error)
        error =
            launch(rope_function_rows(backward, layout, (int)args->dtype), plan.work, threads, shared, &plan, call);
    if (!error && backward) error = add_up(&plan, call);
    return error;
}

const char *rope_cuda_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                             const rope_cuda_call *call) {
    rope_cuda_angles_plan plan = {.args = *args, .groups = groups, .group_stride = group_stride, .angles = *angles};
    plan.tokens = product(args->token_dims, args->token_size);
    if (plan.tokens >> 32) return "the CUDA kernels take fewer than 2^32 tokens";
    return launch(ROPE_FUNCTION_ANGLES, pieces(plan.tokens * args->freq_heads * args->pairs, ROPE_CUDA_THREADS),
                  ROPE_CUDA_THREADS, 0, &plan, call);
}

const char *rope_cuda_zero(void *data, size_t bytes, const rope_cuda_call *call) {
    const rope_driver *driver;
    const char *error = NULL;
    const rope_device *device = rope_driver_device(call->device, &driver, &error);
    if (!device || bytes == 0) return error;
    void *popped;
    int result = driver->cuCtxPushCurrent_v2(device->context);
    if (result) return rope_driver_failure(driver, "cuCtxPushCurrent", result);
    result = driver->cuMemsetD8Async((unsigned long long)(uintptr_t)data, 0, bytes, call->stream);
    if (result) error = rope_driver_failure(driver, "cuMemsetD8Async", result);
    driver->cuCtxPopCurrent_v2(&popped);
    return error;
}
