/* The kernels alone, without torch or Python: against plain loops in long double, and every instruction set and
 * order of work against the first, to the bit. `make native`, `sanitize` and `arm` build and run this for the CPU,
 * `cuda` and `cuda-sanitize` for CUDA (with ROPE_TEST_CUDA), where tests/cuda_emulation takes the place of a device.
 *
 * The last lines printed hold a checksum of all results, equal on every machine: x86 and NEON too. */
#include "rope_scalar.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static long passed, failed;
#define CHECK(condition, ...)                                                                                        \
    do {                                                                                                             \
        if (condition)                                                                                               \
            passed++;                                                                                                \
        else if (++failed <= 20) {                                                                                   \
            printf("%s:%d: not %s: ", __FILE__, __LINE__, #condition);                                               \
            printf(__VA_ARGS__);                                                                                     \
            printf("  [case %d]\n", case_number);                                                                    \
        }                                                                                                            \
    } while (0)
static int case_number;

static uint64_t lcg_state = 1;
static uint64_t bits64(void) {
    uint64_t high = lcg_state = lcg_state * 6364136223846793005u + 1442695040888963407u;
    lcg_state = lcg_state * 6364136223846793005u + 1442695040888963407u;
    return (high & 0xffffffff00000000u) | lcg_state >> 32;
}
static int64_t pick(int64_t count) { return (int64_t)((bits64() >> 33) % (uint64_t)count); }
static double real(void) { return (double)(int64_t)bits64() * 0x1p-63; } /* in [-1, 1] */

static uint64_t fnv(uint64_t hash, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

/* ---- what is known of each dtype ---- */
static const size_t size_of[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};
/* What a sum may be off, of the sum of its terms' sizes: 3.5 epsilon */
static const double arithmetic[] = {3.5 * 0x1p-23, 3.5 * 0x1p-52, 3.5 * 0x1p-23, 3.5 * 0x1p-23};
static const double rounding[] = {0x1p-24, 0x1p-53, 0x1p-11, 0x1p-8}, tiniest[] = {0x1p-149, 0, 0x1p-25, 0x1p-134};
static double largest_error[ROPE_EMBEDDING_DTYPES]; /* of what `arithmetic` allows */

/* ---- memory whose every element is checked: it holds what is wanted, or is left alone. Guards stand on both sides
 * but under AddressSanitizer, which sees reads too ---- */
#if defined(__SANITIZE_ADDRESS__)
enum { GUARD = 0 };
#else
enum { GUARD = 64 };
#endif
typedef struct {
    rope_dtype dtype;
    int64_t count, origin; /* elements, guards included; which one `data` of the tensor points to */
    unsigned char *now, *before, *first;
    long double *want, *scale; /* scale: what the error is relative to; 0: exactly `want`; negative: left alone */
} buffer;

enum { X, Y, SAVED, POSITIONS, FREQS, GRAD_POSITIONS, GRAD_FREQS, BUFFERS };

static void *allocate(buffer *b, rope_dtype dtype, int64_t count, int64_t origin) {
    *b = (buffer){.dtype = dtype, .count = count + 2 * GUARD, .origin = origin + GUARD};
    const size_t n = (size_t)b->count, bytes = n * size_of[dtype];
    b->now = malloc(bytes), b->before = malloc(bytes), b->first = malloc(bytes);
    b->want = calloc(n, sizeof(long double)), b->scale = calloc(n, sizeof(long double));
    for (size_t i = 0; i < n; i++)
        b->scale[i] = -1;
    memset(b->now, 0xa5, bytes);
    return b->now + (size_t)b->origin * size_of[dtype];
}

static void release(buffer *b) {
    for (int i = 0; i < BUFFERS; i++)
        free(b[i].now), free(b[i].before), free(b[i].first), free(b[i].want), free(b[i].scale);
}

static long double value(const buffer *b, const unsigned char *bytes, int64_t offset) {
    double low, high = rope_read(bytes, b->dtype, b->origin + offset, &low);
    return low == 0 ? high : (long double)high + (long double)low; /* -0 stays */
}

static void expect(buffer *b, int64_t offset, long double term, long double scale) {
    const int64_t i = b->origin + offset;
    b->want[i] = b->scale[i] < 0 ? term : b->want[i] + term; /* a sum with zero would lose -0 */
    b->scale[i] = b->scale[i] < 0 ? scale : b->scale[i] + scale;
}

static void compare(const buffer *b, rope_dtype arithmetic_of, const char *name) {
    const size_t size = b->now ? size_of[b->dtype] : 0;
    for (int64_t i = 0; i < b->count; i++) {
        if (b->scale[i] < 0) {
            CHECK(memcmp(b->now + (size_t)i * size, b->before + (size_t)i * size, size) == 0, "%s[%d] written", name,
                  (int)i);
            continue;
        }
        const long double want = b->want[i], got = value(b, b->now, i - b->origin), error = fabsl(got - want);
        if (b->scale[i] == 0) {
            CHECK(error == 0 && signbit(got) == signbit(want), "%s[%d] %.17Lg, want %.17Lg", name, (int)i, got, want);
            continue;
        }
        const long double rest = error - rounding[b->dtype] * fabsl(want) - tiniest[b->dtype];
        const double relative = (double)(rest / (arithmetic[arithmetic_of] * b->scale[i]));
        CHECK(relative <= 1, "%s[%d] %.17Lg, want %.17Lg, scale %Lg: error %g of budget", name, (int)i, got, want,
              b->scale[i], relative);
        if (relative > largest_error[arithmetic_of]) largest_error[arithmetic_of] = relative;
    }
}

/* ---- every instruction set, with the units of work forwards at once and backwards one by one ---- */
static int forwards(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)grain;
    task(0, count, context);
    return 0;
}
static int backwards(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)grain; /* a hint */
    for (int64_t i = count - 1; i >= 0; i--)
        task(i, i + 1, context);
    return 0;
}
static int refuses(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)count, (void)grain, (void)task, (void)context;
    return 1;
}
static rope_parallel_for *const orders[] = {forwards, backwards};

