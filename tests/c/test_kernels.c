/* The CPU kernels alone, without torch or Python: against plain loops in long double, and every instruction set and
 * order of work against the first, to the bit. `make native`, `sanitize` and `arm` build and run this.
 *
 * The last lines printed hold a checksum of all results, equal on every machine: x86 and NEON too. */
#include "rope_scalar.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static long passed, failed;
#define CHECK(condition, ...)                                             \
    do {                                                                  \
        if (condition) passed++;                                          \
        else if (++failed <= 20) {                                        \
            printf("%s:%d: not %s: ", __FILE__, __LINE__, #condition);    \
            printf(__VA_ARGS__);                                          \
            printf("  [case %d]\n", case_number);                         \
        }                                                                 \
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
    for (size_t i = 0; i < count; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

/* ---- what is known of each dtype ---- */
static const size_t size_of[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};
static const double arithmetic[] = {4e-7, 6e-16, 4e-7, 4e-7}; /* error of a sum, of the sum of its terms' sizes */
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
    for (size_t i = 0; i < n; i++) b->scale[i] = -1;
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
            CHECK(memcmp(b->now + (size_t)i * size, b->before + (size_t)i * size, size) == 0, "%s[%d] written", name, (int)i);
            continue;
        }
        const long double want = b->want[i], got = value(b, b->now, i - b->origin), error = fabsl(got - want);
        if (b->scale[i] == 0) {
            CHECK(error == 0 && signbit(got) == signbit(want), "%s[%d] %.17Lg, want %.17Lg", name, (int)i, got, want);
            continue;
        }
        const long double rest = error - rounding[b->dtype] * fabsl(want) - tiniest[b->dtype];
        const double relative = (double)(rest / (arithmetic[arithmetic_of] * b->scale[i]));
        CHECK(relative <= 1, "%s[%d] %.17Lg, want %.17Lg, scale %Lg: error %g of budget", name, (int)i, got, want, b->scale[i],
              relative);
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
    for (int64_t i = count - 1; i >= 0; i--) task(i, i + 1, context);
    return 0;
}
static int refuses(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)count, (void)grain, (void)task, (void)context;
    return 1;
}
static rope_parallel_for *const orders[] = {forwards, backwards};

