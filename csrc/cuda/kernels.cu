/* The CUDA kernels: device code alone, in what C and CUDA have in common, so that tests/cuda_emulation can compile it
 * with a C compiler. Launched by run.c.
 *
 *   turns.h                   angles, the same text as on the CPU: with fused operations only where written, the bits
 *                             of an angle within the fast path are those of the CPU
 *   rows.inc.h                rotating rows, once for each embedding type and layout
 *
 * Compile with --fmad=false. */
#include "elements.h"
#include "plan.h"

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
ROPE_INLINE uint64_t bits_f64(double a) { return rope_f64_to_bits(a); }
ROPE_INLINE float from_bits_f32(uint32_t a) { return rope_bits_to_f32(a); }
ROPE_INLINE double from_bits_f64(uint64_t a) { return rope_bits_to_f64(a); }

#include "turns.h"

typedef struct {
    int64_t x, y, saved;
} rope_offsets;

ROPE_INLINE rope_offsets rope_offsets_of(int dims, const int64_t *size, const int64_t *x, const int64_t *y,
                                         const int64_t *saved, uint32_t index) {
    rope_offsets at = {0, 0, 0};
    ROPE_ROLLED
    for (int d = dims - 1; d >= 0; d--) {
        const uint32_t rest = d == 0 ? 0 : index / (uint32_t)size[d];
        const int64_t i = d == 0 ? index : index - rest * (uint32_t)size[d];
        at.x += i * x[d];
        at.y += i * y[d];
        at.saved += i * saved[d];
        index = rest;
    }
    return at;
}

ROPE_INLINE int64_t rope_operand_offset(const rope_args *args, const rope_operand *operand, uint32_t token) {
    int64_t at = 0;
    ROPE_ROLLED
    for (int d = args->token_dims - 1; d >= 0; d--) {
        const uint32_t rest = d == 0 ? 0 : token / (uint32_t)args->token_size[d];
        at += (d == 0 ? token : token - rest * (uint32_t)args->token_size[d]) * operand->token[d];
        token = rest;
    }
    return at;
}

#define ROPE_INFINITY ((double)rope_bits_to_f32(0x7f800000))
#define ROPE_NAN ((double)rope_bits_to_f32(0x7fc00000))

/* 1/pi, its bits behind the point, after six words of zeros: for exponents up to those of a product of doubles. */
static __device__ const uint32_t rope_inverse_pi[] = {
    0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x517cc1b7, 0x27220a94, 0xfe13abe8,
    0xfa9a6ee0, 0x6db14acc, 0x9e21c820, 0xff28b1d5, 0xef5de2b0, 0xdb92371d, 0x2126e970, 0x03249775, 0x04e8c90e,
    0x7f0ef58e, 0x5894d39f, 0x74411afa, 0x975da242, 0x74ce3813, 0x5a2fbf20, 0x9cc8eb1c, 0xc1a99cfa, 0x4e422fc5,
    0xdefc941d, 0x8ffc4bff, 0xef02cc07, 0xf79788c5, 0xad05368f, 0xb69b3f67, 0x93e584db, 0xa7a31fb3, 0x4f2ff516,
    0xba93dd63, 0xf5f2f8bd, 0x9e839cfb, 0xc5294975, 0x35fdafd8, 0x8fc6ae84, 0x2b019823, 0x7e3db5d5, 0xf867de10,
    0x4d7a1b0e, 0xd4f1c8b0, 0xaf730d84, 0x32ccc2af, 0x8a503420, 0x46ffec40, 0x26b99398, 0x83030aab, 0x6539d464,
    0xb0713de0, 0x4635a3e2, 0x0ce1b3e6, 0xee740495, 0x41ace23b, 0x45cb0e53, 0x6ed7a268, 0xab8c829f, 0x52ff8382,
    0x9fbf19f4, 0x19616f27, 0xcc193edd, 0xe19e9377, 0xb58f2f7c, 0x4f9d0f9a, 0xe5793f8e, 0xc3f890c8, 0x3e3e1235,
    0x7d376abb, 0x9698219d,
};

/* One element of a small operand. Calls, as each is a choice among all dtypes that need not stand in every kernel
 * several times. */
typedef struct {
    double high, low;
} rope_number;

static __device__ __noinline__ rope_number rope_read_operand(const void *data, rope_dtype dtype, int64_t index) {
    rope_number number;
    number.high = rope_read(data, dtype, index, &number.low);
    return number;
}

static __device__ __noinline__ void rope_write_operand(void *data, rope_dtype dtype, int64_t index, double value) {
    rope_write(data, dtype, index, value);
}

typedef struct {
    uint32_t word[6];
} rope_bits_192;

/* Modulo 2^192. */
ROPE_INLINE void rope_multiply(rope_bits_192 *a, uint64_t by) {
    const uint64_t low = (uint32_t)by, high = by >> 32;
    rope_bits_192 product;
    uint64_t carry = 0;
    ROPE_UNROLLED
    for (int k = 0; k < 6; k++) {
        carry += a->word[k] * low;
        product.word[k] = (uint32_t)carry;
        carry >>= 32;
    }
    carry = 0;
    ROPE_UNROLLED
    for (int k = 1; k < 6; k++) {
        carry += a->word[k - 1] * high + product.word[k];
        product.word[k] = (uint32_t)carry;
        carry >>= 32;
    }
    *a = product;
}

ROPE_INLINE uint64_t rope_mantissa(uint64_t bits, int *exponent) {
    const int e = (int)(bits >> 52 & 0x7ff);
    *exponent += (e ? e : 1) - 1075;
    return (bits & 0xfffffffffffffu) | (uint64_t)(e != 0) << 52;
}