#if defined(ROPE_TEST_CUDA)
void emulation_set(const char *name, long value);
long emulation_get(const char *name);

static void *allocations[4];
static int allocation_count;
static void *allocate_on_device(size_t bytes, void *context) {
    (void)context;
    return memset(allocations[allocation_count++] = malloc(bytes), 0xff, bytes); /* NaNs */
}

/* Orders other than `forwards` are blocks and threads by chance in a small grid. */
static rope_cuda_call cuda_call(rope_parallel_for *order) {
    emulation_set("seed", order == forwards ? 0 : 1 + pick(1000000));
    emulation_set("max_grid", order == forwards ? 0 : 1 + pick(5));
    emulation_set("fail_launch", order == refuses);
    rope_cuda_use_driver(EMULATION); /* asks the device anew */
    return (rope_cuda_call){.device = (int)pick(2), .allocate = allocate_on_device};
}

static const char *release_all(const char *error, const rope_cuda_call *call) {
    while (allocation_count)
        free(allocations[--allocation_count]);
    CHECK(emulation_get("depth") == 0, "%ld contexts", emulation_get("depth"));
    CHECK(error || emulation_get("device") == call->device, "device %ld", emulation_get("device"));
    return error;
}

static const char *run(const rope_args *args, rope_parallel_for *order) {
    const rope_cuda_call call = cuda_call(order);
    return release_all(rope_cuda_run(args, &call), &call);
}

static const char *run_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                              rope_parallel_for *order) {
    const rope_cuda_call call = cuda_call(order);
    return release_all(rope_cuda_angles(args, groups, group_stride, angles, &call), &call);
}

static const char *next_isa(int *index) { return (*index)++ == 0 ? "cuda" : NULL; }
#else
#define run rope_cpu_run
#define run_angles rope_cpu_angles

/* Switches to the next instruction set that this machine has, from number *index on; its name, or NULL. */
static const char *next_isa(int *index) {
    int usable;
    const char *isa;
    while ((isa = rope_cpu_isa((*index)++, &usable)) != NULL) {
        CHECK(rope_cpu_force_isa(isa) == (usable ? 0 : -1), "%s", isa);
        if (usable) break;
    }
    CHECK(!isa || strcmp(rope_cpu_active_isa(), isa) == 0, "%s", isa);
    return isa;
}
#endif

static size_t bytes_of(const buffer *b) { return b->now ? (size_t)b->count * size_of[b->dtype] : 0; }

static void copy(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes) memcpy(to, from, bytes); /* NULL where there is nothing */
}

static void run_everywhere(const rope_args *args, buffer *b) {
    const char *isa, *first = NULL;
    for (buffer *k = b; k < b + BUFFERS; k++)
        copy(k->before, k->now, bytes_of(k));
    for (int index = 0; (isa = next_isa(&index)) != NULL;)
        for (int order = 0; order < 2; order++) {
            for (buffer *k = b; k < b + BUFFERS; k++)
                copy(k->now, k->before, bytes_of(k));
            const char *error = run(args, orders[order]);
            CHECK(!error, "%s", error);
            for (buffer *k = b; k < b + BUFFERS; k++) {
                if (!first) copy(k->first, k->now, bytes_of(k));
                CHECK(!k->now || memcmp(k->now, k->first, bytes_of(k)) == 0, "buffer %d of %s, order %d",
                      (int)(k - b), isa, order);
            }
            first = isa;
        }
    for (buffer *k = b; k < b + BUFFERS; k++)
        copy(k->now, k->first, bytes_of(k));
}