static void run_everywhere(const rope_args *args, buffer *b) {
    int usable, first = 1;
    const char *isa;
    for (int k = 0; k < BUFFERS; k++)
        if (b[k].now) memcpy(b[k].before, b[k].now, (size_t)b[k].count * size_of[b[k].dtype]);
    for (int index = 0; (isa = rope_cpu_isa(index, &usable)) != NULL; index++)
        for (int order = 0; usable && order < 2; order++, first = 0) {
            CHECK(rope_cpu_force_isa(isa) == 0 && strcmp(rope_cpu_active_isa(), isa) == 0, "%s", isa);
            for (int k = 0; k < BUFFERS; k++)
                if (b[k].now) memcpy(b[k].now, b[k].before, (size_t)b[k].count * size_of[b[k].dtype]);
            const char *error = rope_cpu_run(args, orders[order]);
            CHECK(!error, "%s", error);
            for (int k = 0; k < BUFFERS; k++) {
                const size_t bytes = b[k].now ? (size_t)b[k].count * size_of[b[k].dtype] : 0;
                if (first && bytes) memcpy(b[k].first, b[k].now, bytes);
                CHECK(!bytes || memcmp(b[k].now, b[k].first, bytes) == 0, "buffer %d of %s, order %d", k, isa, order);
            }
        }
    for (int k = 0; k < BUFFERS; k++)
        if (b[k].now) memcpy(b[k].now, b[k].first, (size_t)b[k].count * size_of[b[k].dtype]);
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
    for (int d = dims - 1; d >= 0; inner *= size[d--]) stride[d] = inner;
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

static void fill(buffer *b, int64_t offset, int bits, int whole, double grid) {
    const double number = ldexp(real(), bits);
    const uint64_t integer = bits64();
    if (b->dtype <= ROPE_BF16) rope_write(b->now, b->dtype, b->origin + offset, whole ? rint(number / grid) * grid : number);
    else memcpy(b->now + (size_t)(b->origin + offset) * size_of[b->dtype], &integer, size_of[b->dtype]);
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
    for (int d = 0; d < 2; d++) args.token_size[d] = p->tokens[args.token_dims == 2 ? d : 1];
    for (int d = 0; d < 2; d++) args.repeat_size[d] = p->repeats[args.repeat_dims == 2 ? d : 1];
    args.heads = 1 + pick(3);
    args.freq_heads = pick(2) ? args.heads : 1;
    args.axes = given ? 1 : p->axes;
    args.rotary_offset = packed ? 0 : pick(3);
    args.head_dim = args.rotary_offset + 2 * p->pairs + (packed ? 0 : pick(4));
    args.inverse = (int)pick(2);
    const int64_t tokens = total(args.token_dims, args.token_size), repeats = total(args.repeat_dims, args.repeat_size);

    place_rows(&args, &args.x, &b[X], strided, packed);
    const int writes = !p->backward || pick(4) != 0;
    if (writes && in_place) args.y = args.x;
    else if (writes) place_rows(&args, &args.y, &b[Y], strided, packed);
    place_operand(&args, &args.freqs, &b[FREQS], p->freq_dtype, given ? tokens : 1, args.axes, args.freq_heads, p->pairs);
    if (!given) place_operand(&args, &args.positions, &b[POSITIONS], p->position_dtype, tokens, args.axes, 1, 1);
    if (p->backward) {
        place_rows(&args, &args.saved, &b[SAVED], strided, packed);
        args.saved_is_input = (int)pick(2);
        const int both = p->position_dtype <= ROPE_BF16 && pick(4) != 0;
        if (both)
            place_operand(&args, &args.grad_positions, &b[GRAD_POSITIONS], p->position_dtype, tokens, args.axes, 1, 1);
        if (!both || pick(2))
            place_operand(&args, &args.grad_freqs, &b[GRAD_FREQS], p->freq_dtype, given ? tokens : 1, args.axes,
                          args.freq_heads, p->pairs);
    }

    /* positions at random, the first all zero; frequencies so that angles are as large as asked */
    const int integer_bits = given || p->position_dtype <= ROPE_BF16 ? 8 : 8 * (int)size_of[p->position_dtype];
    for (int64_t i = 0; i < b[FREQS].count - 2 * GUARD; i++)
        fill(&b[FREQS], i, given ? p->position_bits : 8 - integer_bits, big, ldexp(1, -(p->position_bits < 30 ? 32 : 62 - p->position_bits))); /* exact in long double */
    for (int64_t i = 0; given == 0 && i < b[POSITIONS].count - 2 * GUARD; i++)
        fill(&b[POSITIONS], i, p->position_bits, big, 1);
    buffer *zeroed = &b[given ? FREQS : POSITIONS];
    const rope_operand *zero_at = given ? &args.freqs : &args.positions;
    for (int64_t a = 0; a < args.axes; a++)
        for (int64_t h = 0; h < (given ? args.freq_heads : 1); h++)
            for (int64_t i = 0; i < (given ? p->pairs : 1); i++)
                memset(zeroed->now + (size_t)(zeroed->origin + a * zero_at->axis + h * zero_at->head + i * zero_at->pair) *
                                         size_of[zeroed->dtype], 0, size_of[zeroed->dtype]);

    run_everywhere(&args, b);

    buffer *out = in_place ? &b[X] : &b[Y];
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < args.heads; h++)
            for (int64_t i = 0, fh = args.freq_heads == 1 ? 0 : h; i < p->pairs; i++) {
                const rope_operand *f = &args.freqs, *q = &args.positions, *gp = &args.grad_positions, *gf = &args.grad_freqs;
                const int dims = args.token_dims;
                const int64_t position_at = at(dims, args.token_size, q->token, t);
                const int64_t freq_at = (given ? at(dims, args.token_size, f->token, t) : 0) + fh * f->head + i * f->pair;
                long double theta = 0;
                for (int64_t a = 0; a < args.axes; a++)
                    theta += (given ? 1 : value(&b[POSITIONS], b[POSITIONS].before, position_at + a * q->axis)) *
                             value(&b[FREQS], b[FREQS].before, freq_at + a * f->axis);
                const long double c = cosl(theta), s = args.inverse ? -sinl(theta) : sinl(theta);
                const int64_t half = p->block / 2, d = args.rotary_offset + i / half * p->block + i % half;
                for (int64_t r = 0; r < repeats; r++) {
#define ROW(t_, r_) (at(dims, args.token_size, (t_).token, t) + at(args.repeat_dims, args.repeat_size, (t_).repeat, r_) + h * (t_).head)
                    const int64_t x = ROW(args.x, r), y = ROW(args.y, r), w = ROW(args.saved, r);
                    const long double x0 = value(&b[X], b[X].before, x + d * args.x.channel);
                    const long double x1 = value(&b[X], b[X].before, x + (d + half) * args.x.channel);
                    const long double y0 = theta == 0 ? x0 : x0 * c - x1 * s, y1 = theta == 0 ? x1 : x1 * c + x0 * s;
                    const long double norm = hypotl(x0, x1), scale = theta == 0 ? 0 : norm + 1e-300L;
                    if (writes) {
                        expect(out, y + d * args.y.channel, y0, scale);
                        expect(out, y + (d + half) * args.y.channel, y1, scale);
                        for (int64_t k = 0; i == 0 && k < args.head_dim; k++)
                            if (k < args.rotary_offset || k >= args.rotary_offset + 2 * p->pairs)
                                expect(out, y + k * args.y.channel, value(&b[X], b[X].before, x + k * args.x.channel), 0);
                    }
                    if (!p->backward) continue;
                    const long double w0 = value(&b[SAVED], b[SAVED].before, w + d * args.saved.channel);
                    const long double w1 = value(&b[SAVED], b[SAVED].before, w + (d + half) * args.saved.channel);
                    const long double term = args.saved_is_input ? w0 * y1 - w1 * y0 : x1 * w0 - x0 * w1;
                    const long double grad = args.inverse ? term : -term, size = norm * hypotl(w0, w1);
                    for (int64_t a = 0; a < args.axes; a++) {
                        const long double freq = value(&b[FREQS], b[FREQS].before, freq_at + a * f->axis);
                        const long double position =
                            given ? 1 : value(&b[POSITIONS], b[POSITIONS].before, position_at + a * q->axis);
                        if (gp->data)
                            expect(&b[GRAD_POSITIONS], at(dims, args.token_size, gp->token, t) + a * gp->axis, grad * freq,
                                   size * fabsl(freq) + 1e-300L);
                        if (gf->data)
                            expect(&b[GRAD_FREQS], (given ? at(dims, args.token_size, gf->token, t) : 0) + a * gf->axis +
                                   fh * gf->head + i * gf->pair, grad * position, size * fabsl(position) + 1e-300L);
                    }
                }
            }
    static const char *const names[] = {"x", "y", "saved", "positions", "freqs", "grad_positions", "grad_freqs"};
    for (int k = 0; k < BUFFERS; k++) {
        compare(&b[k], p->dtype, names[k]);
        for (int64_t i = 0; i < b[k].count; i++)
            if (b[k].scale[i] >= 0) *hash = fnv(*hash, b[k].now + (size_t)i * size_of[b[k].dtype], size_of[b[k].dtype]);
    }
    release(b);
}

