/* Whether results are written past the caches. */
#define _DEFAULT_SOURCE /* mincore */
#include "plan.h"
#include "sizes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/mman.h>
#endif

/* Bytes of the third-level cache; the C library's sysconf has that of a whole AMD package, of which a core uses a
 * part. */
static int64_t last_cache(void) {
    int64_t bytes = 0;
#if defined(__x86_64__)
    static const unsigned leaves[] = {4, 0x8000001d}; /* Intel, AMD: the same bits */
    for (int i = 0; i < 2; i++)
        for (unsigned index = 0, a, b, c, d; index < 8; index++) {
            if (!__get_cpuid_count(leaves[i], index, &a, &b, &c, &d) || (a & 31) == 0) break;
            const int64_t ways = (b >> 22) + 1, partitions = (b >> 12 & 1023) + 1, line = (b & 4095) + 1;
            if ((a >> 5 & 7) == 3) bytes = ways * partitions * line * ((int64_t)c + 1);
        }
#endif
    return bytes ? bytes : 32 << 20;
}

static int64_t streamed = -1; /* from so many bytes on; written once, or by tests */

void rope_cpu_stream_from(int64_t bytes) { __atomic_store_n(&streamed, bytes, __ATOMIC_RELAXED); }

/* Three quarters of the cache, as memcpy of the GNU C library has it: what is longer has left the cache before it is
 * read. Figures in benchmarks/README.md. */
static int64_t stream_from(void) {
    const int64_t bytes = __atomic_load_n(&streamed, __ATOMIC_RELAXED);
    if (bytes < 0) rope_cpu_stream_from(last_cache() / 4 * 3);
    return __atomic_load_n(&streamed, __ATOMIC_RELAXED);
}

/* Whether rows of so many elements begin at a cache line and fill whole ones. */
static int in_whole_lines(const rope_args *args, const rope_tensor *t, int64_t row) {
    const int64_t line = ROPE_LINE / rope_size_of(args->dtype);
    int64_t rest = (int64_t)((uintptr_t)t->data % ROPE_LINE) | row % line;
    if (row == args->head_dim && args->heads > 1) rest |= t->head % line;
    for (int d = 0; d < args->token_dims; d++)
        if (args->token_size[d] > 1) rest |= t->token[d] % line;
    for (int d = 0; d < args->repeat_dims; d++)
        if (args->repeat_size[d] > 1) rest |= t->repeat[d] % line;
    return rest == 0;
}

/* Whether the kernel of the operating system has given a tensor its memory, by the last row and one in the middle.
 * Else it clears each page at the first access, in the cache, and writing past that takes 1.7 times as long. */
static int is_resident(const rope_args *args, const rope_tensor *t) {
#if defined(__x86_64__)
    enum { PAGE = 4096 };
    for (int part = 1; part <= 2; part++) {
        int64_t at = (args->heads - 1) / part * t->head;
        for (int d = 0; d < args->token_dims; d++)
            at += (args->token_size[d] - 1) / part * t->token[d];
        for (int d = 0; d < args->repeat_dims; d++)
            at += (args->repeat_size[d] - 1) / part * t->repeat[d];
        unsigned char state = 0;
        const uintptr_t address = (uintptr_t)t->data + (uintptr_t)(at * rope_size_of(args->dtype));
        if (mincore((void *)(address / PAGE * PAGE), 1, (void *)&state) != 0 || !(state & 1)) return 0;
    }
    return 1;
#else
    (void)args, (void)t;
    return 0;
#endif
}

int rope_streams(const rope_cpu_plan *plan) {
    const rope_args *args = plan->args;
    if (args->y.data == args->x.data) return 0; /* in the cache already */
    const int64_t row = plan->side_by_side ? args->heads * args->head_dim : args->head_dim;
    const int64_t bytes = plan->tokens * plan->repeats * args->heads * args->head_dim * rope_size_of(args->dtype);
    const int whole_vectors = args->block == 2 || args->block / 2 % ROPE_PAD == 0;
    return bytes > 0 && bytes >= stream_from() && whole_vectors && in_whole_lines(args, &args->y, row) &&
           is_resident(args, &args->y);
}