/* ---- one random call ---- */
typedef struct {
    rope_dtype dtype, position_dtype, freq_dtype;
    int64_t pairs, block, tokens[2], repeats[2], axes;
    int position_bits; /* log2 of the largest float position; above 8, positions are whole */
    int backward;
} problem;

static int64_t at(int dims, const int64_t *size, const int64_t *stride, int64_t i) {
    return dims == 2 ? i / size[1] * stride[0] + i % size[1] * stride[1] : i * stride[0];
}
static int64_t total(int dims, const int64_t *size) { return size[0] * (dims == 2 ? size[1] : 1); }

/* The strides of leading dims whose innermost is `inner` apart; what the next outer dim has. */
static int64_t nest(int dims, const int64_t *size, int64_t *stride, int64_t inner) {
    for (int d = dims - 1; d >= 0; inner *= size[d--])
        stride[d] = inner;
    return inner;
}

static void place_rows(const rope_args *args, rope_tensor *t, buffer *b, int strided, int packed) {
    static const int64_t steps[] = {1, 2, 3, -1, -3};
    const int64_t step = strided ? steps[pick(5)] : 1, apart = llabs(step), gap = packed ? 0 : pick(3) * 5;
    const int64_t row = args->head_dim * apart + gap;
    int64_t end;
    t->channel = step;
    switch (pick(3)) {
    case 0: /* repeat, token, head, channel */
        t->head = row;
        end = nest(args->token_dims, args->token_size, t->token, args->heads * row);
        end = nest(args->repeat_dims, args->repeat_size, t->repeat, end);
        break;
    case 1: /* repeat, head, token, channel */
        t->head = nest(args->token_dims, args->token_size, t->token, row);
        end = nest(args->repeat_dims, args->repeat_size, t->repeat, t->head * args->heads);
        break;
    default: /* token, repeat, head, channel */
        t->head = row;
        end = nest(args->repeat_dims, args->repeat_size, t->repeat, args->heads * row);
        end = nest(args->token_dims, args->token_size, t->token, end);
    }
    t->data = allocate(b, args->dtype, end - gap - (apart - 1), step < 0 ? (args->head_dim - 1) * apart : 0);
    for (int64_t i = GUARD; i < b->count - GUARD; i++) {
        const double number = pick(16) ? real() : copysign(0, real());
        rope_write(b->now, b->dtype, i, ldexp(number, (int)-pick(16)));
    }
}

static void place_operand(const rope_args *args, rope_operand *o, buffer *b, rope_dtype dtype, int64_t tokens,
                          int64_t axes, int64_t heads, int64_t pairs) {
    const int first = pick(2) == 0; /* the token dims outermost or innermost */
    o->dtype = dtype;
    o->pair = first ? 1 : tokens * axes * heads;
    o->head = first ? pairs : tokens * axes;
    o->axis = first ? heads * pairs : tokens;
    nest(args->token_dims, args->token_size, o->token, first ? axes * heads * pairs : 1);
    o->data = allocate(b, dtype, tokens * axes * heads * pairs, 0);
}

/* Numbers up to 2^bits at random, multiples of `grid` unless it is 0; integers of all sizes. */
static void fill(buffer *b, int bits, double grid) {
    for (int64_t i = GUARD; i < b->count - GUARD; i++) {
        const double number = ldexp(real(), bits);
        const uint64_t integer = bits64();
        if (b->dtype <= ROPE_BF16)
            rope_write(b->now, b->dtype, i, grid == 0 ? number : rint(number / grid) * grid);
        else
            memcpy(b->now + (size_t)i * size_of[b->dtype], &integer, size_of[b->dtype]);
    }
}