/* ---- halves ---- */
static void check_conversions(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
        const double size = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
        const float f16 = rope_f16_to_f32((uint16_t)h), bf16 = rope_bf16_to_f32((uint16_t)h);
        if (exponent < 31) CHECK((double)f16 == (h & 0x8000 ? -size : size), "%x", h);
        else CHECK(fraction ? isnan(f16) : isinf(f16) && !signbit(f16) == !(h & 0x8000), "%x", h);
        CHECK(isnan(f16) ? isnan(rope_f16_to_f32(rope_f32_to_f16(f16))) : rope_f32_to_f16(f16) == h, "%x", h);
        CHECK(rope_f32_to_bits(bf16) == h << 16, "%x", h);
        CHECK(isnan(bf16) ? isnan(rope_bf16_to_f32(rope_f32_to_bf16(bf16))) : rope_f32_to_bf16(bf16) == h, "%x", h);

        /* between this number and the next: below the middle, at it, above; to infinity as if it were the next */
        if ((h & 0x7fff) < 0x7c00) {
            const double next = (h & 0x7fff) == 0x7bff ? copysign(65536, f16) : (double)rope_f16_to_f32((uint16_t)(h + 1));
            const float middle = (float)(((double)f16 + next) / 2);
            CHECK(rope_f32_to_f16(nextafterf(middle, 0)) == h && rope_f32_to_f16(middle) == h + (h & 1) &&
                  rope_f32_to_f16(nextafterf(middle, copysignf(INFINITY, middle))) == h + 1, "%x", h);
        }
        if ((h & 0x7fff) < 0x7f80) {
            const float middle = rope_bits_to_f32(h << 16 | 0x8000);
            CHECK(rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x7fff)) == h && rope_f32_to_bf16(middle) == h + (h & 1) &&
                  rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x8001)) == h + 1, "%x", h);
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
    rope_args args = {.dtype = dtype, .token_dims = 1, .token_size = {TOKENS}, .heads = 1, .head_dim = 2 * PAIRS,
                      .pairs = PAIRS, .block = block, .axes = 1, .freq_heads = 1};
    args.x = (rope_tensor){.data = halves, .token = {2 * PAIRS}, .head = 2 * PAIRS, .channel = 1};
    args.freqs = (rope_operand){.data = &angle, .dtype = ROPE_F32};
    args.y = args.x;
    rope_args wide_args = args;
    args.y.data = result;
    wide_args.dtype = ROPE_F32, wide_args.x.data = wide, wide_args.y.data = wide_result;
    int usable, ties = 0;
    const char *isa;
    for (int index = 0; (isa = rope_cpu_isa(index, &usable)) != NULL; index++) {
        if (!usable) continue;
        CHECK(!rope_cpu_force_isa(isa) && !rope_cpu_run(&args, forwards) && !rope_cpu_run(&wide_args, forwards), "%s", isa);
        for (int i = 0; i < 2 * 65536; i++) {
            const float value = wide_result[i];
            const uint16_t want = dtype == ROPE_F16 ? rope_f32_to_f16(value) : rope_f32_to_bf16(value);
            const float got = dtype == ROPE_F16 ? rope_f16_to_f32(result[i]) : rope_bf16_to_f32(result[i]);
            CHECK(isnan(value) ? isnan(got) : result[i] == want, "%s: %a gives %x, want %x", isa, (double)value, result[i], want);
            ties += (rope_f32_to_bits(value) & (dtype == ROPE_F16 ? 0x1fff : 0xffff)) == (dtype == ROPE_F16 ? 0x1000 : 0x8000);
        }
    }
    CHECK(angle > 0x1p-12f || ties > 20000, "only %d ties", ties);
}

