/* The CPU backend: picks an instruction set once, cuts a call into units of work, adds up partial gradients. */
#include "elements.h"
#include "plan.h"
#include "sizes.h"

#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char no_memory[] = "out of memory", not_run[] = "torch could not run the kernel in parallel";

static int always(void) { return 1; }

#if defined(__x86_64__)
/* f16c by hand: older compilers have no name for it */
static int has_avx2(void) {
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C) != 0;
}
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* Best first. */
static const struct {
    const rope_isa *isa;
    int (*usable)(void);
} instruction_sets[] = {
#if defined(__x86_64__)
    {&rope_isa_avx512, has_avx512},
    {&rope_isa_avx2, has_avx2},
#endif
#if defined(__aarch64__)
    {&rope_isa_neon, always},
#else
    {&rope_isa_baseline, always},
#endif
};
enum { ISA_COUNT = sizeof instruction_sets / sizeof *instruction_sets };

static const rope_isa *active; /* written once, or by tests */

static const rope_isa *active_isa(void) {
    const rope_isa *isa = __atomic_load_n(&active, __ATOMIC_RELAXED);
    for (int i = 0; !isa; i++)
        if (instruction_sets[i].usable()) isa = instruction_sets[i].isa;
    __atomic_store_n(&active, isa, __ATOMIC_RELAXED);
    return isa;
}

const char *rope_cpu_isa(int index, int *usable) {
    if (index < 0 || index >= ISA_COUNT) return NULL;
    *usable = instruction_sets[index].usable();
    return instruction_sets[index].isa->name;
}

const char *rope_cpu_active_isa(void) { return active_isa()->name; }

int rope_cpu_force_isa(const char *name) {
    const rope_isa *isa = NULL;
    for (int i = 0; name && i < ISA_COUNT; i++)
        if (strcmp(name, instruction_sets[i].isa->name) == 0 && instruction_sets[i].usable())
            isa = instruction_sets[i].isa;
    if (name && !isa) return -1;
    __atomic_store_n(&active, isa, __ATOMIC_RELAXED);
    return 0;
}

/* What the places of rows in memory allow. */
static void look_at_rows(rope_cpu_plan *plan) {
    const rope_args *args = plan->args;
    const int writes = args->y.data != NULL, backward = args->saved.data != NULL;
    const int whole = args->rotary_offset == 0 && 2 * args->pairs == args->head_dim;
    plan->strided =
        args->x.channel != 1 || (writes && args->y.channel != 1) || (backward && args->saved.channel != 1);
    plan->side_by_side = !plan->strided && whole && args->freq_heads == args->heads &&
                         args->x.head == args->head_dim && (!writes || args->y.head == args->head_dim) &&
                         (!backward || args->saved.head == args->head_dim);
    plan->stream = writes && !plan->strided && whole && rope_streams(plan);
}

/* Chooses chunks and units from sizes alone. Tables of 64 KiB wait in a second-level cache, so that rows are read and
 * written in long stretches: float32 rotations of 16 MiB take 1.3 to 1.7 times a memcpy for 4 to 64 repeats, where
 * with the tables of one token, or of as many as fit a first-level cache, they take 1.7 to 2.8 times. */
static void cut(rope_cpu_plan *plan) {
    const rope_args *args = plan->args;
    const int backward = args->saved.data != NULL;
    plan->tokens = product(args->token_dims, args->token_size);
    plan->repeats = product(args->repeat_dims, args->repeat_size);
    plan->zipped = args->block == 2 && args->dtype != ROPE_BF16;
    plan->row = args->freq_heads * args->pairs;
    plan->padded = pieces(plan->row, ROPE_PAD) * ROPE_PAD + ROPE_PAD;

    const int64_t table = (1 + backward) * 2 * plan->padded * (args->dtype == ROPE_F64 ? 8 : 4);
    plan->chunk = larger(smaller(smaller(plan->tokens, 64), 65536 / table), 1);
    plan->unit_tokens = plan->chunk;
    /* a backward unit has sums of its own, so there are at most about 128 */
    if (backward) plan->unit_tokens *= pieces(plan->tokens, 128 * plan->chunk);
    plan->token_units = pieces(plan->tokens, larger(plan->unit_tokens, 1));

    /* few tokens and many repeats: cut those too, though each unit then makes the tables again */
    plan->repeat_units = 1;
    if (plan->token_units < 64 && !(backward && !args->positions.data))
        plan->repeat_units = larger(smaller(plan->repeats / 8, 64 / larger(plan->token_units, 1)), 1);
    plan->unit_repeats = pieces(plan->repeats, plan->repeat_units);
    look_at_rows(plan);
}

