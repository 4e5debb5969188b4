/* Vectors of ROPE_BYTES bytes: GCC's vector extensions (GCC >= 9, Clang) carry the arithmetic; here is the
 * little that they can't say. Included once per instruction set.
 *
 * Suffixes f32 and f64 name the arithmetic. W_f32 and W_f64 are the lanes. */
#include "elements.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define W_f32 (ROPE_BYTES / 4)
#define W_f64 (ROPE_BYTES / 8)

#define VECTOR(type, bytes) type __attribute__((vector_size(bytes)))
#define UNALIGNED(type, bytes) type __attribute__((vector_size(bytes), aligned(1), may_alias))

typedef VECTOR(float, ROPE_BYTES) vec_f32;
typedef VECTOR(double, ROPE_BYTES) vec_f64;
typedef VECTOR(int32_t, ROPE_BYTES) int_f32; /* integers as wide as the lanes of vec_f32 */
typedef VECTOR(int64_t, ROPE_BYTES) int_f64;
typedef VECTOR(uint32_t, ROPE_BYTES) uint_f32;
typedef VECTOR(uint16_t, ROPE_BYTES / 2) half_bits;
typedef UNALIGNED(float, ROPE_BYTES) loose_f32;
typedef UNALIGNED(double, ROPE_BYTES) loose_f64;
typedef UNALIGNED(uint16_t, ROPE_BYTES / 2) loose_half;
typedef UNALIGNED(uint32_t, ROPE_BYTES) loose_words;

#if defined(__clang__)
#define SHUFFLE(a, b, ints, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ints, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

#if ROPE_BYTES == 64
#define LANES_SWAP_f32 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define LANES_ZIP_LOW_f32 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LANES_ZIP_HIGH_f32 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LANES_SWAP_f64 1, 0, 3, 2, 5, 4, 7, 6
#define LANES_ZIP_LOW_f64 0, 8, 1, 9, 2, 10, 3, 11
#define LANES_ZIP_HIGH_f64 4, 12, 5, 13, 6, 14, 7, 15
#elif ROPE_BYTES == 32
#define LANES_SWAP_f32 1, 0, 3, 2, 5, 4, 7, 6
#define LANES_ZIP_LOW_f32 0, 8, 1, 9, 2, 10, 3, 11
#define LANES_ZIP_HIGH_f32 4, 12, 5, 13, 6, 14, 7, 15
#define LANES_SWAP_f64 1, 0, 3, 2
#define LANES_ZIP_LOW_f64 0, 4, 1, 5
#define LANES_ZIP_HIGH_f64 2, 6, 3, 7
#else
#define LANES_SWAP_f32 1, 0, 3, 2
#define LANES_ZIP_LOW_f32 0, 4, 1, 5
#define LANES_ZIP_HIGH_f32 2, 6, 3, 7
#define LANES_SWAP_f64 1, 0
#define LANES_ZIP_LOW_f64 0, 2
#define LANES_ZIP_HIGH_f64 1, 3
#endif

/* swap: the two lanes of each pair change places. zip: a0 b0 a1 b1 ... of the lower or upper halves of a and b. */
static inline vec_f32 swap_f32(vec_f32 a) { return SHUFFLE(a, a, int_f32, LANES_SWAP_f32); }
static inline vec_f32 zip_low_f32(vec_f32 a, vec_f32 b) { return SHUFFLE(a, b, int_f32, LANES_ZIP_LOW_f32); }
static inline vec_f32 zip_high_f32(vec_f32 a, vec_f32 b) { return SHUFFLE(a, b, int_f32, LANES_ZIP_HIGH_f32); }
static inline vec_f64 swap_f64(vec_f64 a) { return SHUFFLE(a, a, int_f64, LANES_SWAP_f64); }
static inline vec_f64 zip_low_f64(vec_f64 a, vec_f64 b) { return SHUFFLE(a, b, int_f64, LANES_ZIP_LOW_f64); }
static inline vec_f64 zip_high_f64(vec_f64 a, vec_f64 b) { return SHUFFLE(a, b, int_f64, LANES_ZIP_HIGH_f64); }

/* Makes the compiler hold a value in a register, where it would rather load it again. */
#if ROPE_BYTES >= 32
#define IN_REGISTER(a) __asm__("" : "+v"(a))
#else
#define IN_REGISTER(a) (void)(a)
#endif