/* A NaN angle (of one pair, made by a NaN frequency, or by a NaN position) leaves all others right. */
static void check_nan(int given, int64_t block) {
    enum { TOKENS = 5, HEADS = 2, PAIRS = 11, ROW = HEADS * PAIRS };
    float freqs[TOKENS * ROW], positions[TOKENS], x[2 * TOKENS * ROW], y[2 * TOKENS * ROW];
    for (int i = 0; i < TOKENS * ROW; i++) freqs[i] = (float)real(), x[2 * i] = (float)real(), x[2 * i + 1] = (float)real();
    for (int i = 0; i < TOKENS; i++) positions[i] = (float)real();
    const int bad_head = 0, bad_pair = 3, bad_token = given ? 2 : 4;
    freqs[(given ? bad_token * ROW : 0) + bad_head * PAIRS + bad_pair] = NAN;
    if (!given) positions[bad_token] = NAN;
    rope_args args = {.dtype = ROPE_F32, .token_dims = 1, .token_size = {TOKENS}, .heads = HEADS, .head_dim = 2 * PAIRS,
                      .pairs = PAIRS, .block = block, .axes = 1, .freq_heads = HEADS};
    args.x = (rope_tensor){.data = x, .token = {2 * ROW}, .head = 2 * PAIRS, .channel = 1};
    args.y = args.x, args.y.data = y;
    args.freqs = (rope_operand){.data = freqs, .dtype = ROPE_F32, .token = {given ? ROW : 0}, .head = PAIRS, .pair = 1};
    if (!given) args.positions = (rope_operand){.data = positions, .dtype = ROPE_F32, .token = {1}};
    int usable;
    const char *isa;
    for (int index = 0; (isa = rope_cpu_isa(index, &usable)) != NULL; index++) {
        if (!usable) continue;
        CHECK(!rope_cpu_force_isa(isa) && !rope_cpu_run(&args, forwards), "%s", isa);
        for (int t = 0; t < TOKENS; t++)
            for (int i = 0; i < ROW; i++) {
                const int head = i / PAIRS, pair = i % PAIRS, half = (int)block / 2;
                const int d = 2 * (t * ROW + head * PAIRS) + (half == 1 ? 2 * pair : pair);
                const int bad = given ? t == bad_token && head == bad_head && pair == bad_pair
                                      : t == bad_token || (head == bad_head && pair == bad_pair);
                const float theta = given ? freqs[t * ROW + i] : positions[t] * freqs[i];
                const float want = x[d] * cosf(theta) - x[d + half] * sinf(theta);
                CHECK(bad ? isnan(y[d]) : fabsf(y[d] - want) < 1e-6f, "%s, given %d: token %d, head %d, pair %d: %g, want %g",
                      isa, given, t, head, pair, (double)y[d], (double)want);
            }
    }
}

