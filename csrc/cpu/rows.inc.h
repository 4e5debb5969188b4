/* Rotating rows of one embedding type E, stored as ELEMENT, in the arithmetic R.
 *
 * Position zero is the identity to the last bit, -0 included: products with sin are made +0 where they vanish
 * (`+ 0`) and then subtracted, as x - (+0) is x for every x. */
#define REAL NAME(real, R)
#define VEC NAME(vec, R)
#define W NAME(W, R)
#define SWAP NAME(swap, R)
#define LOAD NAME(load, E)
#define WRITE_VEC NAME(write, E)
#define LOAD_REAL NAME(load, R)
#define STORE_REAL NAME(store, R)

/* W pairs (a[0], a[1]), rotated in place, and those saved. */
ROPE_INLINE void NAME(rotate_pairs, E)(int work, VEC *a, const VEC *saved, const REAL *cos_table,
                                       const REAL *sin_table, REAL *grad) {
    VEC b0 = a[0], b1 = a[1];
    if (work & (WRITE | FROM_INPUT)) {
        VEC c = LOAD_REAL(cos_table), s = LOAD_REAL(sin_table);
        b0 = a[0] * c - (a[1] * s + (VEC){0});
        b1 = a[1] * c - ((VEC){0} - a[0] * s);
    }
    if (work & REDUCE) {
        VEC g0 = work & FROM_INPUT ? b0 : a[0], g1 = work & FROM_INPUT ? b1 : a[1];
        STORE_REAL(grad, LOAD_REAL(grad) + (g1 * saved[0] - g0 * saved[1]));
    }
    a[0] = b0, a[1] = b1;
}

/* CHANNELS channels of interleaved pairs, for which `table` has cos and sin in turn and `grad` gathers the two
 * products of dL/dtheta in the two lanes of the pair; with two arrays, they are as in halves_step. */
#if E_IS_BF16
enum { NAME(CHANNELS, E) = 2 * W };
ROPE_INLINE void NAME(interleaved_step, E)(int work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                           const REAL *table, int64_t sin_at, REAL *grad, NAME(int, R) odd_sign) {
    VEC a[2], w[2];
    (void)odd_sign;
    load_pairs_bf16(x, a);
    if (work & REDUCE) load_pairs_bf16(saved, w);
    NAME(rotate_pairs, E)(work, a, w, table, table + sin_at, grad);
    if (work & WRITE) write_pairs_bf16(y, a, work & STREAM);
}
#else
enum { NAME(CHANNELS, E) = W };
ROPE_INLINE void NAME(interleaved_step, E)(int work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                           const REAL *table, int64_t sin_at, REAL *grad, NAME(int, R) odd_sign) {
    (void)sin_at;
    VEC a = LOAD(x), b = a;
    IN_REGISTER(a);
    if (work & (WRITE | FROM_INPUT)) {
        VEC s = (VEC)((NAME(int, R))NAME(load_sin, R)(table) ^ odd_sign);
        b = a * NAME(load_cos, R)(table) - (SWAP(a) * s + (VEC){0});
    }
    if (work & REDUCE) STORE_REAL(grad, LOAD_REAL(grad) + (work & FROM_INPUT ? b : a) * SWAP(LOAD(saved)));
    if (work & WRITE) WRITE_VEC(y, b, work & STREAM);
}
#endif

/* W pairs (x[i], x[half + i]). */
ROPE_INLINE void NAME(halves_step, E)(int work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y, int64_t half,
                                      const REAL *cos_table, const REAL *sin_table, REAL *grad) {
    VEC a[2] = {LOAD(x), LOAD(x + half)}, w[2];
    if (work & REDUCE) w[0] = LOAD(saved), w[1] = LOAD(saved + half);
    NAME(rotate_pairs, E)(work, a, w, cos_table, sin_table, grad);
    if (work & WRITE) {
        WRITE_VEC(y, a[0], work & STREAM);
        WRITE_VEC(y + half, a[1], work & STREAM);
    }
}