/* The formulas of rope.h, pair by pair. */
static void expect_results(const rope_args *args, buffer *b) {
    const rope_operand *positions = &args->positions, *freqs = &args->freqs;
    const rope_operand *grad_positions = &args->grad_positions, *grad_freqs = &args->grad_freqs;
    const int dims = args->token_dims, given = !positions->data;
    const int64_t *size = args->token_size, half = args->block / 2, end = args->rotary_offset + 2 * args->pairs;
    const int64_t tokens = total(dims, size), repeats = total(args->repeat_dims, args->repeat_size);
    buffer *out = args->y.data == args->x.data ? &b[X] : &b[Y];

    for (int64_t n = 0; n < tokens * args->heads * args->pairs; n++) {
        const int64_t t = n / args->pairs / args->heads, h = n / args->pairs % args->heads, i = n % args->pairs;
        const int64_t freq = (args->freq_heads == 1 ? 0 : h) * freqs->head + i * freqs->pair +
                             (given ? at(dims, size, freqs->token, t) : 0);
        const int64_t grad_freq = (args->freq_heads == 1 ? 0 : h) * grad_freqs->head + i * grad_freqs->pair +
                                  (given ? at(dims, size, grad_freqs->token, t) : 0);
        const int64_t position = at(dims, size, positions->token, t);
        long double p[4] = {1}, f[4], theta = 0; /* of each axis */
        for (int64_t a = 0; a < args->axes; a++) {
            if (!given) p[a] = value(&b[POSITIONS], b[POSITIONS].before, position + a * positions->axis);
            f[a] = value(&b[FREQS], b[FREQS].before, freq + a * freqs->axis);
            theta += p[a] * f[a];
        }
        const long double c = cosl(theta), s = args->inverse ? -sinl(theta) : sinl(theta);

        for (int64_t r = 0; r < repeats; r++) {
            const rope_tensor *rows[] = {&args->x, &args->y, &args->saved};
            int64_t base[3];
            for (int k = 0; k < 3; k++)
                base[k] = at(dims, size, rows[k]->token, t) + h * rows[k]->head +
                          at(args->repeat_dims, args->repeat_size, rows[k]->repeat, r);
#define CHANNEL(k, d) (base[k] + (d) * rows[k]->channel)
            const int64_t d0 = args->rotary_offset + i / half * args->block + i % half, d1 = d0 + half;
            const long double x0 = value(&b[X], b[X].before, CHANNEL(X, d0));
            const long double x1 = value(&b[X], b[X].before, CHANNEL(X, d1));
            const long double y0 = theta == 0 ? x0 : x0 * c - x1 * s, y1 = theta == 0 ? x1 : x1 * c + x0 * s;
            const long double norm = hypotl(x0, x1);
            if (args->y.data) {
                expect(out, CHANNEL(Y, d0), y0, theta == 0 ? 0 : norm + 1e-300L);
                expect(out, CHANNEL(Y, d1), y1, theta == 0 ? 0 : norm + 1e-300L);
                for (int64_t d = 0; i == 0 && d < args->head_dim; d++)
                    if (d < args->rotary_offset || d >= end)
                        expect(out, CHANNEL(Y, d), value(&b[X], b[X].before, CHANNEL(X, d)), 0);
            }
            if (!args->saved.data) continue;
            const long double w0 = value(&b[SAVED], b[SAVED].before, CHANNEL(SAVED, d0));
            const long double w1 = value(&b[SAVED], b[SAVED].before, CHANNEL(SAVED, d1));
            const long double term = args->saved_is_input ? w0 * y1 - w1 * y0 : x1 * w0 - x0 * w1;
            const long double grad = args->inverse ? term : -term, scale = norm * hypotl(w0, w1);
            for (int64_t a = 0; a < args->axes; a++) {
                if (grad_positions->data)
                    expect(&b[GRAD_POSITIONS], at(dims, size, grad_positions->token, t) + a * grad_positions->axis,
                           grad * f[a], scale * fabsl(f[a]) + 1e-300L);
                if (grad_freqs->data)
                    expect(&b[GRAD_FREQS], grad_freq + a * grad_freqs->axis, grad * p[a],
                           scale * fabsl(p[a]) + 1e-300L);
            }
#undef CHANNEL
        }
    }
}