/* Frequencies as [axes][padded], in both arithmetics. */
static void read_freqs(rope_cpu_plan *plan) {
    const rope_args *args = plan->args;
    const rope_operand *freqs = &args->freqs;
    plan->freqs_fit_f32 = freqs->dtype != ROPE_F64;
    for (int64_t a = 0; a < args->axes; a++) {
        double bound = 0;
        for (int64_t h = 0; h < args->freq_heads; h++)
            for (int64_t i = 0; i < args->pairs; i++) {
                double low, f = rope_read(freqs->data, freqs->dtype,
                                          a * freqs->axis + h * freqs->head + i * freqs->pair, &low);
                plan->freqs_f64[a * plan->padded + h * args->pairs + i] = f;
                plan->freqs_f32[a * plan->padded + h * args->pairs + i] = (float)f;
                bound = rope_bound(bound, f);
            }
        plan->freq_bound[a] = bound;
        rope_all_half_turns(plan->freqs_f64 + a * plan->padded, plan->row, plan->padded,
                            plan->turns_f64 + 2 * a * plan->padded, plan->turns_f32 + 2 * a * plan->padded);
    }
}

static void run_units(int64_t begin, int64_t end, void *context) {
    rope_cpu_plan *plan = context;
    if (active_isa()->run[plan->args->dtype](plan, begin, end) != 0)
        __atomic_store_n(&plan->out_of_memory, 1, __ATOMIC_RELAXED);
}

static void add_up(const rope_cpu_plan *plan) {
    const rope_args *args = plan->args;
    const int64_t units = plan->token_units * plan->repeat_units, axes = args->axes, padded = plan->padded;
    const rope_operand *freqs = &args->grad_freqs, *positions = &args->grad_positions;
    if (plan->freq_sums) {
        for (int64_t unit = 1; unit < units; unit++)
            for (int64_t i = 0; i < axes * padded; i++)
                plan->freq_sums[i] += plan->freq_sums[unit * axes * padded + i];
        for (int64_t a = 0; a < axes; a++)
            for (int64_t h = 0; h < args->freq_heads; h++)
                for (int64_t i = 0; i < args->pairs; i++)
                    rope_write(freqs->data, freqs->dtype, a * freqs->axis + h * freqs->head + i * freqs->pair,
                               plan->freq_sums[a * padded + h * args->pairs + i]);
    }
    if (plan->position_sums)
        for (int64_t token = 0; token < plan->tokens; token++)
            for (int64_t a = 0; a < axes; a++) {
                double sum = 0;
                for (int64_t unit = 0; unit < plan->repeat_units; unit++)
                    sum += plan->position_sums[(unit * plan->tokens + token) * axes + a];
                rope_write(positions->data, positions->dtype,
                           rope_offset(args->token_dims, args->token_size, positions->token, token) +
                               a * positions->axis,
                           sum);
            }
}

