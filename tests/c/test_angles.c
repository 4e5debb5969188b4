/* Angles alone: rope_cpu_angles and rope_cuda_angles. */
#include "testing.h"

/* Angles [tokens, heads, pairs] of positions [tokens, axes] and frequencies [axes, groups, heads, pairs]. */
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

void test_angles(uint64_t *fast) {
    for (int i = 0; i < ROPE_UNSUPPORTED; i++)
        check_angles((rope_dtype)i, (rope_dtype)(i < 4 ? i : i % 2), fast);
}