/* Makes a call of these sizes, the rest by chance, and checks it. */
static void run_problem(const problem *p, uint64_t *hash) {
    case_number++;
    buffer b[BUFFERS] = {0};
    const int given = p->position_dtype == ROPE_UNSUPPORTED; /* angles rather than positions and frequencies */
    const int strided = pick(4) == 0, packed = pick(2) == 0, in_place = pick(4) == 0, big = p->position_bits > 8;
    rope_args args = {.dtype = p->dtype, .pairs = p->pairs, .block = p->block};
    args.token_dims = p->tokens[0] > 1 || pick(2) ? 2 : 1;
    args.repeat_dims = p->repeats[0] > 1 || pick(2) ? 2 : 1;
    for (int d = 0; d < 2; d++)
        args.token_size[d] = p->tokens[args.token_dims == 2 ? d : 1];
    for (int d = 0; d < 2; d++)
        args.repeat_size[d] = p->repeats[args.repeat_dims == 2 ? d : 1];
    args.heads = 1 + pick(3);
    args.freq_heads = pick(2) ? args.heads : 1;
    args.axes = given ? 1 : p->axes;
    args.rotary_offset = packed ? 0 : pick(3);
    args.head_dim = args.rotary_offset + 2 * p->pairs + (packed ? 0 : pick(4));
    args.inverse = (int)pick(2);
    const int64_t tokens = total(args.token_dims, args.token_size);

    place_rows(&args, &args.x, &b[X], strided, packed);
    const int writes = !p->backward || pick(4) != 0;
    if (writes && in_place)
        args.y = args.x;
    else if (writes)
        place_rows(&args, &args.y, &b[Y], strided, packed);
    place_operand(&args, &args.freqs, &b[FREQS], p->freq_dtype, given ? tokens : 1, args.axes, args.freq_heads,
                  p->pairs);
    if (!given) place_operand(&args, &args.positions, &b[POSITIONS], p->position_dtype, tokens, args.axes, 1, 1);
    if (p->backward) {
        place_rows(&args, &args.saved, &b[SAVED], strided, packed);
        args.saved_is_input = (int)pick(2);
        const int both = p->position_dtype <= ROPE_BF16 && pick(4) != 0;
        if (both)
            place_operand(&args, &args.grad_positions, &b[GRAD_POSITIONS], p->position_dtype, tokens, args.axes, 1,
                          1);
        if (!both || pick(2))
            place_operand(&args, &args.grad_freqs, &b[GRAD_FREQS], p->freq_dtype, given ? tokens : 1, args.axes,
                          args.freq_heads, p->pairs);
    }

    /* positions at random, the first all zero; frequencies so that angles are as large as asked */
    const int integer_bits = given || p->position_dtype <= ROPE_BF16 ? 8 : 8 * (int)size_of[p->position_dtype];
    const double grid = ldexp(1, p->position_bits < 30 ? -32 : p->position_bits - 62); /* exact in long double */
    fill(&b[FREQS], given ? p->position_bits : 8 - integer_bits, big ? grid : 0);
    if (!given) fill(&b[POSITIONS], p->position_bits, big);
    const rope_operand *zeroed = given ? &args.freqs : &args.positions;
    const int64_t per_token = given ? args.freq_heads * args.pairs : args.axes;
    const int64_t apart = zeroed->token[args.token_dims - 1] == 1 ? tokens : 1;
    const size_t size = size_of[zeroed->dtype];
    for (int64_t k = 0; k < per_token; k++)
        memset((char *)zeroed->data + (size_t)(k * apart) * size, 0, size);

    run_everywhere(&args, b);
    expect_results(&args, b);
    static const char *const names[] = {"x", "y", "saved", "positions", "freqs", "grad_positions", "grad_freqs"};
    for (int k = 0; k < BUFFERS; k++) {
        compare(&b[k], p->dtype, names[k]);
        for (int64_t i = 0; i < b[k].count; i++)
            if (b[k].scale[i] >= 0)
                *hash = fnv(*hash, b[k].now + (size_t)i * size_of[b[k].dtype], size_of[b[k].dtype]);
    }
    release(b);
}

/* ---- calls by hand: rows [tokens, heads, 2 * pairs], frequencies of every head ---- */
static rope_args contiguous(rope_dtype dtype, int64_t tokens, int64_t heads, int64_t pairs, int64_t block, void *x,
                            void *y) {
    rope_args args = {.dtype = dtype, .token_dims = 1, .token_size = {tokens}, .axes = 1};
    args.heads = args.freq_heads = heads, args.head_dim = 2 * pairs, args.pairs = pairs, args.block = block;
    args.x = args.y = (rope_tensor){.token = {2 * heads * pairs}, .head = 2 * pairs, .channel = 1};
    args.x.data = x, args.y.data = y;
    return args;
}