/* rope_cpu_angles: [tokens, heads, pairs] of positions [tokens, axes] and frequencies [axes, groups, heads, pairs]. */
static void check_angles(rope_dtype position_dtype, rope_dtype dtype, uint64_t *hash) {
    enum { TOKENS = 700, AXES = 2, GROUPS = 3, HEADS = 2, PAIRS = 5, ROW = HEADS * PAIRS };
    buffer b[BUFFERS] = {0};
    rope_args args = {.token_dims = 1, .token_size = {TOKENS}, .axes = AXES, .freq_heads = HEADS, .pairs = PAIRS};
    rope_operand out = {0};
    place_operand(&args, &args.positions, &b[POSITIONS], position_dtype, TOKENS, AXES, 1, 1);
    args.freqs = (rope_operand){.dtype = dtype, .axis = GROUPS * ROW, .head = PAIRS, .pair = 1};
    args.freqs.data = allocate(&b[FREQS], dtype, AXES * GROUPS * ROW, 0);
    place_operand(&args, &out, &b[Y], dtype, TOKENS, 1, HEADS, PAIRS);
    for (int64_t i = 0; i < TOKENS * AXES; i++) fill(&b[POSITIONS], i, 7, 0, 0);
    const int bits = position_dtype <= ROPE_BF16 ? 0 : 8 - 8 * (int)size_of[position_dtype];
    for (int64_t i = 0; i < AXES * GROUPS * ROW; i++) fill(&b[FREQS], i, bits, 0, 0);
    memcpy(b[Y].before, b[Y].now, (size_t)b[Y].count * size_of[dtype]);
    const char *error = rope_cpu_angles(&args, GROUPS, ROW, &out, backwards);
    CHECK(!error, "%s", error);
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t i = 0; i < ROW; i++)
            for (int64_t a = 0; a < AXES; a++)
                for (int64_t g = 0; g < GROUPS; g++) {
                    const long double p = value(&b[POSITIONS], b[POSITIONS].now, t * args.positions.token[0] + a * args.positions.axis);
                    const long double f = value(&b[FREQS], b[FREQS].now, (a * GROUPS + g) * ROW + i);
                    expect(&b[Y], t * out.token[0] + i / PAIRS * out.head + i % PAIRS * out.pair, p * f, fabsl(p * f) + 1e-300L);
                }
    compare(&b[Y], ROPE_F64, "angles");
    *hash = fnv(*hash, b[Y].now + (size_t)b[Y].origin * size_of[dtype], TOKENS * ROW * size_of[dtype]);
    CHECK(rope_cpu_angles(&args, GROUPS, ROW, &out, refuses) != NULL, "no error");
    release(b);
}