/* n channels of interleaved pairs; what is no whole vector goes through one on the stack. */
ROPE_INLINE void NAME(rotate_interleaved, E)(int work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                             const REAL *table, int64_t sin_at, REAL *grad, int64_t n) {
    enum { CHANNELS = NAME(CHANNELS, E) };
    NAME(int, R) odd_sign = NAME(odd_sign, R)();
    IN_REGISTER(odd_sign);
    int64_t i = 0;
#pragma GCC unroll 2
    for (; i + CHANNELS <= n; i += CHANNELS)
        NAME(interleaved_step, E)(work, x + i, AT(REDUCE, saved, i), AT(WRITE, y, i), table + i * W / CHANNELS,
                                  sin_at, AT(REDUCE, grad, i * W / CHANNELS), odd_sign);
    if (i < n) {
        const size_t rest = (size_t)(n - i) * sizeof(ELEMENT);
        ELEMENT last_x[CHANNELS] = {0}, last_saved[CHANNELS] = {0}, last_y[CHANNELS];
        memcpy(last_x, x + i, rest);
        if (work & REDUCE) memcpy(last_saved, saved + i, rest);
        NAME(interleaved_step, E)(work, last_x, last_saved, last_y, table + i * W / CHANNELS, sin_at,
                                  AT(REDUCE, grad, i * W / CHANNELS), odd_sign);
        if (work & WRITE) memcpy(y + i, last_y, rest);
    }
}

/* `half` pairs (x[i], x[half + i]). */
ROPE_INLINE void NAME(rotate_halves, E)(int work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                        const REAL *cos_table, const REAL *sin_table, REAL *grad, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W)
        NAME(halves_step, E)(work, x + i, AT(REDUCE, saved, i), AT(WRITE, y, i), half, cos_table + i, sin_table + i,
                             AT(REDUCE, grad, i));
    if (i < half) {
        const size_t rest = (size_t)(half - i) * sizeof(ELEMENT);
        ELEMENT last_x[2 * W] = {0}, last_saved[2 * W] = {0}, last_y[2 * W];
        memcpy(last_x, x + i, rest);
        memcpy(last_x + W, x + half + i, rest);
        if (work & REDUCE) {
            memcpy(last_saved, saved + i, rest);
            memcpy(last_saved + W, saved + half + i, rest);
        }
        NAME(halves_step, E)(work, last_x, last_saved, last_y, W, cos_table + i, sin_table + i, AT(REDUCE, grad, i));
        if (work & WRITE) {
            memcpy(y + i, last_y, rest);
            memcpy(y + half + i, last_y + W, rest);
        }
    }
}

/* Channels one element apart. y may be x. */
ROPE_INLINE void NAME(rotate_head, E)(int work, head_shape shape, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                      const REAL *table, int64_t sin_at, REAL *grad) {
    const int64_t first = shape.rotary_offset, last = first + 2 * shape.pairs, half = shape.block / 2;
    if (work & WRITE && y != x) {
        if (first > 0) memcpy(y, x, (size_t)first * sizeof(ELEMENT));
        if (last < shape.channels) memcpy(y + last, x + last, (size_t)(shape.channels - last) * sizeof(ELEMENT));
    }
    if (half == 1) {
        NAME(rotate_interleaved, E)(work, x + first, AT(REDUCE, saved, first), AT(WRITE, y, first), table, sin_at,
                                    grad, last - first);
        return;
    }
    for (int64_t pair = 0; pair < shape.pairs; pair += half) {
        const int64_t at = first + 2 * pair;
        NAME(rotate_halves, E)(work, x + at, AT(REDUCE, saved, at), AT(WRITE, y, at), table + pair,
                               table + sin_at + pair, AT(REDUCE, grad, pair), half);
    }
}

