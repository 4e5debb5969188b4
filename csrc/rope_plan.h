/* How one call is cut into pieces. Made by rope_cpu.c, read by the kernels of each instruction set. */
#ifndef ROPE_PLAN_H
#define ROPE_PLAN_H

#include "rope.h"

/* Angles per token are padded to this many entries and one more block, so that whole vectors stay inside. */
#define ROPE_PAD 16
#define ROPE_ANGLE_LIMIT_F32 0x1p21
#define ROPE_ANGLE_LIMIT_F64 0x1p30

typedef struct {
    const rope_args *args;
    int64_t tokens, repeats; /* products of the two kinds of leading dims */
    int64_t row, padded;     /* angles per token: freq_heads * pairs, and with padding */
    int64_t chunk;           /* tokens whose tables are in cache together */

    /* A unit of work is unit_tokens tokens times unit_repeats repeats; unit number
     * token_unit * repeat_units + repeat_unit. Units depend on sizes alone, never on the threads. */
    int64_t unit_tokens, token_units, unit_repeats, repeat_units;

    /* [axes][padded], zero in the padding; where freqs holds angles, made per token instead */
    float *freqs_f32;
    double *freqs_f64;
    int freqs_fit_f32;       /* float32 holds every frequency exactly */
    double *freq_bound;      /* [axes]: largest |frequency| */

    /* Backward, summed over units in order at the end; NULL where not wanted */
    double *freq_sums;       /* [units][axes][padded] */
    double *position_sums;   /* [repeat_units][tokens][axes]; NULL too with one repeat unit */

    int out_of_memory;       /* set by a failing task */
} rope_plan;

typedef struct {
    const char *name;
    /* Does units [begin, end) for each embedding type; returns 0, or -1 without memory. */
    int (*run[ROPE_EMBEDDING_DTYPES])(const rope_plan *plan, int64_t begin, int64_t end);
} rope_isa;

extern const rope_isa rope_isa_baseline, rope_isa_avx2, rope_isa_avx512, rope_isa_neon;

#endif
