/* Tests of the CPU backend: on each instruction set in turn. */
#include "testing.h"

const char *run(const rope_args *args, rope_parallel_for *order) { return rope_cpu_run(args, order); }

const char *run_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                       rope_parallel_for *order) {
    return rope_cpu_angles(args, groups, group_stride, angles, order);
}

/* Each twice: with results in the caches, and past them where that can be. */
const char *next_isa(int *index) {
    int usable, past;
    const char *isa;
    do {
        past = *index % 2;
        isa = rope_cpu_isa((*index)++ / 2, &usable);
        if (isa) CHECK(rope_cpu_force_isa(isa) == (usable ? 0 : -1), "%s", isa);
    } while (isa && !usable);
    CHECK(!isa || strcmp(rope_cpu_active_isa(), isa) == 0, "%s", isa);
    rope_cpu_stream_from(past ? 0 : INT64_MAX);
    return isa;
}

/* Where rows lie is no matter of bits: in whole cache lines, or off them in one way. */
static void check_places(rope_dtype dtype) {
    enum { TOKENS = 3, HEADS = 2, REPEATS = 5, BYTES = 1 << 16 };
    static const struct {
        int64_t pairs, block, offset, base, head, token, repeat; /* the last three: gaps between them */
    } ways[] = {
        {.pairs = 32, .block = 2},
        {.pairs = 32, .block = 64},
        {.pairs = 32, .block = 2, .base = 1},
        {.pairs = 32, .block = 2, .head = 1},
        {.pairs = 32, .block = 2, .token = 1},
        {.pairs = 32, .block = 2, .repeat = 1},
        {.pairs = 32, .block = 2, .offset = 1},
        {.pairs = 96, .block = 24},
        {.pairs = 22, .block = 2, .head = 20},
    };
    static _Alignas(64) unsigned char x[BYTES], y[BYTES], first[BYTES];
    float positions[TOKENS] = {1, 2, 3}, freqs[HEADS * 96];
    const char *isa;
    for (int i = 0; i < HEADS * 96; i++)
        freqs[i] = (float)real();
    for (int64_t i = 0; i < BYTES / 8; i++)
        rope_write(x, dtype, i, real());
    for (int way = 0; way < (int)(sizeof ways / sizeof *ways); way++) {
        const int64_t pairs = ways[way].pairs - ways[way].offset;
        rope_args args = contiguous(dtype, TOKENS, HEADS, ways[way].pairs, ways[way].block, x,
                                    y + (size_t)ways[way].base * size_of[dtype]);
        args.pairs = pairs, args.rotary_offset = ways[way].offset;
        args.repeat_dims = 1, args.repeat_size[0] = REPEATS, args.x.repeat[0] = TOKENS * args.x.token[0];
        args.y.head += ways[way].head;
        args.y.token[0] = HEADS * args.y.head + ways[way].token;
        args.y.repeat[0] = TOKENS * args.y.token[0] + ways[way].repeat;
        args.positions = (rope_operand){.data = positions, .dtype = ROPE_F32, .token = {1}};
        args.freqs = (rope_operand){.data = freqs, .dtype = ROPE_F32, .head = pairs, .pair = 1};
        for (int index = 0, runs = 0; (isa = next_isa(&index)) != NULL; runs++) {
            memset(y, 0xa5, BYTES);
            CHECK(!run(&args, forwards), "%s, way %d", isa, way);
            if (runs == 0) memcpy(first, y, BYTES);
            CHECK(memcmp(y, first, BYTES) == 0, "%s, way %d, dtype %d", isa, way, (int)dtype);
        }
    }
}

void test_backend(void) {
    const char *isa;
    for (int dtype = 0; dtype < ROPE_EMBEDDING_DTYPES; dtype++)
        check_places((rope_dtype)dtype);
    for (int index = 0; (isa = next_isa(&index)) != NULL;)
        if (index % 2) printf("tested: %s\n", isa);
    CHECK(rope_cpu_force_isa("none") == -1 && rope_cpu_force_isa(NULL) == 0, "force_isa");
}
