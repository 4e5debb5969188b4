#include "testing.h"

long passed, failed;
int case_number;

static uint64_t lcg_state = 1;
uint64_t bits64(void) {
    uint64_t high = lcg_state = lcg_state * 6364136223846793005u + 1442695040888963407u;
    lcg_state = lcg_state * 6364136223846793005u + 1442695040888963407u;
    return (high & 0xffffffff00000000u) | lcg_state >> 32;
}
int64_t pick(int64_t count) { return (int64_t)((bits64() >> 33) % (uint64_t)count); }
double real(void) { return (double)(int64_t)bits64() * 0x1p-63; }

uint64_t fnv(uint64_t hash, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

int forwards(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)grain;
    task(0, count, context);
    return 0;
}
int backwards(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)grain; /* a hint */
    for (int64_t i = count - 1; i >= 0; i--)
        task(i, i + 1, context);
    return 0;
}
int refuses(int64_t count, int64_t grain, rope_task *task, void *context) {
    (void)count, (void)grain, (void)task, (void)context;
    return 1;
}

rope_args contiguous(rope_dtype dtype, int64_t tokens, int64_t heads, int64_t pairs, int64_t block, void *x,
                     void *y) {
    rope_args args = {.dtype = dtype, .token_dims = 1, .token_size = {tokens}, .axes = 1};
    args.heads = args.freq_heads = heads, args.head_dim = 2 * pairs, args.pairs = pairs, args.block = block;
    args.x = args.y = (rope_tensor){.token = {2 * heads * pairs}, .head = 2 * pairs, .channel = 1};
    args.x.data = x, args.y.data = y;
    return args;
}
