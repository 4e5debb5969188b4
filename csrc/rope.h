/* The contract between whoever holds tensors and the kernels: one struct of sizes, strides and pointers.
 *
 * The angle of pair i of head h at a token with coordinates p is theta = sum_a p[a] * f[a, h, i].
 * A pair is two channels (x0, x1) of a head, and the rotation is
 *     y0 = x0 cos(theta) - x1 sin(theta)        y1 = x1 cos(theta) + x0 sin(theta).
 * The derivatives, with g = dL/dy:
 *     dL/dx = the inverse rotation of g,        dL/dtheta = g1 y0 - g0 y1 = x0 gx1 - x1 gx0.
 *
 * Which channels: channels [rotary_offset, rotary_offset + 2 * pairs) of each head are rotated, the others
 * copied. They are cut into blocks of `block` channels and a pair takes one channel from each half of its
 * block: 2 is the interleaved layout (2i, 2i + 1), 2 * pairs is the half-split layout (i, i + pairs).
 *
 * Which rows: the leading dims are split in two kinds. Token dims are those along which the angles change,
 * repeat dims those along which they are shared (batch entries, or q and k of a packed projection), so that
 * one table of cos and sin serves all repeats.
 *
 * Nothing here knows torch or Python. All strides are in elements and may be any int64 value. */
#ifndef ROPE_H
#define ROPE_H

#if defined(__CUDACC_RTC__) /* has no headers */
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

#define ROPE_MAX_DIMS 16

typedef enum {
    ROPE_F32,
    ROPE_F64,
    ROPE_F16,
    ROPE_BF16, /* the four above are embedding types; they index the kernel tables */
    ROPE_U8,
    ROPE_I8,
    ROPE_I16,
    ROPE_U16,
    ROPE_I32,
    ROPE_U32,
    ROPE_I64,
    ROPE_U64,
    ROPE_UNSUPPORTED
} rope_dtype;

#define ROPE_EMBEDDING_DTYPES 4

/* A tensor as the loops see it. data == NULL: absent. */
typedef struct {
    void *data;
    int64_t token[ROPE_MAX_DIMS];
    int64_t repeat[ROPE_MAX_DIMS];
    int64_t head, channel;
} rope_tensor;

/* A small operand (positions, frequencies, angles or a gradient of one). */
typedef struct {
    void *data;
    rope_dtype dtype;
    int64_t token[ROPE_MAX_DIMS];
    int64_t axis, head, pair;
} rope_operand;

typedef struct {
    rope_dtype dtype; /* of x, y and saved */
    int token_dims, repeat_dims;
    int64_t token_size[ROPE_MAX_DIMS], repeat_size[ROPE_MAX_DIMS];
    int64_t heads, head_dim, pairs, rotary_offset, block;
    int inverse; /* rotate by -theta */

    rope_tensor x; /* read */
    rope_tensor y; /* written: the rotation of x. May be x itself */

    int64_t axes, freq_heads; /* freq_heads is `heads` or 1 */
    rope_operand positions;   /* token, axis. Absent: freqs holds angles, and axes is 1 */
    rope_operand freqs;       /* axis, head, pair; with token strides only where it holds angles */

    /* Backward only: x is dL/dy, y is dL/dx, and `inverse` is that of this rotation, not of the forward. */
    rope_tensor saved; /* the output of the forward, or its input */
    int saved_is_input;
    rope_operand grad_positions;
    rope_operand grad_freqs;
} rope_args;

#if !defined(__CUDACC__) /* device code needs no more */

typedef void rope_task(int64_t begin, int64_t end, void *context);

/* Runs task over [0, count) in pieces of at least `grain`, possibly in parallel; returns 0 on success. */
typedef int rope_parallel_for(int64_t count, int64_t grain, rope_task *task, void *context);

/* Returns NULL, or what went wrong (a static string): then outputs are not all written. */
const char *rope_cpu_run(const rope_args *args, rope_parallel_for *parallel_for);

/* Writes angles [tokens, freq_heads, pairs] to `angles` from args->positions and args->freqs, the latter with
 * `groups` frequency groups `group_stride` apart that are summed. Only the token dims of args are used. */
const char *rope_cpu_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                            rope_parallel_for *parallel_for);

/* What a call on a CUDA device needs of whoever holds the tensors. */
typedef struct {
    int device;
    void *stream;
    /* Memory of the device, for as long as the call's work is under way on its stream; NULL where there is none */
    void *(*allocate)(size_t bytes, void *context);
    void *context;
} rope_cuda_call;

/* As rope_cpu_run and rope_cpu_angles, on the device, not waited for. An error is told until the thread's next. */
const char *rope_cuda_run(const rope_args *args, const rope_cuda_call *call);
const char *rope_cuda_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                             const rope_cuda_call *call);
const char *rope_cuda_zero(void *data, size_t bytes, const rope_cuda_call *call);

/* What this binary has for CUDA: "sm_80 ... compute_80", "source, compiled at first use" or NULL. */
const char *rope_cuda_built(void);
/* Makes the kernels of a device ready; NULL, or why there are none. */
const char *rope_cuda_prepare(int device);
/* Where NVRTC is, for a binary that holds source. */
void rope_cuda_use_nvrtc(const char *path);
/* For tests: this library in place of the driver, with all devices unprepared; NULL: the driver again. */
void rope_cuda_use_driver(const char *path);

/* Instruction sets in this binary, best first; NULL past the end. */
const char *rope_cpu_isa(int index, int *usable);
const char *rope_cpu_active_isa(void);
int rope_cpu_force_isa(const char *name); /* NULL: choose again. Returns 0, or -1 where it can't be used */

/* Results of so many bytes are written past the caches, where cpu/stream.c allows it; -1: choose again. */
void rope_cpu_stream_from(int64_t bytes);

#endif /* not CUDA */

#endif
