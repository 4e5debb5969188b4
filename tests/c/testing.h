/* What the tests of the kernels have in common. */
#ifndef TESTING_H
#define TESTING_H

#include "elements.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

extern long passed, failed;
extern int case_number;
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

/* Random numbers, the same on every machine: any bits, one of [0, count), and in [-1, 1]. */
uint64_t bits64(void);
int64_t pick(int64_t count);
double real(void);

/* Takes bytes into a checksum. */
uint64_t fnv(uint64_t hash, const unsigned char *bytes, size_t count);

/* Orders of the units of work: at once, from the last to the first one by one, and none with an error. */
rope_parallel_for forwards, backwards, refuses;

/* A call with rows [tokens, heads, 2 * pairs] and frequencies of every head, which the caller gives. */
rope_args contiguous(rope_dtype dtype, int64_t tokens, int64_t heads, int64_t pairs, int64_t block, void *x, void *y);

/* ---- the backend under test: on_cpu.c or on_cuda.c ---- */

/* Switches to the next instruction set that this machine has, from number *index on; its name, or NULL. */
const char *next_isa(int *index);
const char *run(const rope_args *args, rope_parallel_for *order);
const char *run_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                       rope_parallel_for *order);
/* What this backend alone has; prints what was tested. */
void test_backend(void);

/* ---- buffers.c: memory whose every element is checked: it holds what is wanted, or is left alone. Guards stand on
 * both sides but under AddressSanitizer, which sees reads too ---- */
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

extern const size_t size_of[];                      /* bytes of an element of each dtype */
extern double largest_error[ROPE_EMBEDDING_DTYPES]; /* of what is allowed to the arithmetic of each dtype */

void *allocate(buffer *b, rope_dtype dtype, int64_t count, int64_t origin);
/* All BUFFERS of them. */
void release(buffer *b);

/* Numbers up to 2^bits at random, multiples of `grid` unless it is 0; integers of all sizes. */
void fill(buffer *b, int bits, double grid);

/* The strides of leading dims whose innermost is `inner` apart; what the next outer dim has. */
int64_t nest(int dims, const int64_t *size, int64_t *stride, int64_t inner);

/* A buffer for an operand of these sizes, with token dims outermost or innermost. */
void place_operand(const rope_args *args, rope_operand *o, buffer *b, rope_dtype dtype, int64_t tokens, int64_t axes,
                   int64_t heads, int64_t pairs);

/* The element at `offset`, of the buffer's `now` or `before`. */
long double value(const buffer *b, const unsigned char *bytes, int64_t offset);

/* Adds a term to what is wanted there. */
void expect(buffer *b, int64_t offset, long double term, long double scale);
void compare(const buffer *b, rope_dtype arithmetic_of, const char *name);

/* ---- the tests: results go into the checksums, `libm` those of angles beyond the fast path ---- */
void test_conversions(void);
void test_nan(void);
void test_angles(uint64_t *fast);
void test_rotations(uint64_t *fast, uint64_t *libm);

#endif
