#define _POSIX_C_SOURCE 200112L /* posix_memalign */
#include "testing.h"

const size_t size_of[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};
/* What a sum may be off, of the sum of its terms' sizes: 3.5 epsilon */
static const double arithmetic[] = {3.5 * 0x1p-23, 3.5 * 0x1p-52, 3.5 * 0x1p-23, 3.5 * 0x1p-23};
static const double rounding[] = {0x1p-24, 0x1p-53, 0x1p-11, 0x1p-8}, tiniest[] = {0x1p-149, 0, 0x1p-25, 0x1p-134};
double largest_error[ROPE_EMBEDDING_DTYPES];

void *allocate(buffer *b, rope_dtype dtype, int64_t count, int64_t origin) {
    const int64_t shift = pick(4) == 0; /* else a cache line begins here */
    *b = (buffer){.dtype = dtype, .count = count + 2 * GUARD + shift, .origin = origin + GUARD + shift};
    const size_t n = (size_t)b->count, bytes = n * size_of[dtype];
    b->before = malloc(bytes), b->first = malloc(bytes);
    if (posix_memalign((void **)&b->now, 64, bytes)) abort();
    b->want = calloc(n, sizeof(long double)), b->scale = calloc(n, sizeof(long double));
    for (size_t i = 0; i < n; i++)
        b->scale[i] = -1;
    memset(b->now, 0xa5, bytes);
    return b->now + (size_t)b->origin * size_of[dtype];
}

void release(buffer *b) {
    for (int i = 0; i < BUFFERS; i++)
        free(b[i].now), free(b[i].before), free(b[i].first), free(b[i].want), free(b[i].scale);
}

long double value(const buffer *b, const unsigned char *bytes, int64_t offset) {
    double low, high = rope_read(bytes, b->dtype, b->origin + offset, &low);
    return low == 0 ? high : (long double)high + (long double)low; /* -0 stays */
}

void expect(buffer *b, int64_t offset, long double term, long double scale) {
    const int64_t i = b->origin + offset;
    b->want[i] = b->scale[i] < 0 ? term : b->want[i] + term; /* a sum with zero would lose -0 */
    b->scale[i] = b->scale[i] < 0 ? scale : b->scale[i] + scale;
}

void compare(const buffer *b, rope_dtype arithmetic_of, const char *name) {
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

void fill(buffer *b, int bits, double grid) {
    for (int64_t i = GUARD; i < b->count - GUARD; i++) {
        const double number = ldexp(real(), bits);
        const uint64_t integer = bits64();
        if (b->dtype <= ROPE_BF16)
            rope_write(b->now, b->dtype, i, grid == 0 ? number : rint(number / grid) * grid);
        else
            memcpy(b->now + (size_t)i * size_of[b->dtype], &integer, size_of[b->dtype]);
    }
}

int64_t nest(int dims, const int64_t *size, int64_t *stride, int64_t inner) {
    for (int d = dims - 1; d >= 0; inner *= size[d--])
        stride[d] = inner;
    return inner;
}

void place_operand(const rope_args *args, rope_operand *o, buffer *b, rope_dtype dtype, int64_t tokens, int64_t axes,
                   int64_t heads, int64_t pairs) {
    const int first = pick(2) == 0;
    o->dtype = dtype;
    o->pair = first ? 1 : tokens * axes * heads;
    o->head = first ? pairs : tokens * axes;
    o->axis = first ? heads * pairs : tokens;
    nest(args->token_dims, args->token_size, o->token, first ? axes * heads * pairs : 1);
    o->data = allocate(b, dtype, tokens * axes * heads * pairs, 0);
}
