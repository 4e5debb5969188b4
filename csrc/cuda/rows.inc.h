/* Rotating rows of the embedding type E, stored as ELEMENT, in the arithmetic R, for one LAYOUT (plan.h). */
#define REAL NAME(real, R)
#define N(name) NAME(NAME(name, E), LAYOUT_NAME)
#define UNROLL (LAYOUT == ROPE_HALVES ? 2 : 4) /* repeats whose loads are under way together */

enum {
    N(PER_VECTOR) = ROPE_VECTOR / sizeof(ELEMENT),
    N(PAIRS) = LAYOUT == ROPE_INTERLEAVED ? N(PER_VECTOR) / 2
               : LAYOUT == ROPE_HALVES    ? N(PER_VECTOR)
                                          : 1,
};
#define PAIRS N(PAIRS)

#include "pieces.inc.h"

/* A block's memory: what its threads share of slots, frequencies and positions, and its sums. */
typedef struct {
    rope_slot *slots;        /* [lanes] */
    REAL *turns;             /* [axes][high, low][PAIRS][lanes], half turns per unit */
    REAL *positions, *sizes; /* [unit_tokens][axes]; size: |position|, infinite where REAL doesn't hold it */
    REAL *sums;              /* [axes][PAIRS][threads] */
} N(block);

/* Fills a block's memory for `lanes` slots from first_slot on and the tokens from first_token on. */
ROPE_INLINE void N(stage)(const rope_cuda_plan *plan, N(block) block, uint32_t axes, uint32_t first_slot,
                          uint32_t first_token, uint32_t tokens) {
    const rope_args *const args = &plan->args;
    const rope_operand *const freqs = &args->freqs, *const positions = &args->positions;
    const uint32_t thread = threadIdx.x, threads = blockDim.x, lanes = plan->lanes;
    if (thread < lanes) {
        const uint32_t slot = first_slot + thread, head = slot / plan->head_slots;
        const uint32_t place = slot - head * plan->head_slots;
        rope_slot of;
        of.head = head;
        of.pair = slot >= plan->slots ? ROPE_NO_SLOT : place < plan->head_rotated ? place * PAIRS : ROPE_COPIED;
        int64_t channel;
        if (of.pair == ROPE_COPIED) {
            channel = (int64_t)(place - plan->head_rotated) * (LAYOUT == ROPE_SCALAR ? 1 : N(PER_VECTOR));
            if (channel >= args->rotary_offset) channel += 2 * args->pairs;
        } else if (LAYOUT == ROPE_INTERLEAVED) {
            channel = args->rotary_offset + 2 * (int64_t)place * PAIRS;
        } else {
            const uint32_t half = (uint32_t)(args->block / 2), pair = place * PAIRS, blocks = pair / half;
            channel = args->rotary_offset + blocks * args->block + (pair - blocks * half);
        }
        of.x = head * args->x.head + channel * args->x.channel;
        of.y = head * args->y.head + channel * args->y.channel;
        of.saved = head * args->saved.head + channel * args->saved.channel;
        block.slots[thread] = of;
    }
    ROPE_ROLLED
    for (uint32_t i = thread; i < axes * PAIRS * lanes; i += threads) {
        const uint32_t lane = i & (lanes - 1), rest = i >> plan->lanes_log2, a = rest / PAIRS, j = rest % PAIRS;
        const uint32_t slot = first_slot + lane, head = slot / plan->head_slots;
        const uint32_t place = slot - head * plan->head_slots;
        double high = 0, low = 0;
        if (slot < plan->slots && place < plan->head_rotated) {
            const int64_t at = a * freqs->axis + head * freqs->head + (place * PAIRS + j) * freqs->pair;
            rope_half_turns(rope_read_operand(freqs->data, freqs->dtype, at).high, &high, &low);
        }
        REAL *const to = block.turns + (a * 2 * PAIRS + j) * lanes + lane;
        NAME(rope_half_turns, R)(high, low, to, to + PAIRS * lanes);
    }
    const int narrow = sizeof(REAL) == 4 && freqs->dtype == ROPE_F64;
    ROPE_ROLLED
    for (uint32_t i = thread; i < axes * tokens; i += threads) {
        const int64_t at = rope_operand_offset(args, positions, first_token + i / axes);
        const rope_number p = rope_read_operand(positions->data, positions->dtype, at + i % axes * positions->axis);
        const REAL held = (REAL)p.high;
        block.positions[i] = held;
        block.sizes[i] = (REAL)(p.low != 0 || (double)held != p.high || narrow ? ROPE_INFINITY : fabs(p.high));
    }
}

