/* One element at a time: reading and writing any dtype, radians as half turns, offsets. For the small operands; rows
 * go through vectors. Compiles as C and as CUDA, where all functions are for the device. */
#ifndef ROPE_ELEMENTS_H
#define ROPE_ELEMENTS_H

#include "rope.h"

#if defined(__CUDACC__)
#define ROPE_FUNCTION static inline __device__
#define ROPE_INLINE static __device__ __forceinline__
#define ROPE_CONSTANTS const
/* nvcc unrolls loops of unknown length by four, which costs registers where nothing is won */
#define ROPE_ROLLED _Pragma("unroll 1")
#define ROPE_UNROLLED _Pragma("unroll")
#else
#include <math.h>
#include <string.h>
#define ROPE_FUNCTION static inline
#define ROPE_INLINE static inline __attribute__((always_inline))
#define ROPE_CONSTANTS static const
#define ROPE_ROLLED
#define ROPE_UNROLLED
#endif

#define ROPE_ANGLE_LIMIT_F32 0x1p21 /* in radians: what float32 arithmetic on half turns can do */
#define ROPE_ANGLE_LIMIT_F64 0x1p30

typedef float real_f32;
typedef double real_f64;

ROPE_FUNCTION float rope_bits_to_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ROPE_FUNCTION uint32_t rope_f32_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ROPE_FUNCTION double rope_bits_to_f64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ROPE_FUNCTION uint64_t rope_f64_to_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ROPE_FUNCTION float rope_f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = (uint32_t)(half & 0x7fff) << 13;
    if (magnitude >= 0x0f800000) return rope_bits_to_f32(sign | (magnitude + 0x70000000)); /* inf, nan */
    /* 2^112 moves the exponent bias from 15 to 127, and normalizes subnormals on the way */
    return rope_bits_to_f32(sign | rope_f32_to_bits(rope_bits_to_f32(magnitude) * 0x1p112f));
}

ROPE_FUNCTION uint16_t rope_f32_to_f16(float value) {
    uint32_t bits = rope_f32_to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
    if (magnitude < 0x38800000) /* subnormal half: adding 0.5 aligns its last bit with float32's */
        return (uint16_t)(sign | (rope_f32_to_bits(rope_bits_to_f32(magnitude) + 0.5f) - 0x3f000000));
    magnitude += 0x0fff + ((magnitude >> 13) & 1); /* to nearest, ties to even */
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

ROPE_FUNCTION float rope_bf16_to_f32(uint16_t half) { return rope_bits_to_f32((uint32_t)half << 16); }

ROPE_FUNCTION uint16_t rope_f32_to_bf16(float value) {
    uint32_t bits = rope_f32_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* data[index] as a double; *low is what an integer beyond 2^53 loses on the way, else 0. */
ROPE_FUNCTION double rope_read(const void *data, rope_dtype dtype, int64_t index, double *low) {
    *low = 0;
    switch (dtype) {
    case ROPE_F32: return (double)((const float *)data)[index];
    case ROPE_F64: return ((const double *)data)[index];
    case ROPE_F16: return (double)rope_f16_to_f32(((const uint16_t *)data)[index]);
    case ROPE_BF16: return (double)rope_bf16_to_f32(((const uint16_t *)data)[index]);
    case ROPE_U8: return (double)((const uint8_t *)data)[index];
    case ROPE_I8: return (double)((const int8_t *)data)[index];
    case ROPE_I16: return (double)((const int16_t *)data)[index];
    case ROPE_U16: return (double)((const uint16_t *)data)[index];
    case ROPE_I32: return (double)((const int32_t *)data)[index];
    case ROPE_U32: return (double)((const uint32_t *)data)[index];
    case ROPE_I64: {
        int64_t value = ((const int64_t *)data)[index], rest = value % 4096; /* value - rest has 52 bits */
        double high = (double)(value - rest), sum = high + (double)rest;
        *low = (double)rest - (sum - high);
        return sum;
    }
    case ROPE_U64: {
        uint64_t value = ((const uint64_t *)data)[index], rest = value % 4096;
        double high = (double)(value - rest), sum = high + (double)rest;
        *low = (double)rest - (sum - high);
        return sum;
    }
    case ROPE_UNSUPPORTED: break;
    }
    return 0;
}

/* To the neighbor with an odd last bit where float32 doesn't hold the value: rounding that to a half type then gives
 * what rounding the value once would. */
ROPE_FUNCTION float rope_f64_to_odd_f32(double value) {
    const float near = (float)value;
    const uint32_t bits = rope_f32_to_bits(near);
    if ((double)near == value || value != value || bits & 1 || (bits & 0x7fffffff) == 0x7f800000) return near;
    const int too_large = value < 0 ? (double)near < value : (double)near > value;
    return rope_bits_to_f32(too_large ? bits - 1 : bits + 1);
}

ROPE_FUNCTION void rope_write(void *data, rope_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case ROPE_F32: ((float *)data)[index] = (float)value; break;
    case ROPE_F64: ((double *)data)[index] = value; break;
    case ROPE_F16: ((uint16_t *)data)[index] = rope_f32_to_f16(rope_f64_to_odd_f32(value)); break;
    case ROPE_BF16: ((uint16_t *)data)[index] = rope_f32_to_bf16(rope_f64_to_odd_f32(value)); break;
    default: break; /* only floating tensors have gradients */
    }
}

/* A frequency (or angle) in radians as half turns: a sum high + low, in both arithmetics. */
ROPE_FUNCTION void rope_half_turns(double radians, double *high, double *low) {
    *high = radians * 0x1.45f306dc9c883p-2;
    *low = fma(radians, 0x1.45f306dc9c883p-2, -*high) + radians * -0x1.6b01ec5417056p-56;
}

/* That sum in one of them. */
ROPE_FUNCTION void rope_half_turns_f32(double high, double low, float *high_f32, float *low_f32) {
    *high_f32 = (float)high;
    *low_f32 = (float)(high - (double)*high_f32 + low);
}

ROPE_FUNCTION void rope_half_turns_f64(double high, double low, double *high_f64, double *low_f64) {
    *high_f64 = high;
    *low_f64 = low;
}

ROPE_FUNCTION int64_t rope_offset(int dims, const int64_t *size, const int64_t *stride, int64_t index) {
    if (dims == 1) return index * stride[0];
    int64_t offset = 0;
    ROPE_ROLLED
    for (int d = dims - 1; d >= 0 && index != 0; d--) {
        offset += index % size[d] * stride[d];
        index /= size[d];
    }
    return offset;
}

#endif
