/* What the CUDA kernels are launched with: made by run.c, read by kernels.cu. Sizes alone decide all of it,
 * so that sums have the same order, and results the same bits, on every device. */
#ifndef ROPE_CUDA_H
#define ROPE_CUDA_H

#include "rope.h"

#define ROPE_CUDA_THREADS 256 /* of a block, at most */
#define ROPE_CUDA_WARP 32
#define ROPE_CUDA_SHARED (48 * 1024) /* bytes that every device gives a block without asking */

/* How a thread holds channels: ROPE_VECTOR bytes in one piece, or in two from the halves of a block; or, where
 * strides or sizes don't allow that, one pair of channels. */
#define ROPE_INTERLEAVED 0
#define ROPE_HALVES 1
#define ROPE_SCALAR 2
#define ROPE_LAYOUTS 3
#define ROPE_VECTOR 16

/* A row is all heads of one token in one repeat. It is cut into slots, which one thread rotates, or copies where the
 * channels lie outside the rotated ones; those come last in each head.
 *
 * A block has `lanes` slots side by side and, in its other threads, as many tokens as fit. One piece of work is
 * `lanes` slots, unit_tokens tokens and unit_repeats repeats. */
typedef struct {
    rope_args args; /* heads that share frequencies are the innermost repeat dim here, and args.heads is 1 */
    uint32_t tokens, repeats;                 /* all counts are below 2^32; offsets have 64 bits */
    uint32_t slots, head_slots, head_rotated; /* of a row, of a head, and those that are rotated */
    uint32_t tiles, token_units, repeat_units, work;
    uint32_t unit_repeats;
    uint32_t lanes, lanes_log2, token_lanes, unit_tokens;

    /* Backward: sums of each piece of work, NULL where not wanted */
    double *freq_sums;     /* [token_units][repeat_units][axes][heads][pairs] */
    double *position_sums; /* [repeat_units][tiles][tokens][axes] */
    double *angle_sums;    /* [repeat_units][tokens][heads][pairs]; NULL too with one repeat unit */
} rope_cuda_plan;

/* One lane's slot, in a block's memory: where its first channel is in a row. */
typedef struct {
    int64_t x, y, saved;
    uint32_t head, pair; /* pair: ROPE_COPIED, or ROPE_NO_SLOT beyond the row */
} rope_slot;
#define ROPE_COPIED 0xfffffffeu
#define ROPE_NO_SLOT 0xffffffffu

/* out[i] = scale * (sums[0][i] + sums[1][i] + ...). */
typedef struct {
    const double *sums; /* [parts][count] */
    int64_t parts, count;
    int32_t lanes; /* threads that share a sum */
    double scale;
    void *out;
    rope_dtype dtype;
    int dims;
    int64_t size[ROPE_MAX_DIMS + 2], stride[ROPE_MAX_DIMS + 2];
} rope_cuda_sum;

/* What rope_cuda_angles was asked. */
typedef struct {
    rope_args args;
    int64_t tokens, groups, group_stride;
    rope_operand angles;
} rope_cuda_angles_plan;

#endif
