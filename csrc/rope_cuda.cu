/* The CUDA kernels: device code alone, in what C and CUDA have in common, so that tests/cuda_emulation can compile it
 * with a C compiler. Launched by rope_cuda.c.
 *
 *   rope_turns.h              angles, the same text as on the CPU: with fused operations only where written, the bits
 *                             of an angle within the fast path are those of the CPU
 *   rope_cuda_rows.inc.h      rotating rows, once for each embedding type and layout
 *
 * Compile with --fmad=false. */
#include "rope_cuda.h"
#include "rope_scalar.h"

#define SIDE_BY_SIDE 1
typedef float vec_f32;
typedef double vec_f64;
typedef uint32_t int_f32;
typedef uint64_t int_f64;

ROPE_INLINE float splat_f32(float a) { return a; }
ROPE_INLINE double splat_f64(double a) { return a; }
ROPE_INLINE float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
ROPE_INLINE double fma_f64(double a, double b, double c) { return fma(a, b, c); }
ROPE_INLINE uint32_t bits_f32(float a) { return rope_f32_to_bits(a); }
ROPE_INLINE float from_bits_f32(uint32_t a) { return rope_bits_to_f32(a); }

ROPE_INLINE uint64_t bits_f64(double a) {
    uint64_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

ROPE_INLINE double from_bits_f64(uint64_t a) {
    double value;
    memcpy(&value, &a, sizeof value);
    return value;
}

#include "rope_turns.h"

/* Of numbers that are not negative. Both 64-bit operands take a call of some 70 instructions. */
ROPE_INLINE int64_t rope_divide(int64_t a, int64_t b) {
    return ((uint64_t)(a | b) >> 32) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

typedef struct {
    int64_t x, y, saved;
} rope_offsets;

ROPE_INLINE rope_offsets rope_offsets_of(int dims, const int64_t *size, const int64_t *x, const int64_t *y,
                                         const int64_t *saved, int64_t index) {
    rope_offsets at = {0, 0, 0};
    for (int d = dims - 1; d >= 0; d--) {
        const int64_t rest = d == 0 ? 0 : rope_divide(index, size[d]), i = d == 0 ? index : index - rest * size[d];
        at.x += i * x[d];
        at.y += i * y[d];
        at.saved += i * saved[d];
        index = rest;
    }
    return at;
}

ROPE_INLINE int64_t rope_operand_offset(const rope_args *args, const rope_operand *operand, int64_t token) {
    return rope_offset(args->token_dims, args->token_size, operand->token, token);
}

typedef struct {
    double c, s;
} rope_cos_sin;

/* Cos and sin of an angle that float32 (and, for float64 embeddings, the fast path) doesn't hold: in float64, and
 * above its limit by the library's functions. */
static __device__ __noinline__ rope_cos_sin rope_wide_cos_sin(const rope_args *args, int64_t token, int64_t head,
                                                              int64_t pair) {
    const rope_operand *positions = &args->positions, *freqs = &args->freqs;
    const int given = positions->data == 0;
    const int64_t position_at = given ? 0 : rope_operand_offset(args, positions, token);
    const int64_t freq_at =
        head * freqs->head + pair * freqs->pair + (given ? rope_operand_offset(args, freqs, token) : 0);
    rope_cos_sin result;
    turn_f64 turn;
    turn_start_f64(&turn);
    double bound = 0, head_sum = 0, tail_sum = 0;
    for (int64_t a = 0; a < args->axes; a++) {
        double p = 1, p_low = 0, f_low, high, low;
        const double f = rope_read(freqs->data, freqs->dtype, freq_at + a * freqs->axis, &f_low);
        if (!given) p = rope_read(positions->data, positions->dtype, position_at + a * positions->axis, &p_low);
        rope_half_turns(f, &high, &low);
        turn_add_f64(&turn, a, p, &p_low, &high, &low);
        rope_unbounded_add(&head_sum, &tail_sum, p, p_low, f);
        bound += fabs(p * f);
    }
    if (bound < ROPE_ANGLE_LIMIT_F64) {
        turn_cos_sin_f64(&turn, args->inverse, &result.c, &result.s);
    } else {
        result.c = rope_unbounded_cos_sin(head_sum, tail_sum, &result.s);
        if (args->inverse) result.s = -result.s;
    }
    return result;
}

/* Half types: one instruction where the device has it. */
#if defined(__CUDA_ARCH__)
ROPE_INLINE float rope_load_f16(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}
#else
ROPE_INLINE float rope_load_f16(uint32_t bits) { return rope_f16_to_f32((uint16_t)bits); }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
ROPE_INLINE uint32_t rope_pack_f16(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
ROPE_INLINE uint32_t rope_pack_bf16(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#else
ROPE_INLINE uint32_t rope_pack_f16(float low, float high) {
    return (uint32_t)rope_f32_to_f16(low) | (uint32_t)rope_f32_to_f16(high) << 16;
}
ROPE_INLINE uint32_t rope_pack_bf16(float low, float high) {
    return (uint32_t)rope_f32_to_bf16(low) | (uint32_t)rope_f32_to_bf16(high) << 16;
}
#endif
ROPE_INLINE float rope_load_bf16(uint32_t bits) { return rope_bits_to_f32(bits << 16); }

/* One element, and the elements of 16 bytes, in the arithmetic of their type. */
ROPE_INLINE float element_load_f32(float a) { return a; }
ROPE_INLINE float element_store_f32(float a) { return a; }
ROPE_INLINE double element_load_f64(double a) { return a; }
ROPE_INLINE double element_store_f64(double a) { return a; }
ROPE_INLINE float element_load_f16(uint16_t a) { return rope_load_f16(a); }
ROPE_INLINE uint16_t element_store_f16(float a) { return (uint16_t)rope_pack_f16(a, 0); }
ROPE_INLINE float element_load_bf16(uint16_t a) { return rope_load_bf16(a); }
ROPE_INLINE uint16_t element_store_bf16(float a) { return (uint16_t)rope_pack_bf16(a, 0); }

ROPE_INLINE void vector_load_f32(uint4 v, float *to) {
    to[0] = rope_bits_to_f32(v.x), to[1] = rope_bits_to_f32(v.y);
    to[2] = rope_bits_to_f32(v.z), to[3] = rope_bits_to_f32(v.w);
}
ROPE_INLINE uint4 vector_store_f32(const float *from) {
    uint4 v;
    v.x = rope_f32_to_bits(from[0]), v.y = rope_f32_to_bits(from[1]);
    v.z = rope_f32_to_bits(from[2]), v.w = rope_f32_to_bits(from[3]);
    return v;
}
ROPE_INLINE void vector_load_f64(uint4 v, double *to) {
    to[0] = from_bits_f64(v.x | (uint64_t)v.y << 32), to[1] = from_bits_f64(v.z | (uint64_t)v.w << 32);
}
ROPE_INLINE uint4 vector_store_f64(const double *from) {
    const uint64_t a = bits_f64(from[0]), b = bits_f64(from[1]);
    uint4 v;
    v.x = (uint32_t)a, v.y = (uint32_t)(a >> 32), v.z = (uint32_t)b, v.w = (uint32_t)(b >> 32);
    return v;
}
#define HALF_VECTORS(E)                                                                                              \
    ROPE_INLINE void vector_load_##E(uint4 v, float *to) {                                                           \
        to[0] = rope_load_##E(v.x & 0xffff), to[1] = rope_load_##E(v.x >> 16);                                       \
        to[2] = rope_load_##E(v.y & 0xffff), to[3] = rope_load_##E(v.y >> 16);                                       \
        to[4] = rope_load_##E(v.z & 0xffff), to[5] = rope_load_##E(v.z >> 16);                                       \
        to[6] = rope_load_##E(v.w & 0xffff), to[7] = rope_load_##E(v.w >> 16);                                       \
    }                                                                                                                \
    ROPE_INLINE uint4 vector_store_##E(const float *from) {                                                          \
        uint4 v;                                                                                                     \
        v.x = rope_pack_##E(from[0], from[1]), v.y = rope_pack_##E(from[2], from[3]);                                \
        v.z = rope_pack_##E(from[4], from[5]), v.w = rope_pack_##E(from[6], from[7]);                                \
        return v;                                                                                                    \
    }
HALF_VECTORS(f16)
HALF_VECTORS(bf16)

/* The memory of a block, as large as the launch says. */
#if defined(__CUDACC__)
#define ROPE_KERNEL extern "C" __global__ __launch_bounds__(ROPE_CUDA_THREADS) void
#define ROPE_BLOCK_MEMORY(name) extern __shared__ uint4 name[]
#endif

/* Gradients from the sums of all pieces of work, in their order. Lane l of `lanes` takes parts l, l + lanes, ... */
ROPE_KERNEL rope_sum(const __grid_constant__ rope_cuda_sum plan) {
    ROPE_BLOCK_MEMORY(memory);
    double *const totals = (double *)memory;
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x, apart = threads / plan.lanes;
    const int column = thread % apart, lane = thread / apart; /* neighbors read neighboring sums */
    for (int64_t first = (int64_t)blockIdx.x * apart; first < plan.count; first += (int64_t)gridDim.x * apart) {
        const int64_t i = first + column;
        double total = 0;
        if (i < plan.count)
#pragma unroll 4
            for (int64_t part = lane; part < plan.parts; part += plan.lanes)
                total += plan.sums[part * plan.count + i];
        totals[thread] = total;
        for (int half = plan.lanes / 2; half > 0; half /= 2) {
            __syncthreads();
            if (lane < half) totals[thread] += totals[thread + half * apart];
        }
        if (lane == 0 && i < plan.count)
            rope_write(plan.out, plan.dtype, rope_offset(plan.dims, plan.size, plan.stride, i),
                       plan.scale * totals[thread]);
        __syncthreads(); /* before the next sums */
    }
}

/* Angles [tokens, freq_heads, pairs], in float64 and rounded once. */
ROPE_KERNEL rope_angles(const __grid_constant__ rope_cuda_angles_plan plan) {
    const rope_args *const args = &plan.args;
    const rope_operand *const positions = &args->positions, *const freqs = &args->freqs;
    const int64_t row = args->freq_heads * args->pairs;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < plan.tokens * row;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t token = rope_divide(i, row), rest = i - token * row, head = rope_divide(rest, args->pairs);
        const int64_t pair = rest - head * args->pairs, from = rope_operand_offset(args, positions, token);
        double angle = 0;
        for (int64_t a = 0; a < args->axes; a++) {
            double f = 0, low;
            for (int64_t g = 0; g < plan.groups; g++)
                f += rope_read(freqs->data, freqs->dtype,
                               a * freqs->axis + g * plan.group_stride + head * freqs->head + pair * freqs->pair,
                               &low);
            const double p = rope_read(positions->data, positions->dtype, from + a * positions->axis, &low);
            angle += p * f + low * f;
        }
        rope_write(plan.angles.data, plan.angles.dtype,
                   rope_operand_offset(args, &plan.angles, token) + head * plan.angles.head + pair * plan.angles.pair,
                   angle);
    }
}

#define LAYOUT ROPE_INTERLEAVED
#define LAYOUT_NAME interleaved
#include "rope_cuda_types.inc.h"
#define LAYOUT ROPE_HALVES
#define LAYOUT_NAME halves
#include "rope_cuda_types.inc.h"
#define LAYOUT ROPE_SCALAR
#define LAYOUT_NAME scalar
#include "rope_cuda_types.inc.h"