/* The sign bit in the second lane of each pair. */
static inline int_f32 odd_sign_f32(void) {
    return (int_f32)zip_low_f32((vec_f32){0}, (vec_f32)((int_f32){0} + INT32_MIN));
}
static inline int_f64 odd_sign_f64(void) {
    return (int_f64)zip_low_f64((vec_f64){0}, (vec_f64)((int_f64){0} + INT64_MIN));
}

/* The difference keeps -0, which a sum with zero would lose. */
static inline vec_f32 splat_f32(float value) { return value - (vec_f32){0}; }
static inline vec_f64 splat_f64(double value) { return value - (vec_f64){0}; }

static inline int_f32 bits_f32(vec_f32 a) { return (int_f32)a; }
static inline int_f64 bits_f64(vec_f64 a) { return (int_f64)a; }
static inline vec_f32 from_bits_f32(int_f32 a) { return (vec_f32)a; }
static inline vec_f64 from_bits_f64(int_f64 a) { return (vec_f64)a; }

/* a * b + c with one rounding, everywhere: the files are compiled with -ffp-contract=off, so that only what is
 * written as fma is fused, and all instruction sets give the same bits. */
static inline vec_f32 fma_f32(vec_f32 a, vec_f32 b, vec_f32 c) {
#if ROPE_BYTES == 64
    return _mm512_fmadd_ps(a, b, c);
#elif ROPE_BYTES == 32
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    vec_f32 sum = c;
    for (int i = 0; i < W_f32; i++)
        sum[i] = fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

static inline vec_f64 fma_f64(vec_f64 a, vec_f64 b, vec_f64 c) {
#if ROPE_BYTES == 64
    return _mm512_fmadd_pd(a, b, c);
#elif ROPE_BYTES == 32
    return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f64(c, a, b);
#else
    vec_f64 sum = c;
    for (int i = 0; i < W_f64; i++)
        sum[i] = fma(a[i], b[i], c[i]);
    return sum;
#endif
}

/* Loads and stores of W_f32 (W_f64) elements of any embedding type; `write_` is for results. */
static inline vec_f32 load_f32(const float *p) { return *(const loose_f32 *)p; }
static inline void store_f32(float *p, vec_f32 a) { *(loose_f32 *)p = a; }
static inline vec_f64 load_f64(const double *p) { return *(const loose_f64 *)p; }
static inline void store_f64(double *p, vec_f64 a) { *(loose_f64 *)p = a; }

/* A vector of results, or of results in half the bytes. With `stream` the caches are passed by: then p must be a
 * multiple of those bytes, and drain_streams comes before other threads read. */
#if ROPE_BYTES >= 32
#define CAN_STREAM 1
#if ROPE_BYTES == 64
#define STREAM_WHOLE(p, a) _mm512_stream_si512(p, (__m512i)(a))
#define STREAM_HALF(p, a) _mm256_stream_si256(p, (__m256i)(a))
#else
#define STREAM_WHOLE(p, a) _mm256_stream_si256(p, (__m256i)(a))
#define STREAM_HALF(p, a) _mm_stream_si128(p, (__m128i)(a))
#endif
static inline void drain_streams(void) { _mm_sfence(); }
#else
#define CAN_STREAM 0
#define STREAM_WHOLE(p, a) *(loose_words *)(p) = (a)
#define STREAM_HALF(p, a) *(loose_half *)(p) = (a)
static inline void drain_streams(void) {}
#endif
static inline void put_whole(void *p, uint_f32 a, int stream) {
    if (stream)
        STREAM_WHOLE(p, a);
    else
        *(loose_words *)p = a;
}
static inline void put_half(void *p, half_bits a, int stream) {
    if (stream)
        STREAM_HALF(p, a);
    else
        *(loose_half *)p = a;
}
static inline void write_f32(float *p, vec_f32 a, int stream) { put_whole(p, (uint_f32)a, stream); }
static inline void write_f64(double *p, vec_f64 a, int stream) { put_whole(p, (uint_f32)a, stream); }

/* Of pairs (cos, sin): the cos of each pair in both of its lanes, and the sin. x86 has loads that do so, which saves
 * the shuffles that the compiler would make of one load. */
#if ROPE_BYTES >= 32
#define LOAD_DOUBLED(R, name, type, instruction)                                                                     \
    static inline vec_##R name##_##R(const type *p) {                                                                \
        vec_##R a;                                                                                                   \
        __asm__(instruction " %1, %0" : "=v"(a) : "m"(*(const loose_##R *)p));                                       \
        return a;                                                                                                    \
    }
LOAD_DOUBLED(f32, load_cos, float, "vmovsldup")
LOAD_DOUBLED(f32, load_sin, float, "vmovshdup")
LOAD_DOUBLED(f64, load_cos, double, "vmovddup")
LOAD_DOUBLED(f64, load_sin, double, "vpermilpd $0xff,")
#else
static inline vec_f32 load_cos_f32(const float *p) { return SHUFFLE(load_f32(p), load_f32(p), int_f32, 0, 0, 2, 2); }
static inline vec_f32 load_sin_f32(const float *p) { return SHUFFLE(load_f32(p), load_f32(p), int_f32, 1, 1, 3, 3); }
static inline vec_f64 load_cos_f64(const double *p) { return SHUFFLE(load_f64(p), load_f64(p), int_f64, 0, 0); }
static inline vec_f64 load_sin_f64(const double *p) { return SHUFFLE(load_f64(p), load_f64(p), int_f64, 1, 1); }
#endif

static inline vec_f32 load_bf16(const uint16_t *p) {
#if ROPE_BYTES == 64
    return (vec_f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16);
#elif ROPE_BYTES == 32
    return (vec_f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p)), 16);
#else
    return (vec_f32)(__builtin_convertvector(*(const loose_half *)p, uint_f32) << 16);
#endif
}

/* To nearest, ties to even, in the upper halves. What is stored comes from arithmetic, so that a NaN is a quiet one:
 * its upper half is a NaN as it is, where rounding could carry into zero. */
static inline uint_f32 round_bf16(vec_f32 a) {
    uint_f32 bits = (uint_f32)a, number = (uint_f32)(a == a);
    return bits + ((0x7fff + ((bits >> 16) & 1)) & number);
}

static inline void write_bf16(uint16_t *p, vec_f32 a, int stream) {
    uint_f32 result = round_bf16(a) >> 16;
#if ROPE_BYTES == 64
    put_half(p, (half_bits)_mm512_cvtepi32_epi16((__m512i)result), stream);
#elif ROPE_BYTES == 32
    __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
    put_half(p, (half_bits)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)), stream);