/* A chunk of tokens: for each an offset into every tensor, and a table. */
typedef struct {
    const int64_t *x_offset, *saved_offset, *y_offset;
    const REAL *tables;
    REAL *grads;
    ELEMENT *copies; /* three rows, where channels are not one element apart */
    int64_t tokens, heads, span, table_head;
} NAME(chunk, E);

/* Rotates the tokens of a chunk in repeats [first, last). A few repeats at a time: so many streams of memory the
 * prefetchers follow, and each table is read that often while it is near. Everything is copied into local variables
 * first: the compiler must take a store to y for a store to any struct. */
ROPE_INLINE void NAME(rotate_chunk, E)(int work, int strided, const rope_args *args, head_shape shape,
                                       NAME(chunk, E) chunk, int64_t first, int64_t last) {
    const ELEMENT *const x_data = args->x.data, *const saved_data = args->saved.data;
    ELEMENT *const y_data = args->y.data, *const row = chunk.copies;
    const int64_t x_head = args->x.head, saved_head = args->saved.head, y_head = args->y.head;
    const int64_t x_channel = args->x.channel, saved_channel = args->saved.channel, y_channel = args->y.channel;
    /* heads outside tokens where that is the order in memory */
    const int heads_outside = chunk.tokens > 1 && x_head > chunk.x_offset[1] - chunk.x_offset[0];
    const int64_t outer = heads_outside ? chunk.heads : chunk.tokens;
    const int64_t inner = heads_outside ? chunk.tokens : chunk.heads;
    const int64_t n = shape.channels, sin_at = chunk.span / 2;
    for (int64_t group = first; group < last; group += ROPE_REPEATS_TOGETHER) {
        const int64_t count = smaller(ROPE_REPEATS_TOGETHER, last - group);
        int64_t x_repeat[ROPE_REPEATS_TOGETHER], saved_repeat[ROPE_REPEATS_TOGETHER], y_repeat[ROPE_REPEATS_TOGETHER];
        for (int64_t r = 0; r < count; r++) {
            x_repeat[r] = repeat_offset(args, &args->x, group + r);
            saved_repeat[r] = repeat_offset(args, &args->saved, group + r);
            y_repeat[r] = repeat_offset(args, &args->y, group + r);
        }
        for (int64_t i = 0; i < outer; i++)
            for (int64_t j = 0; j < inner; j++) {
                const int64_t t = heads_outside ? j : i, h = heads_outside ? i : j;
                const int64_t at = t * chunk.span + h * chunk.table_head;
                const int64_t x_at = chunk.x_offset[t] + h * x_head, y_at = chunk.y_offset[t] + h * y_head;
                const int64_t saved_at = chunk.saved_offset[t] + h * saved_head;
                const REAL *table = chunk.tables + at;
                REAL *grad = AT(REDUCE, chunk.grads, at);
                for (int64_t r = 0; r < count; r++) {
                    const ELEMENT *x = x_data + x_at + x_repeat[r];
                    const ELEMENT *saved = AT(REDUCE, saved_data, saved_at + saved_repeat[r]);
                    ELEMENT *y = AT(WRITE, y_data, y_at + y_repeat[r]);
                    if (!strided) {
                        NAME(rotate_head, E)(work, shape, x, saved, y, table, sin_at, grad);
                        continue;
                    }
                    for (int64_t d = 0; d < n; d++)
                        row[d] = x[d * x_channel];
                    for (int64_t d = 0; work & REDUCE && d < n; d++)
                        row[n + d] = saved[d * saved_channel];
                    NAME(rotate_head, E)(work, shape, row, row + n, row + 2 * n, table, sin_at, grad);
                    for (int64_t d = 0; work & WRITE && d < n; d++)
                        y[d * y_channel] = row[2 * n + d];
                }
            }
    }
}