int main(void) {
    static const int64_t lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 160};
    static const int64_t sizes[][4] = {{1, 1, 1, 1}, {3, 2, 1, 3}, {1, 9, 2, 1}, {2, 1, 2, 9}, {1, 35, 1, 2}}; /* tokens, repeats */
    uint64_t fast = 0xcbf29ce484222325u, libm = fast;

    check_conversions();
    for (int i = 0; i < 8; i++)
        check_kernel_conversions(i & 1 ? ROPE_F16 : ROPE_BF16, i & 2 ? 2 : 128, i & 4 ? 0x1p-12f : 1.0f);
    for (int i = 0; i < 4; i++) check_nan(i & 1, i & 2 ? 2 : 22);
    for (int i = 0; i < ROPE_UNSUPPORTED; i++) check_angles((rope_dtype)i, (rope_dtype)(i < 4 ? i : i % 2), &fast);

    for (int n = 0; n < 4 * 14 * 3 * 4; n++) {
        problem p = {.dtype = (rope_dtype)(n % 4), .position_bits = 7, .axes = 1 + pick(3), .backward = n / 4 / 14 / 3 % 2};
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
    for (int n = 0; n < 4 * 2 * 6; n++) { /* large angles; the last half of the bits by the C library */
        static const int bits[] = {17, 21, 27, 29, 34, 58};
        problem p = {.dtype = (rope_dtype)(n % 4), .axes = 1 + n / 2 % 2, .backward = n / 4 % 2, .position_bits = bits[n / 8],
                     .pairs = 19, .block = pick(2) ? 2 : 38, .tokens = {2, 30}, .repeats = {1, 2}};
        p.position_dtype = n / 8 < 2 ? ROPE_F32 : pick(3) ? ROPE_F64 : ROPE_UNSUPPORTED;
        p.freq_dtype = n / 8 < 2 ? ROPE_F32 : ROPE_F64;
        run_problem(&p, n / 8 < 4 ? &fast : &libm);
    }
    for (int n = 0; n < 8; n++) { /* more tokens than partial sums, more repeats than one unit takes */
        problem p = {.dtype = (rope_dtype)(n % 4), .position_dtype = ROPE_F32, .freq_dtype = ROPE_F32, .axes = 2, .backward = 1,
                     .position_bits = 7, .pairs = 64, .block = n < 4 ? 2 : 128, .tokens = {2, 150}, .repeats = {1, 1}};
        run_problem(&p, &fast);
        p.pairs = 5, p.block = n < 4 ? 2 : 10, p.tokens[1] = 3, p.repeats[0] = 9, p.repeats[1] = 9;
        run_problem(&p, &fast);
    }

    int usable;
    const char *isa;
    for (int index = 0; (isa = rope_cpu_isa(index, &usable)) != NULL; index++)
        printf("%s: %s\n", isa, usable ? "tested" : "not on this machine");
    CHECK(rope_cpu_force_isa("none") == -1 && rope_cpu_force_isa(NULL) == 0, "force_isa");
    printf("largest errors, of the budgets: f32 %.2f, f64 %.2f, f16 %.2f, bf16 %.2f\n", largest_error[ROPE_F32],
           largest_error[ROPE_F64], largest_error[ROPE_F16], largest_error[ROPE_BF16]);
    printf("fnv of angles beyond the fast path: %016llx\n", (unsigned long long)libm);
    printf("fnv %016llx\n", (unsigned long long)fast);
    printf("%ld checks passed, %ld failed\n", passed, failed);
    return failed != 0;
}