/* Cos and sin of a thread's PAIRS pairs at a token, the `local`-th of the block. */
ROPE_INLINE void N(angles)(const rope_cuda_plan *plan, N(block) block, uint32_t axes, uint32_t lane, uint32_t local,
                           uint32_t token, REAL *c, REAL *s) {
    const rope_args *const args = &plan->args;
    const uint32_t lanes = plan->lanes;
    NAME(turn, R) turns[PAIRS];
    REAL bound[PAIRS];
    for (int j = 0; j < PAIRS; j++) {
        NAME(turn_start, R)(turns + j);
        bound[j] = 0;
    }
    if (axes == 0) { /* given angles */
        const rope_operand *const freqs = &args->freqs;
        const int64_t at = rope_operand_offset(args, freqs, token) + block.slots[lane].head * freqs->head +
                           block.slots[lane].pair * freqs->pair;
        for (int j = 0; j < PAIRS; j++) {
            double high, low;
            REAL first, second;
            rope_half_turns(rope_read_operand(freqs->data, freqs->dtype, at + j * freqs->pair).high, &high, &low);
            NAME(rope_half_turns, R)(high, low, &first, &second);
            NAME(turn_add, R)(turns + j, 0, 1, 0, &first, &second);
            bound[j] = (REAL)(sizeof(REAL) == 4 && freqs->dtype == ROPE_F64 ? ROPE_INFINITY : fabs(high));
        }
    }
    ROPE_ROLLED
    for (uint32_t a = 0; a < axes; a++) {
        const REAL position = block.positions[local * axes + a], size = block.sizes[local * axes + a];
        const REAL *const at = block.turns + a * 2 * PAIRS * lanes + lane;
        for (int j = 0; j < PAIRS; j++) {
            const REAL high = at[j * lanes], low = at[(PAIRS + j) * lanes];
            NAME(turn_add, R)(turns + j, a, position, 0, &high, &low);
            bound[j] += size * (REAL)fabs(high);
        }
    }
    /* in half turns, a little below the limit; false for NaN */
    const REAL limit = (REAL)(0.318 * (sizeof(REAL) == 4 ? ROPE_ANGLE_LIMIT_F32 : ROPE_ANGLE_LIMIT_F64));
    uint32_t beyond = 0;
    for (int j = 0; j < PAIRS; j++) {
        beyond |= (uint32_t)!(bound[j] < limit) << j;
        NAME(turn_cos_sin, R)(turns + j, args->inverse, c + j, s + j);
    }
    ROPE_ROLLED
    for (uint32_t i = 0; beyond >> i; i++) {
        if (!(beyond >> i & 1)) continue;
        const rope_fixed angle = rope_fixed_angle(args, token, block.slots[lane].head, block.slots[lane].pair + i);
        const uint64_t shifted = angle.turns + ((uint64_t)1 << 62), rest = shifted & ~((uint64_t)1 << 63);
        NAME(turn, R) turn;
        REAL of_c, of_s;
        turn.odd[0] = (NAME(int, R))(shifted >> 63);
        turn.rest[0] = angle.finite ? (REAL)((int64_t)rest - ((int64_t)1 << 62)) * (REAL)0x1p-63 : (REAL)ROPE_NAN;
        turn.tail[0] = 0;
        NAME(turn_cos_sin, R)(&turn, args->inverse, &of_c, &of_s);
        ROPE_UNROLLED
        for (uint32_t j = 0; j < PAIRS; j++) /* registers have no index */
            if (j == i) c[j] = of_c, s[j] = of_s;
    }
}

/* Position zero is the identity to the last bit, -0 included: products with sin are made +0 where they vanish (`+ 0`)
 * and then subtracted, as x - (+0) is x for every x. */
ROPE_INLINE void N(rotate_pairs)(const REAL *a0, const REAL *a1, const REAL *c, const REAL *s, REAL *b0, REAL *b1) {
    for (int j = 0; j < PAIRS; j++) {
        b0[j] = a0[j] * c[j] - (a1[j] * s[j] + (REAL)0);
        b1[j] = a1[j] * c[j] - ((REAL)0 - a0[j] * s[j]);
    }
}