static void check_conversions(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
        const double size = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
        const float f16 = rope_f16_to_f32((uint16_t)h), bf16 = rope_bf16_to_f32((uint16_t)h);
        if (exponent < 31)
            CHECK((double)f16 == (h & 0x8000 ? -size : size), "%x", h);
        else
            CHECK(fraction ? isnan(f16) : isinf(f16) && !signbit(f16) == !(h & 0x8000), "%x", h);
        CHECK(isnan(f16) ? isnan(rope_f16_to_f32(rope_f32_to_f16(f16))) : rope_f32_to_f16(f16) == h, "%x", h);
        CHECK(rope_f32_to_bits(bf16) == h << 16, "%x", h);
        CHECK(isnan(bf16) ? isnan(rope_bf16_to_f32(rope_f32_to_bf16(bf16))) : rope_f32_to_bf16(bf16) == h, "%x", h);

        /* between this number and the next: below the middle, at it, above; to infinity as if it were the next */
        if ((h & 0x7fff) < 0x7c00) {
            const double next =
                (h & 0x7fff) == 0x7bff ? copysign(65536, f16) : (double)rope_f16_to_f32((uint16_t)(h + 1));
            const float middle = (float)(((double)f16 + next) / 2);
            CHECK(rope_f32_to_f16(nextafterf(middle, 0)) == h && rope_f32_to_f16(middle) == h + (h & 1) &&
                      rope_f32_to_f16(nextafterf(middle, copysignf(INFINITY, middle))) == h + 1,
                  "%x", h);
        }
        if ((h & 0x7fff) < 0x7f80) {
            const float middle = rope_bits_to_f32(h << 16 | 0x8000);
            CHECK(rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x7fff)) == h &&
                      rope_f32_to_bf16(middle) == h + (h & 1) &&
                      rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x8001)) == h + 1,
                  "%x", h);
        }
    }
    static const int64_t whole[] = {0, 1, -1, INT64_MAX, INT64_MIN, (1ll << 53) + 1, -(1ll << 62) - 4095};
    for (int i = 0; i < 7; i++) {
        const uint64_t positive = (uint64_t)whole[i];
        double low, high = rope_read(whole, ROPE_I64, i, &low);
        CHECK((long double)high + (long double)low == (long double)whole[i], "%lld", (long long)whole[i]);
        high = rope_read(&positive, ROPE_U64, 0, &low);
        CHECK((long double)high + (long double)low == (long double)positive, "%llu", (unsigned long long)positive);
    }
}

/* The kernels' loads and stores of all halves against the scalar ones, through a rotation: the same in float32 gives
 * what was rounded. By 2^-12 (cos 1, sin 2^-12 to the last bit) the second channel puts the first in a tie. */
static void check_kernel_conversions(rope_dtype dtype, int64_t block, float angle) {
    enum { PAIRS = 64, TOKENS = 65536 / PAIRS };
    static uint16_t halves[2 * 65536], result[2 * 65536];
    static float wide[2 * 65536], wide_result[2 * 65536];
    for (int h = 0; h < 65536; h++) {
        const int pair = h % PAIRS, row = h - pair, first = block == 2 ? 2 * pair : pair;
        const int at0 = 2 * row + first, at1 = at0 + (block == 2 ? 1 : PAIRS);
        const int exponent = dtype == ROPE_F16 ? (h & 0x7c00) + 0x0400 : (h & 0x7f80) + 0x0200;
        halves[at0] = (uint16_t)h;
        halves[at1] = (uint16_t)(exponent < (dtype == ROPE_F16 ? 0x7c00 : 0x7f80) ? exponent : 0);
        for (int i = 0; i < 2; i++) {
            const uint16_t half = halves[i ? at1 : at0];
            wide[i ? at1 : at0] = dtype == ROPE_F16 ? rope_f16_to_f32(half) : rope_bf16_to_f32(half);
        }
    }
    rope_args args = contiguous(dtype, TOKENS, 1, PAIRS, block, halves, result);
    rope_args wide_args = contiguous(ROPE_F32, TOKENS, 1, PAIRS, block, wide, wide_result);
    args.freqs = wide_args.freqs = (rope_operand){.data = &angle, .dtype = ROPE_F32};
    int ties = 0;
    const char *isa;
    for (int index = 0; (isa = next_isa(&index)) != NULL;) {
        CHECK(!run(&args, forwards) && !run(&wide_args, forwards), "%s", isa);
        for (int i = 0; i < 2 * 65536; i++) {
            const float value = wide_result[i];
            const uint16_t want = dtype == ROPE_F16 ? rope_f32_to_f16(value) : rope_f32_to_bf16(value);
            const float got = dtype == ROPE_F16 ? rope_f16_to_f32(result[i]) : rope_bf16_to_f32(result[i]);
            CHECK(isnan(value) ? isnan(got) : result[i] == want, "%s: %a gives %x, want %x", isa, (double)value,
                  result[i], want);
            ties += (rope_f32_to_bits(value) & (dtype == ROPE_F16 ? 0x1fff : 0xffff)) ==
                    (dtype == ROPE_F16 ? 0x1000 : 0x8000);
        }
    }
    CHECK(angle > 0x1p-12f || ties > 20000, "only %d ties", ties);
}