const char *rope_cpu_run(const rope_args *args, rope_parallel_for *parallel_for) {
    rope_cpu_plan plan = {.args = args};
    cut(&plan);
    const int64_t units = plan.token_units * plan.repeat_units;

    const int positions_given = args->positions.data != NULL;
    const size_t operands = positions_given ? (size_t)(args->axes * plan.padded) : 0;
    const size_t freq_sums = positions_given && args->grad_freqs.data ? operands * (size_t)larger(units, 1) : 0;
    const size_t position_sums = args->grad_positions.data && plan.repeat_units > 1
                                     ? (size_t)(plan.repeat_units * plan.tokens * args->axes)
                                     : 0;
    /* in doubles: frequencies in float64 (1 + 2 arrays) and float32, bounds, sums */
    void *memory = calloc(3 * operands + 3 * operands / 2 + freq_sums + position_sums + (size_t)args->axes +
                              ROPE_LINE / sizeof(double),
                          sizeof(double));
    if (!memory) return no_memory;
    double *next = rope_align(memory, ROPE_LINE);
    if (positions_given) {
        plan.freqs_f64 = next;
        plan.turns_f64 = next + operands;
        plan.freqs_f32 = (float *)(next + 3 * operands);
        plan.turns_f32 = plan.freqs_f32 + operands;
        plan.freq_bound = next + 3 * operands + 3 * operands / 2;
        read_freqs(&plan);
        next = plan.freq_bound + args->axes;
    }
    if (freq_sums) plan.freq_sums = next;
    if (position_sums) plan.position_sums = next + freq_sums;

    /* a piece below some 10 us of work costs more to hand over than to do */
    const double work_per_token =
        (double)plan.unit_repeats * (double)args->heads * (double)args->head_dim + 8 * (double)plan.row;
    const double grain = 32768 / ((double)plan.unit_tokens * work_per_token + 1);
    const int failed = parallel_for(units, larger((int64_t)grain, 1), run_units, &plan);
    if (!failed && !plan.out_of_memory) add_up(&plan);
    free(memory);
    return failed ? not_run : plan.out_of_memory ? no_memory : NULL;
}

typedef struct {
    const rope_args *args;
    const rope_operand *angles;
    const double *freqs; /* [axes][heads][pairs], summed over groups */
} angles_context;

static void run_angles(int64_t begin, int64_t end, void *context) {
    const angles_context *work = context;
    const rope_args *args = work->args;
    const rope_operand *positions = &args->positions, *angles = work->angles;
    const int64_t row = args->freq_heads * args->pairs;
    for (int64_t token = begin; token < end; token++) {
        const int64_t from = rope_offset(args->token_dims, args->token_size, positions->token, token);
        const int64_t to = rope_offset(args->token_dims, args->token_size, angles->token, token);
        for (int64_t h = 0; h < args->freq_heads; h++)
            for (int64_t i = 0; i < args->pairs; i++) {
                double sum = 0;
                for (int64_t a = 0; a < args->axes; a++) {
                    double low, p = rope_read(positions->data, positions->dtype, from + a * positions->axis, &low);
                    const double f = work->freqs[a * row + h * args->pairs + i];
                    sum += p * f + low * f;
                }
                rope_write(angles->data, angles->dtype, to + h * angles->head + i * angles->pair, sum);
            }
    }
}

const char *rope_cpu_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                            rope_parallel_for *parallel_for) {
    const int64_t row = args->freq_heads * args->pairs;
    const rope_operand *from = &args->freqs;
    double *freqs = calloc((size_t)(args->axes * row) + 1, sizeof(double));
    if (!freqs) return no_memory;
    for (int64_t a = 0; a < args->axes; a++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t h = 0; h < args->freq_heads; h++)
                for (int64_t i = 0; i < args->pairs; i++) {
                    double low;
                    freqs[a * row + h * args->pairs + i] +=
                        rope_read(from->data, from->dtype,
                                  a * from->axis + g * group_stride + h * from->head + i * from->pair, &low);
                }
    angles_context work = {args, angles, freqs};
    const int64_t tokens = product(args->token_dims, args->token_size);
    const int failed = parallel_for(tokens, larger(4096 / (row * args->axes + 1), 1), run_angles, &work);
    free(freqs);
    return failed ? not_run : NULL;
}
