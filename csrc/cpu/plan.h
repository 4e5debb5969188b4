/* What the CPU kernels are run with: made by run.c, read by the kernels of each instruction set. */
#ifndef ROPE_CPU_H
#define ROPE_CPU_H

#include "elements.h"

/* Angles per token are padded to this many entries and one more block, so that two whole vectors stay inside. */
#define ROPE_PAD 16
#define ROPE_REPEATS_TOGETHER 4 /* streams of memory that hardware prefetchers follow */
#define ROPE_LINE 64            /* bytes of a cache line, and of the widest vector */

typedef struct {
    const rope_args *args;
    int64_t tokens, repeats; /* products of the two kinds of leading dims */
    int64_t row, padded;     /* angles per token: freq_heads * pairs, and with padding */
    int64_t chunk;           /* tokens whose tables are in cache together */
    int zipped;              /* their cos and sin in turn, for each pair of lanes; else two arrays */
    int strided;             /* the channels of some tensor are not one element apart */
    int side_by_side;        /* all heads of a token are rotated like one */
    int stream;              /* results are written past the caches */

    /* A unit of work is unit_tokens tokens times unit_repeats repeats; unit number
     * token_unit * repeat_units + repeat_unit. Units depend on sizes alone, never on the threads. */
    int64_t unit_tokens, token_units, unit_repeats, repeat_units;

    /* [axes][padded], zero in the padding; where freqs holds angles, made per token instead */
    float *freqs_f32;
    double *freqs_f64;
    /* The same in half turns per unit, as a sum: [axes][2][padded] */
    float *turns_f32;
    double *turns_f64;
    int freqs_fit_f32;  /* float32 holds every frequency exactly */
    double *freq_bound; /* [axes]: largest |frequency| */

    /* Backward, summed over units in order at the end; NULL where not wanted */
    double *freq_sums;     /* [units][axes][padded] */
    double *position_sums; /* [repeat_units][tokens][axes]; NULL too with one repeat unit */

    int out_of_memory; /* set by a failing task */
} rope_cpu_plan;

/* Whether the results, whole rows with channels one element apart, are to be written past the caches. */
int rope_streams(const rope_cpu_plan *plan);

/* n frequencies (or angles) in radians as half turns, high and low `stride` apart, in both arithmetics. */
static inline void rope_all_half_turns(const double *radians, int64_t n, int64_t stride, double *turns_f64,
                                       float *turns_f32) {
    for (int64_t i = 0; i < n; i++) {
        rope_half_turns(radians[i], turns_f64 + i, turns_f64 + stride + i);
        rope_half_turns_f32(turns_f64[i], turns_f64[stride + i], turns_f32 + i, turns_f32 + stride + i);
    }
}

/* The larger of a bound and |value|; a NaN stays. */
static inline double rope_bound(double bound, double value) {
    return fabs(value) <= bound || bound != bound ? bound : fabs(value);
}

static inline void *rope_align(void *pointer, uintptr_t bytes) {
    return (void *)(((uintptr_t)pointer + bytes - 1) / bytes * bytes);
}

typedef struct {
    const char *name;
    /* Does units [begin, end) for each embedding type; returns 0, or -1 without memory. */
    int (*run[ROPE_EMBEDDING_DTYPES])(const rope_cpu_plan *plan, int64_t begin, int64_t end);
} rope_isa;

extern const rope_isa rope_isa_baseline, rope_isa_avx2, rope_isa_avx512, rope_isa_neon;

#endif
