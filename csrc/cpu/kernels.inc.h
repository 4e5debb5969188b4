/* The CPU kernels of one instruction set: included by <isa>.c, which defines ROPE_ISA and ROPE_BYTES.
 *
 *   simd.inc.h   vectors, loads and stores
 *   trig.inc.h   cos and sin of the angles of a token, once for float32 and once for float64
 *   rows.inc.h   rotating rows, once for each embedding type
 */
#include "plan.h"
#include "simd.inc.h"
#include "sizes.h"

#define SIDE_BY_SIDE 2 /* an angle is one long chain of dependent operations; two keep the units busy */
#include "turns.h"

#include <stdlib.h>

/* What reading one token needs, allocated by the rows of each type. */
typedef struct {
    double *position, *position_low; /* [axes] */
    double *bound;                   /* [1]: no |angle| of the token is larger */
    double *angles, *turns_f64;      /* where angles are given: [padded], and as half turns [2][padded] */
    float *turns_f32;                /* [2][padded] */
    double *wide;                    /* [2][padded]: cos and sin */
} token_scratch;

/* Reads the coordinates (or the given angles) of a token; true where float32 holds them and the frequencies. */
static int read_token(const rope_cpu_plan *plan, int64_t token, const token_scratch *scratch) {
    const rope_args *args = plan->args;
    const rope_operand *positions = &args->positions, *freqs = &args->freqs;
    int fits_f32 = 1;
    double bound = 0;
    if (positions->data) {
        int64_t base = rope_offset(args->token_dims, args->token_size, positions->token, token);
        for (int64_t a = 0; a < args->axes; a++) {
            double low, p = rope_read(positions->data, positions->dtype, base + a * positions->axis, &low);
            scratch->position[a] = p;
            scratch->position_low[a] = low;
            fits_f32 &= low == 0 && (double)(float)p == p;
            bound += fabs(p) * plan->freq_bound[a];
        }
        fits_f32 &= plan->freqs_fit_f32;
    } else {
        int64_t base = rope_offset(args->token_dims, args->token_size, freqs->token, token);
        for (int64_t h = 0; h < args->freq_heads; h++)
            for (int64_t i = 0; i < args->pairs; i++) {
                double low,
                    angle = rope_read(freqs->data, freqs->dtype, base + h * freqs->head + i * freqs->pair, &low);
                scratch->angles[h * args->pairs + i] = angle;
                bound = rope_bound(bound, angle);
            }
        rope_all_half_turns(scratch->angles, plan->row, plan->padded, scratch->turns_f64, scratch->turns_f32);
        fits_f32 = freqs->dtype != ROPE_F64;
        scratch->position[0] = 1;
        scratch->position_low[0] = 0;
    }
    scratch->bound[0] = bound;
    return fits_f32;
}

/* Plain cos and sin of angles of any size, by the C library's full range reduction. */
static void fill_table_unbounded(const double *freqs, int64_t stride, int64_t axes, const double *position,
                                 const double *position_low, double *table, int64_t n, int flip) {
    for (int64_t i = 0; i < n; i++) {
        double head = 0, tail = 0;
        for (int64_t a = 0; a < axes; a++) {
            double p = position[a], f = freqs[a * stride + i], product = p * f;
            double rest = fma(p, f, -product) + position_low[a] * f;
            double sum = head + product, part = sum - head;
            tail += rest + ((head - (sum - part)) + (product - part));
            head = sum;
        }
        double s0 = sin(head), c0 = cos(head), s1 = sin(tail), c1 = cos(tail), s = s0 * c1 + c0 * s1;
        table[i] = c0 * c1 - s0 * s1;
        table[stride + i] = flip ? -s : s;
    }
}

#define R f64
#define R_IS_F32 0
#include "trig.inc.h"
#undef R
#undef R_IS_F32

#define R f32
#define R_IS_F32 1
#include "trig.inc.h"

/* One head, or all heads of a row where they lie side by side. */
typedef struct {
    int64_t channels, pairs, rotary_offset, block;
} head_shape;

/* What rotating a row is to do: write the result, past the caches, reduce dL/dangle, and whether `saved` is the input
 * for that. */
enum { WRITE = 1, REDUCE = 2, FROM_INPUT = 4, STREAM = 8 };

static inline int64_t repeat_offset(const rope_args *args, const rope_tensor *tensor, int64_t repeat) {
    return rope_offset(args->repeat_dims, args->repeat_size, tensor->repeat, repeat);
}

/* A pointer that is only there for some kinds of work: nothing is added to NULL. */
#define AT(kind, pointer, offset) (work & (kind) ? (pointer) + (offset) : NULL)

#define E f32
#define ELEMENT float
#include "rows.inc.h"
#undef E
#undef ELEMENT

#define E f16
#define ELEMENT uint16_t
#include "rows.inc.h"
#undef E

#define E bf16
#define E_IS_BF16 1
#include "rows.inc.h"
#undef E
#undef E_IS_BF16
#undef ELEMENT
#undef R

#define R f64
#define E f64
#define ELEMENT double
#include "rows.inc.h"

const rope_isa NAME(rope_isa, ROPE_ISA) = {
    ROPE_ISA_NAME,
    {[ROPE_F32] = run_f32, [ROPE_F64] = run_f64, [ROPE_F16] = run_f16, [ROPE_BF16] = run_bf16},
};