/* A NaN angle (of one pair, made by a NaN frequency, or by a NaN position) leaves all others right. */
static void check_nan(int given, int64_t block) {
    enum { TOKENS = 5, HEADS = 2, PAIRS = 11, ROW = HEADS * PAIRS };
    float freqs[TOKENS * ROW], positions[TOKENS], x[2 * TOKENS * ROW], y[2 * TOKENS * ROW];
    for (int i = 0; i < TOKENS * ROW; i++)
        freqs[i] = (float)real(), x[2 * i] = (float)real(), x[2 * i + 1] = (float)real();
    for (int i = 0; i < TOKENS; i++)
        positions[i] = (float)real();
    const int bad_head = 0, bad_pair = 3, bad_token = given ? 2 : 4;
    freqs[(given ? bad_token * ROW : 0) + bad_head * PAIRS + bad_pair] = NAN;
    if (!given) positions[bad_token] = NAN;
    rope_args args = contiguous(ROPE_F32, TOKENS, HEADS, PAIRS, block, x, y);
    args.freqs =
        (rope_operand){.data = freqs, .dtype = ROPE_F32, .token = {given ? ROW : 0}, .head = PAIRS, .pair = 1};
    if (!given) args.positions = (rope_operand){.data = positions, .dtype = ROPE_F32, .token = {1}};
    const char *isa;
    for (int index = 0; (isa = next_isa(&index)) != NULL;) {
        CHECK(!run(&args, forwards), "%s", isa);
        for (int t = 0; t < TOKENS; t++)
            for (int i = 0; i < ROW; i++) {
                const int head = i / PAIRS, pair = i % PAIRS, half = (int)block / 2;
                const int d = 2 * (t * ROW + head * PAIRS) + (half == 1 ? 2 * pair : pair);
                const int bad = given ? t == bad_token && head == bad_head && pair == bad_pair
                                      : t == bad_token || (head == bad_head && pair == bad_pair);
                const float theta = given ? freqs[t * ROW + i] : positions[t] * freqs[i];
                const float want = x[d] * cosf(theta) - x[d + half] * sinf(theta);
                CHECK(bad ? isnan(y[d]) : fabsf(y[d] - want) < 1e-6f,
                      "%s, given %d: token %d, head %d, pair %d: %g, want %g", isa, given, t, head, pair,
                      (double)y[d], (double)want);
            }
    }
}

/* rope_cpu_angles: [tokens, heads, pairs] of positions [tokens, axes] and frequencies [axes, groups, heads, pairs].
 */
static void check_angles(rope_dtype position_dtype, rope_dtype dtype, uint64_t *hash) {
    enum { TOKENS = 700, AXES = 2, GROUPS = 3, HEADS = 2, PAIRS = 5, ROW = HEADS * PAIRS };
    buffer b[BUFFERS] = {0};
    rope_args args = {.token_dims = 1, .token_size = {TOKENS}, .axes = AXES, .freq_heads = HEADS, .pairs = PAIRS};
    rope_operand out = {0};
    place_operand(&args, &args.positions, &b[POSITIONS], position_dtype, TOKENS, AXES, 1, 1);
    args.freqs = (rope_operand){.dtype = dtype, .axis = GROUPS * ROW, .head = PAIRS, .pair = 1};
    args.freqs.data = allocate(&b[FREQS], dtype, AXES * GROUPS * ROW, 0);
    place_operand(&args, &out, &b[Y], dtype, TOKENS, 1, HEADS, PAIRS);
    fill(&b[POSITIONS], 7, 0);
    fill(&b[FREQS], position_dtype <= ROPE_BF16 ? 0 : 8 - 8 * (int)size_of[position_dtype], 0);
    memcpy(b[Y].before, b[Y].now, (size_t)b[Y].count * size_of[dtype]);
    const char *error = run_angles(&args, GROUPS, ROW, &out, backwards);
    CHECK(!error, "%s", error);
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t i = 0; i < ROW; i++)
            for (int64_t a = 0; a < AXES; a++)
                for (int64_t g = 0; g < GROUPS; g++) {
                    const long double p =
                        value(&b[POSITIONS], b[POSITIONS].now, t * args.positions.token[0] + a * args.positions.axis);
                    const long double f = value(&b[FREQS], b[FREQS].now, (a * GROUPS + g) * ROW + i);
                    expect(&b[Y], t * out.token[0] + i / PAIRS * out.head + i % PAIRS * out.pair, p * f,
                           fabsl(p * f) + 1e-300L);
                }
    compare(&b[Y], ROPE_F64, "angles");
    *hash = fnv(*hash, b[Y].now + (size_t)b[Y].origin * size_of[dtype], TOKENS * ROW * size_of[dtype]);
    CHECK(run_angles(&args, GROUPS, ROW, &out, refuses) != NULL, "no error");
    release(b);
}