/* One copy of the loops for each kind of work, so that no loop decides what to do. */
static void NAME(rotate_any, E)(int work, int strided, const rope_args *args, const head_shape *shape,
                                const NAME(chunk, E) * chunk, int64_t first, int64_t last) {
#define CASE(kind)                                                                                                   \
    case kind: NAME(rotate_chunk, E)(kind, 0, args, *shape, *chunk, first, last); break
    if (strided) { /* slow anyway: one copy for all */
        NAME(rotate_chunk, E)(work, 1, args, *shape, *chunk, first, last);
        return;
    }
    switch (work) {
        CASE(WRITE);
        CASE(REDUCE);
        CASE(WRITE | REDUCE);
        CASE(REDUCE | FROM_INPUT);
        CASE(WRITE | REDUCE | FROM_INPUT);
#if CAN_STREAM
        CASE(WRITE | STREAM);
        CASE(WRITE | STREAM | REDUCE);
        CASE(WRITE | STREAM | REDUCE | FROM_INPUT);
#endif
    }
#undef CASE
}

/* dL/dangle of one token, from it dL/dposition, and its part of dL/dfreqs. */
static void NAME(finish_token, E)(const rope_cpu_plan *plan, int64_t token, int64_t repeat_unit, const REAL *grad,
                                  const REAL *position, REAL *angle_grad, REAL *freq_sums) {
    const rope_args *args = plan->args;
    const int64_t row = plan->row, padded = plan->padded, axes = args->axes;
    const REAL sign = args->inverse ? 1 : -1; /* the backward rotates the other way round */
    if (plan->zipped)
        for (int64_t i = 0; i < row; i++)
            angle_grad[i] = sign * (grad[2 * i + 1] - grad[2 * i]);
    else
        for (int64_t i = 0; i < row; i++)
            angle_grad[i] = sign * grad[i];

    if (!args->positions.data) {
        const rope_operand *out = &args->grad_freqs;
        const int64_t base = rope_offset(args->token_dims, args->token_size, out->token, token);
        for (int64_t h = 0; h < args->freq_heads; h++)
            for (int64_t i = 0; i < args->pairs; i++)
                rope_write(out->data, out->dtype, base + h * out->head + i * out->pair,
                           (double)angle_grad[h * args->pairs + i]);
        return;
    }
    if (args->grad_positions.data) {
        const rope_operand *out = &args->grad_positions;
        const int64_t base = rope_offset(args->token_dims, args->token_size, out->token, token);
        for (int64_t a = 0; a < axes; a++) {
            const REAL *freqs = (const REAL *)NAME(plan->freqs, R) + a * padded;
            const double sum = (double)NAME(dot, R)(freqs, angle_grad, padded);
            if (plan->position_sums)
                plan->position_sums[(repeat_unit * plan->tokens + token) * axes + a] = sum;
            else
                rope_write(out->data, out->dtype, base + a * out->axis, sum);
        }
    }
    if (freq_sums)
        for (int64_t a = 0; a < axes; a++)
            for (int64_t i = 0; i < row; i++)
                freq_sums[a * padded + i] += position[a] * angle_grad[i];
}