/* One piece of work, as the threads of a block see it. */
typedef struct {
    const rope_cuda_plan *plan;
    N(block) block;
    int backward, write;
    uint32_t axes; /* 0: angles are given */
    uint32_t lane, tile, repeat_unit, units;
    uint32_t first_token, tokens, first_repeat, last_repeat;
} N(piece_of_work);

/* Copies a thread's channels of a token, which lie outside of the rotated ones. */
ROPE_INLINE void N(copy_repeats)(const N(piece_of_work) * work, const ELEMENT *x, ELEMENT *y, rope_offsets at) {
    const rope_args *const args = &work->plan->args;
    const rope_slot *const slot = work->block.slots + work->lane;
    ROPE_ROLLED
    for (uint32_t r = work->first_repeat; work->write && r < work->last_repeat; r++) {
        const rope_offsets to = rope_offsets_of(args->repeat_dims, args->repeat_size, args->x.repeat, args->y.repeat,
                                                args->saved.repeat, r);
        *(WORD *)(y + slot->y + at.y + to.y) = *(const WORD *)(x + slot->x + at.x + to.x);
    }
}

/* Rotates a thread's channels of a token in all repeats of the piece of work, and adds their dL/dangle to `grad`. */
ROPE_INLINE void N(rotate_repeats)(const N(piece_of_work) * work, const ELEMENT *x, const ELEMENT *saved, ELEMENT *y,
                                   rope_offsets at, const REAL *c, const REAL *s, REAL *grad) {
    enum { TOGETHER = UNROLL, TOGETHER_BACKWARD = UNROLL / 2 };
    const rope_args *const args = &work->plan->args;
    const rope_slot *const slot = work->block.slots + work->lane;
    const int backward = work->backward, from_input = backward && args->saved_is_input;
    const int64_t half = LAYOUT == ROPE_INTERLEAVED ? 1 : args->block / 2;
    const int inner_dim = args->repeat_dims > 0 ? args->repeat_dims - 1 : 0;
    const uint32_t inner = args->repeat_dims > 0 ? (uint32_t)args->repeat_size[inner_dim] : 1;
    const uint32_t together = backward ? TOGETHER_BACKWARD : TOGETHER, last = work->last_repeat;
    ROPE_ROLLED
    for (uint32_t r = work->first_repeat, count; r < last; r += count) { /* along the innermost repeat dim */
        const uint32_t outer = r / inner, begin = r - outer * inner;
        count = inner - begin < last - r ? inner - begin : last - r;
        const rope_offsets to =
            rope_offsets_of(inner_dim, args->repeat_size, args->x.repeat, args->y.repeat, args->saved.repeat, outer);
        const ELEMENT *from = x + (slot->x + at.x + to.x) + begin * args->x.repeat[inner_dim];
        const ELEMENT *with = saved;
        ELEMENT *into = y;
        if (backward) with += slot->saved + at.saved + to.saved + begin * args->saved.repeat[inner_dim];
        if (work->write) into += slot->y + at.y + to.y + begin * args->y.repeat[inner_dim];
        ROPE_ROLLED
        for (uint32_t i = 0; i < count; i += together) {
            PIECE pieces[TOGETHER], others[TOGETHER];
            ROPE_UNROLLED
            for (uint32_t u = 0; u < together; u++) {
                if (i + u >= count) continue;
                pieces[u] = N(load)(from, half * args->x.channel);
                from += args->x.repeat[inner_dim];
                if (!backward) continue;
                others[u] = N(load)(with, half * args->saved.channel);
                with += args->saved.repeat[inner_dim];
            }
            ROPE_UNROLLED
            for (uint32_t u = 0; u < together; u++) {
                if (i + u >= count) continue;
                REAL a0[PAIRS], a1[PAIRS], b0[PAIRS], b1[PAIRS], w0[PAIRS], w1[PAIRS];
                N(unpack)(pieces[u], a0, a1);
                N(rotate_pairs)(a0, a1, c, s, b0, b1);
                if (backward) {
                    N(unpack)(others[u], w0, w1);
                    for (int j = 0; j < PAIRS; j++) {
                        const REAL g0 = from_input ? b0[j] : a0[j], g1 = from_input ? b1[j] : a1[j];
                        grad[j] += g1 * w0[j] - g0 * w1[j];
                    }
                }
                if (!work->write) continue;
                N(store)(into, half * args->y.channel, N(pack)(b0, b1));
                into += args->y.repeat[inner_dim];
            }
        }
    }
}