int main(void) {
    static const int64_t lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 160};
    static const int64_t sizes[][4] = {
        {1, 1, 1, 1}, {3, 2, 1, 3}, {1, 9, 2, 1}, {2, 1, 2, 9}, {1, 35, 1, 2}}; /* tokens, repeats */
    uint64_t fast = 0xcbf29ce484222325u, libm = fast;

    check_conversions();
    for (int i = 0; i < 8; i++)
        check_kernel_conversions(i & 1 ? ROPE_F16 : ROPE_BF16, i & 2 ? 2 : 128, i & 4 ? 0x1p-12f : 1.0f);
    for (int i = 0; i < 4; i++)
        check_nan(i & 1, i & 2 ? 2 : 22);
    for (int i = 0; i < ROPE_UNSUPPORTED; i++)
        check_angles((rope_dtype)i, (rope_dtype)(i < 4 ? i : i % 2), &fast);

    for (int n = 0; n < 4 * 14 * 3 * 4; n++) {
        problem p = {
            .dtype = (rope_dtype)(n % 4), .position_bits = 7, .axes = 1 + pick(4), .backward = n / 4 / 14 / 3 % 2};
        const int64_t length = lengths[n / 4 % 14], layout = n / 4 / 14 % 3; /* interleaved, half split, blocks */
        p.pairs = layout == 2 ? (2 + pick(2)) * length : length;
        p.block = layout == 0 ? 2 : 2 * length;
        p.position_dtype = (rope_dtype)pick(ROPE_UNSUPPORTED + 1); /* the last: angles are given */
        p.freq_dtype = (rope_dtype)pick(4);
        if (p.freq_dtype == ROPE_F16 && p.position_dtype < ROPE_UNSUPPORTED && p.position_dtype > ROPE_I8)
            p.freq_dtype = ROPE_F32; /* too small for float16 */
        const int64_t choices = p.pairs > 40 ? 3 : 5;
        memcpy(p.tokens, sizes[pick(choices)], sizeof p.tokens);
        memcpy(p.repeats, sizes[pick(choices)] + 2, sizeof p.repeats);
        run_problem(&p, &fast);
    }
    for (int n = 0; n < 4 * 2 * 6; n++) { /* large angles: the last two sizes go through the C library */
        static const int bits[] = {17, 21, 27, 29, 34, 58};
        problem p = {.dtype = (rope_dtype)(n % 4), .pairs = 19, .tokens = {2, 30}, .repeats = {1, 2}};
        p.axes = 1 + n / 2 % 2, p.backward = n / 4 % 2, p.position_bits = bits[n / 8], p.block = pick(2) ? 2 : 38;
        p.position_dtype = n / 8 < 2 ? ROPE_F32 : pick(3) ? ROPE_F64 : ROPE_UNSUPPORTED;
        p.freq_dtype = n / 8 < 2 && pick(2) ? ROPE_F32 : ROPE_F64;
        run_problem(&p, n / 8 < 4 ? &fast : &libm);
    }
    for (int n = 0; n < 8; n++) { /* more repeats than one unit takes; then as many partial sums as there can be */
        problem p = {.dtype = (rope_dtype)(n % 4), .position_dtype = ROPE_F32, .freq_dtype = ROPE_F32, .backward = 1};
        p.axes = 2, p.position_bits = 7, p.pairs = 5, p.block = n < 4 ? 2 : 10;
        p.tokens[0] = 2, p.tokens[1] = 3, p.repeats[0] = p.repeats[1] = 9;
        run_problem(&p, &fast);
        if (n != ROPE_F64) continue;
        p.position_dtype = ROPE_I16; /* without gradients: those of the frequencies are wanted then */
        p.pairs = 2048, p.tokens[1] = 66, p.repeats[0] = p.repeats[1] = 1;
        run_problem(&p, &fast);
    }

    const char *isa;
    for (int index = 0; (isa = next_isa(&index)) != NULL;)
        printf("tested: %s\n", isa);
#if !defined(ROPE_TEST_CUDA)
    CHECK(rope_cpu_force_isa("none") == -1 && rope_cpu_force_isa(NULL) == 0, "force_isa");
#endif
    printf("largest errors, of the budgets: f32 %.2f, f64 %.2f, f16 %.2f, bf16 %.2f\n", largest_error[ROPE_F32],
           largest_error[ROPE_F64], largest_error[ROPE_F16], largest_error[ROPE_BF16]);
    printf("fnv of angles beyond the fast path: %016llx\n", (unsigned long long)libm);
    printf("fnv %016llx\n", (unsigned long long)fast);
    printf("%ld checks passed, %ld failed\n", passed, failed);
    return failed != 0;
}