static int NAME(run, E)(const rope_cpu_plan *plan, int64_t begin, int64_t end) {
    const rope_args *args = plan->args;
    const int64_t chunk = plan->chunk, padded = plan->padded, axes = args->axes;
    const int backward = args->saved.data != NULL;
    const int64_t span = 2 * padded;
    const int64_t heads = plan->side_by_side ? 1 : args->heads, merged = plan->side_by_side ? args->heads : 1;
    const head_shape shape = {merged * args->head_dim, merged * args->pairs, args->rotary_offset, args->block};
    const int work = (args->y.data ? WRITE : 0) | (plan->stream && CAN_STREAM ? STREAM : 0) |
                     (backward ? REDUCE : 0) | (backward && args->saved_is_input ? FROM_INPUT : 0);
    const int64_t table_head = args->freq_heads == 1 ? 0 : plan->zipped ? 2 * args->pairs : args->pairs;

    /* the tables first, at a cache line: their loads may not cross one */
    const size_t reals = (size_t)((1 + backward) * chunk * span + padded + axes * padded + chunk * axes);
    const size_t doubles = (size_t)(5 * padded + 2 * axes + 1);
    const size_t rows = plan->strided ? (size_t)(3 * args->head_dim) : 0;
    void *memory =
        malloc(ROPE_LINE + reals * sizeof(REAL) + 8 + doubles * sizeof(double) +
               (size_t)(3 * chunk) * sizeof(int64_t) + (size_t)(2 * padded) * sizeof(float) + rows * sizeof(ELEMENT));
    if (!memory) return -1;
    REAL *tables = rope_align(memory, ROPE_LINE), *grads = tables + chunk * span;
    REAL *angle_grad = grads + (backward ? chunk * span : 0), *freq_block = angle_grad + padded;
    REAL *positions = freq_block + axes * padded;
    double *wide = rope_align(positions + chunk * axes, 8), *angles = wide + 2 * padded, *turns_f64 = angles + padded;
    double *position = turns_f64 + 2 * padded, *position_low = position + axes, *bound = position_low + axes;
    int64_t *x_offset = (int64_t *)(bound + 1), *y_offset = x_offset + chunk, *saved_offset = y_offset + chunk;
    float *turns_f32 = (float *)(saved_offset + chunk);
    ELEMENT *copies = (ELEMENT *)(turns_f32 + 2 * padded);
    const token_scratch scratch = {position, position_low, bound, angles, turns_f64, turns_f32, wide};
    REAL *freq_sums = plan->freq_sums ? freq_block : NULL;
    memset(turns_f64, 0, (size_t)(2 * padded) * sizeof(double)); /* the padding is read too */
    memset(turns_f32, 0, (size_t)(2 * padded) * sizeof(float));
    if (backward) memset(angle_grad, 0, (size_t)(padded + axes * padded) * sizeof(REAL)); /* with freq_block */

    NAME(chunk, E)
    now = {x_offset, saved_offset, y_offset, tables, grads, copies, 0, heads, span, table_head};

    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t repeat_unit = unit % plan->repeat_units,
                      first_token = unit / plan->repeat_units * plan->unit_tokens;
        const int64_t last_token = smaller(first_token + plan->unit_tokens, plan->tokens);
        const int64_t first_repeat = repeat_unit * plan->unit_repeats;
        const int64_t last_repeat = smaller(first_repeat + plan->unit_repeats, plan->repeats);

        for (int64_t start = first_token; start < last_token; start += chunk) {
            const int64_t n = smaller(chunk, last_token - start);
            for (int64_t t = 0; t < n; t++) {
                x_offset[t] = rope_offset(args->token_dims, args->token_size, args->x.token, start + t);
                y_offset[t] = rope_offset(args->token_dims, args->token_size, args->y.token, start + t);
                saved_offset[t] = rope_offset(args->token_dims, args->token_size, args->saved.token, start + t);
                NAME(token_table, R)(plan, start + t, &scratch, positions + t * axes, tables + t * span);
            }
            if (backward) memset(grads, 0, (size_t)(n * span) * sizeof(REAL));

            now.tokens = n;
            NAME(rotate_any, E)(work, plan->strided, args, &shape, &now, first_repeat, last_repeat);
            if (!backward) continue;
            for (int64_t t = 0; t < n; t++)
                NAME(finish_token, E)(plan, start + t, repeat_unit, grads + t * span, positions + t * axes,
                                      angle_grad, freq_sums);
            /* float32 sums stay short: one chunk of tokens */
            if (freq_sums) {
                double *sums = plan->freq_sums + unit * axes * padded;
                for (int64_t i = 0; i < axes * padded; i++) {
                    sums[i] += (double)freq_block[i];
                    freq_block[i] = 0;
                }
            }
        }
    }
    if (work & STREAM) drain_streams();
    free(memory);
    return 0;
}

#undef REAL
#undef VEC
#undef W
#undef SWAP
#undef LOAD
#undef WRITE_VEC
#undef LOAD_REAL
#undef STORE_REAL