#include "sums.inc.h"

ROPE_INLINE void N(run)(const rope_cuda_plan *plan, int backward, uint4 *memory) {
    const rope_args *const args = &plan->args;
    const ELEMENT *const x = (const ELEMENT *)args->x.data, *const saved = (const ELEMENT *)args->saved.data;
    ELEMENT *const y = (ELEMENT *)args->y.data;
    const uint32_t axes = args->positions.data ? (uint32_t)args->axes : 0;
    const uint32_t thread = threadIdx.x, threads = blockDim.x, lanes = plan->lanes;
    const uint32_t lane = thread & (lanes - 1), token_lane = thread >> plan->lanes_log2;
    const REAL sign = args->inverse ? 1 : -1; /* the backward rotates the other way round */
    N(block) block;
    block.slots = (rope_slot *)memory;
    block.turns = (REAL *)(block.slots + lanes);
    block.positions = block.turns + 2 * axes * PAIRS * lanes;
    block.sizes = block.positions + axes * plan->unit_tokens;
    block.sums = block.sizes + axes * plan->unit_tokens;

    ROPE_ROLLED
    for (uint32_t number = blockIdx.x; number < plan->work; number += gridDim.x) {
        N(piece_of_work) work;
        work.plan = plan, work.block = block, work.axes = axes, work.lane = lane;
        work.backward = backward, work.write = !backward || y != 0;
        work.units = number / plan->tiles, work.tile = number - work.units * plan->tiles;
        const uint32_t token_unit = work.units / plan->repeat_units;
        work.repeat_unit = work.units - token_unit * plan->repeat_units;
        work.first_token = token_unit * plan->unit_tokens;
        work.first_repeat = work.repeat_unit * plan->unit_repeats;
        const uint32_t left = plan->tokens - work.first_token, repeats_left = plan->repeats - work.first_repeat;
        work.tokens = left < plan->unit_tokens ? left : plan->unit_tokens;
        work.last_repeat =
            work.first_repeat + (repeats_left < plan->unit_repeats ? repeats_left : plan->unit_repeats);

        __syncthreads(); /* the work before may still be reading */
        N(stage)(plan, block, axes, work.tile * lanes, work.first_token, work.tokens);
        if (backward && plan->freq_sums) ROPE_ROLLED
        for (uint32_t i = 0; i < axes * PAIRS; i++)
            block.sums[i * threads + thread] = 0;
        __syncthreads();

        /* as many turns for every thread: sums over lanes need them all */
        ROPE_ROLLED
        for (uint32_t local = token_lane; local < plan->unit_tokens; local += plan->token_lanes) {
            const uint32_t token = work.first_token + local, pair = block.slots[lane].pair;
            const int active = local < work.tokens && pair != ROPE_NO_SLOT;
            REAL grad[PAIRS];
            for (int j = 0; j < PAIRS; j++)
                grad[j] = 0;
            if (active) {
                const rope_offsets at = rope_offsets_of(args->token_dims, args->token_size, args->x.token,
                                                        args->y.token, args->saved.token, token);
                if (pair == ROPE_COPIED) {
                    N(copy_repeats)(&work, x, y, at);
                } else {
                    REAL c[PAIRS], s[PAIRS];
                    N(angles)(plan, block, axes, lane, local, token, c, s);
                    N(rotate_repeats)(&work, x, saved, y, at, c, s, grad);
                }
            }
            if (!backward) continue;
            for (int j = 0; j < PAIRS; j++)
                grad[j] *= sign;
            if (axes)
                N(finish_token)(&work, local, active, grad);
            else if (active && pair != ROPE_COPIED)
                N(finish_angles)(&work, token, grad);
        }
        if (backward && plan->freq_sums) {
            __syncthreads();
            N(finish_freqs)(&work);
        }
    }
}

ROPE_KERNEL(ROTATE_BLOCKS) N(rope_rotate)(const __grid_constant__ rope_cuda_plan plan) {
    ROPE_BLOCK_MEMORY(memory);
    N(run)(&plan, 0, memory);
}

ROPE_KERNEL(BACKWARD_BLOCKS) N(rope_backward)(const __grid_constant__ rope_cuda_plan plan) {
    ROPE_BLOCK_MEMORY(memory);
    N(run)(&plan, 1, memory);
}

#undef REAL
#undef N
#undef UNROLL
#undef PAIRS
#undef WORD
#undef PIECE
