/* Sums of the backward: included by rows.inc.h. */

/* dL/dangle of a thread's pairs at a token, where angles are given. */
ROPE_INLINE void N(finish_angles)(const N(piece_of_work) * work, uint32_t token, const REAL *grad) {
    const rope_cuda_plan *const plan = work->plan;
    const rope_args *const args = &plan->args;
    const rope_operand *const out = &args->grad_freqs;
    const uint32_t head = work->block.slots[work->lane].head, pair = work->block.slots[work->lane].pair;
    const int64_t row = args->heads * args->pairs;
    for (int j = 0; j < PAIRS; j++)
        if (plan->angle_sums)
            plan->angle_sums[((int64_t)work->repeat_unit * plan->tokens + token) * row + head * args->pairs + pair +
                             (uint32_t)j] = (double)grad[j];
        else
            rope_write_operand(out->data, out->dtype,
                               rope_operand_offset(args, out, token) + head * out->head +
                                   (pair + (uint32_t)j) * out->pair,
                               (double)grad[j]);
}

/* From dL/dangle of the `local`-th token its dL/dposition, summed over lanes, and a thread's part of dL/dfreqs. All
 * threads of the block come here. */
ROPE_INLINE void N(finish_token)(const N(piece_of_work) * work, uint32_t local, int active, const REAL *grad) {
    const rope_cuda_plan *const plan = work->plan;
    const uint32_t thread = threadIdx.x, threads = blockDim.x, lanes = plan->lanes, axes = work->axes;
    ROPE_ROLLED
    for (uint32_t a = 0; a < axes; a++) {
        const REAL *const turns = work->block.turns + a * 2 * PAIRS * lanes + work->lane;
        if (plan->position_sums) {
            REAL sum = 0;
            for (int j = 0; j < PAIRS; j++)
                sum += turns[j * lanes] * grad[j];
            ROPE_ROLLED
            for (uint32_t step = lanes / 2; step > 0; step /= 2)
                sum += __shfl_down_sync(0xffffffff, sum, step, (int)lanes);
            if (work->lane == 0 && local < work->tokens)
                plan->position_sums[((int64_t)(work->repeat_unit * plan->tiles + work->tile) * plan->tokens +
                                     work->first_token + local) *
                                        axes +
                                    a] = (double)sum;
        }
        if (plan->freq_sums && active)
            for (int j = 0; j < PAIRS; j++)
                work->block.sums[(a * PAIRS + (uint32_t)j) * threads + thread] +=
                    work->block.positions[local * axes + a] * grad[j];
    }
}

/* The sums of a piece of work for dL/dfreqs, over the tokens side by side in the block. */
ROPE_INLINE void N(finish_freqs)(const N(piece_of_work) * work) {
    const rope_cuda_plan *const plan = work->plan;
    const rope_args *const args = &plan->args;
    const uint32_t thread = threadIdx.x, threads = blockDim.x, lanes = plan->lanes, axes = work->axes;
    const int64_t row = args->heads * args->pairs;
    ROPE_ROLLED
    for (uint32_t i = thread; i < axes * PAIRS * lanes; i += threads) {
        const uint32_t of_lane = i & (lanes - 1), rest = i >> plan->lanes_log2;
        const rope_slot *const slot = work->block.slots + of_lane;
        if (slot->pair >= ROPE_COPIED) continue;
        double sum = 0;
        ROPE_ROLLED
        for (uint32_t t = 0; t < plan->token_lanes; t++)
            sum += (double)work->block.sums[rest * threads + t * lanes + of_lane];
        plan->freq_sums[((int64_t)work->units * axes + rest / PAIRS) * row + slot->head * args->pairs + slot->pair +
                        rest % PAIRS] = sum;
    }
}