#else
    put_half(p, __builtin_convertvector(result, half_bits), stream);
#endif
}

/* Two adjacent bfloat16 are one word, and the upper half of a float32 is its bfloat16: W_f32 pairs (a[0], a[1]) come
 * apart and together again without a shuffle. */
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
enum { LOWER_HALF = 0, UPPER_HALF = 1 };
#else
enum { LOWER_HALF = 1, UPPER_HALF = 0 };
#endif
static inline void load_pairs_bf16(const uint16_t *p, vec_f32 *a) {
    uint_f32 words = *(const loose_words *)p;
    a[LOWER_HALF] = (vec_f32)(words << 16);
    a[UPPER_HALF] = (vec_f32)(words & 0xffff0000);
}
static inline void write_pairs_bf16(uint16_t *p, const vec_f32 *a, int stream) {
    put_whole(p, round_bf16(a[LOWER_HALF]) >> 16 | (round_bf16(a[UPPER_HALF]) & 0xffff0000), stream);
}

static inline vec_f32 load_f16(const uint16_t *p) {
#if ROPE_BYTES == 64
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)p));
#elif ROPE_BYTES == 32
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)p));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vec_f32 a;
    for (int i = 0; i < W_f32; i++)
        a[i] = rope_f16_to_f32(p[i]);
    return a;
#endif
}

static inline void write_f16(uint16_t *p, vec_f32 a, int stream) {
#if ROPE_BYTES == 64
    put_half(p, (half_bits)_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), stream);
#elif ROPE_BYTES == 32
    put_half(p, (half_bits)_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), stream);
#elif defined(__aarch64__)
    put_half(p, (half_bits)vcvt_f16_f32(a), stream);
#else
    half_bits result;
    for (int i = 0; i < W_f32; i++)
        result[i] = rope_f32_to_f16(a[i]);
    put_half(p, result, stream);
#endif
}
