/* Rotations and their gradients: random calls against plain loops in long double, and NaN. */
#include "testing.h"

static size_t bytes_of(const buffer *b) { return b->now ? (size_t)b->count * size_of[b->dtype] : 0; }

static void copy(unsigned char *to, const unsigned char *from, size_t bytes) {
    if (bytes) memcpy(to, from, bytes); /* NULL where there is nothing */
}

/* On every instruction set, with the units of work forwards at once and backwards one by one: all the same bits. */
static void run_everywhere(const rope_args *args, buffer *b) {
    static rope_parallel_for *const orders[] = {forwards, backwards};
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

void test_rotations(uint64_t *fast, uint64_t *libm) {
    static const int64_t lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 160};
    static const int64_t sizes[][4] = {
        {1, 1, 1, 1}, {3, 2, 1, 3}, {1, 9, 2, 1}, {2, 1, 2, 9}, {1, 35, 1, 2}}; /* tokens, repeats */
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
        run_problem(&p, fast);
    }
    for (int n = 0; n < 4 * 2 * 6; n++) { /* large angles: the last two sizes go through the C library */
        static const int bits[] = {17, 21, 27, 29, 34, 58};
        problem p = {.dtype = (rope_dtype)(n % 4), .pairs = 19, .tokens = {2, 30}, .repeats = {1, 2}};
        p.axes = 1 + n / 2 % 2, p.backward = n / 4 % 2, p.position_bits = bits[n / 8], p.block = pick(2) ? 2 : 38;
        p.position_dtype = n / 8 < 2 ? ROPE_F32 : pick(3) ? ROPE_F64 : ROPE_UNSUPPORTED;
        p.freq_dtype = n / 8 < 2 && pick(2) ? ROPE_F32 : ROPE_F64;
        run_problem(&p, n / 8 < 4 ? fast : libm);
    }
    for (int n = 0; n < 8; n++) { /* more repeats than one unit takes; then as many partial sums as there can be */
        problem p = {.dtype = (rope_dtype)(n % 4), .position_dtype = ROPE_F32, .freq_dtype = ROPE_F32, .backward = 1};
        p.axes = 2, p.position_bits = 7, p.pairs = 5, p.block = n < 4 ? 2 : 10;
        p.tokens[0] = 2, p.tokens[1] = 3, p.repeats[0] = p.repeats[1] = 9;
        run_problem(&p, fast);
        if (n != ROPE_F64) continue;
        p.position_dtype = ROPE_I16; /* without gradients: those of the frequencies are wanted then */
        p.pairs = 2048, p.tokens[1] = 66, p.repeats[0] = p.repeats[1] = 1;
        run_problem(&p, fast);
    }
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

void test_nan(void) {
    for (int i = 0; i < 4; i++)
        check_nan(i & 1, i & 2 ? 2 : 22);
}