/* p * f / pi in units of 2^-63, modulo two half turns: exact but for the last unit, for all finite p and f. The
 * product of their mantissas is an integer below 2^106, so of 1/pi only the bits count that its multiples move to
 * between 2^-171 and 2^0 half turns: those above make whole turns, and those below less than a unit. */
static __device__ __noinline__ uint64_t rope_fixed_turns(double p, double f) {
    const uint64_t p_bits = rope_f64_to_bits(p), f_bits = rope_f64_to_bits(f);
    int exponent = 0;
    const uint64_t p_mantissa = rope_mantissa(p_bits, &exponent), f_mantissa = rope_mantissa(f_bits, &exponent);
    const int last = exponent + 63 + 108; /* bits of 1/pi that are needed */
    if (last < 1 || p_mantissa == 0 || f_mantissa == 0) return 0;
    rope_bits_192 turns;
    const uint32_t *const words = rope_inverse_pi + (last - 32 + 192) / 32;
    const int shift = (last - 32 + 192) % 32;
    ROPE_UNROLLED
    for (int k = 0; k < 6; k++)
        turns.word[k] = (uint32_t)(((uint64_t)words[-k] << 32 | words[1 - k]) >> (32 - shift));
    rope_multiply(&turns, p_mantissa);
    rope_multiply(&turns, f_mantissa);
    const uint64_t fixed =
        (uint64_t)turns.word[3] >> 12 | (uint64_t)turns.word[4] << 20 | (uint64_t)turns.word[5] << 52;
    return (p_bits ^ f_bits) >> 63 ? 0 - fixed : fixed;
}

/* An angle too large, or of too many bits, for the fast path, in the same units. */
typedef struct {
    uint64_t turns;
    int finite;
} rope_fixed;

ROPE_INLINE rope_fixed rope_fixed_angle(const rope_args *args, uint32_t token, uint32_t head, uint32_t pair) {
    const rope_operand *positions = &args->positions, *freqs = &args->freqs;
    const int given = positions->data == 0;
    const int64_t position_at = given ? 0 : rope_operand_offset(args, positions, token);
    const int64_t freq_at =
        head * freqs->head + pair * freqs->pair + (given ? rope_operand_offset(args, freqs, token) : 0);
    rope_fixed angle = {0, 1};
    ROPE_ROLLED
    for (int64_t a = 0; a < args->axes; a++) {
        const double f = rope_read_operand(freqs->data, freqs->dtype, freq_at + a * freqs->axis).high;
        rope_number p = {1, 0};
        if (!given) p = rope_read_operand(positions->data, positions->dtype, position_at + a * positions->axis);
        if (fabs(p.high) == ROPE_INFINITY || fabs(f) == ROPE_INFINITY || p.high != p.high || f != f) angle.finite = 0;
        for (; p.high != 0; p.high = p.low, p.low = 0)
            angle.turns += rope_fixed_turns(p.high, f);
    }
    return angle;
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
    to[0] = rope_bits_to_f64(v.x | (uint64_t)v.y << 32), to[1] = rope_bits_to_f64(v.z | (uint64_t)v.w << 32);
}
ROPE_INLINE uint4 vector_store_f64(const double *from) {
    const uint64_t a = rope_f64_to_bits(from[0]), b = rope_f64_to_bits(from[1]);
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
#define ROPE_KERNEL(blocks) extern "C" __global__ __launch_bounds__(ROPE_CUDA_THREADS, blocks) void
#define ROPE_BLOCK_MEMORY(name) extern __shared__ uint4 name[]
#endif

/* Gradients from the sums of all pieces of work, in their order. Lane l of `lanes` takes parts l, l + lanes, ... */
ROPE_KERNEL(1) rope_sum(const __grid_constant__ rope_cuda_sum plan) {
    ROPE_BLOCK_MEMORY(memory);
    double *const totals = (double *)memory;
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x, apart = threads / plan.lanes;
    const int column = thread % apart, lane = thread / apart; /* neighbors read neighboring sums */
    for (int64_t first = (int64_t)blockIdx.x * apart; first < plan.count; first += (int64_t)gridDim.x * apart) {
        const int64_t i = first + column;
        double total = 0;
        if (i < plan.count)
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
ROPE_KERNEL(1) rope_angles(const __grid_constant__ rope_cuda_angles_plan plan) {
    const rope_args *const args = &plan.args;
    const rope_operand *const positions = &args->positions, *const freqs = &args->freqs;
    const int64_t row = args->freq_heads * args->pairs;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < plan.tokens * row;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t token = i / row, rest = i - token * row, head = rest / args->pairs;
        const int64_t pair = rest - head * args->pairs, from = rope_operand_offset(args, positions, (uint32_t)token);
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
                   rope_operand_offset(args, &plan.angles, (uint32_t)token) + head * plan.angles.head +
                       pair * plan.angles.pair,
                   angle);
    }
}

/* Blocks that fit a multiprocessor together, which bounds the registers of a thread; see docs/cuda.md */
#define ROTATE_BLOCKS (LAYOUT == ROPE_HALVES ? 2 : 3)
#define BACKWARD_BLOCKS 2
#define LAYOUT ROPE_INTERLEAVED
#define LAYOUT_NAME interleaved
#include "types.inc.h"
#define LAYOUT ROPE_HALVES
#define LAYOUT_NAME halves
#include "types.inc.h"
#define LAYOUT ROPE_SCALAR
#define LAYOUT_NAME scalar
#include "types.inc.h"
