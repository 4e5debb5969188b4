/* Cos and sin of all angles of one token, in the arithmetic R (f32 or f64). */
#define REAL NAME(real, R)
#define VEC NAME(vec, R)
#define W NAME(W, R)
#define SPLAT NAME(splat, R)
#define LOAD NAME(load, R)
#define STORE NAME(store, R)

/* turns: [axes][2][stride], high and low. Writes n entries, rounded up to two vectors: cos and sin in turn where
 * `zipped`, else the cos and, `stride` further on, the sin. `flip` negates the sin. */
static void NAME(fill_table, R)(const REAL *turns, int64_t stride, int64_t axes, const REAL *position,
                                const REAL *position_low, REAL *table, int64_t n, int zipped, int flip) {
    for (int64_t i = 0; i < n; i += SIDE_BY_SIDE * W) {
        NAME(turn, R) turn;
        NAME(turn_start, R)(&turn);
        for (int64_t a = 0; a < axes; a++) {
            const REAL *const at = turns + 2 * a * stride + i;
            VEC high[SIDE_BY_SIDE], low[SIDE_BY_SIDE], rest = SPLAT(position_low ? position_low[a] : 0);
            EACH high[v] = LOAD(at + v * W);
            EACH low[v] = LOAD(at + stride + v * W);
            NAME(turn_add, R)(&turn, a, SPLAT(position[a]), position_low ? &rest : NULL, high, low);
        }
        VEC c[SIDE_BY_SIDE], s[SIDE_BY_SIDE];
        NAME(turn_cos_sin, R)(&turn, flip, c, s);
        if (zipped) {
            EACH STORE(table + 2 * (i + v * W), NAME(zip_low, R)(c[v], s[v]));
            EACH STORE(table + 2 * (i + v * W) + W, NAME(zip_high, R)(c[v], s[v]));
        } else {
            EACH STORE(table + i + v * W, c[v]);
            EACH STORE(table + stride + i + v * W, s[v]);
        }
    }
}

/* Sum of a[i] * b[i] over n entries (whole blocks of 64 bytes), in an order that no vector width changes. */
static REAL NAME(dot, R)(const REAL *a, const REAL *b, int64_t n) {
    enum { LANES = 64 / sizeof(REAL), VECTORS = 64 / ROPE_BYTES };
    VEC sums[VECTORS];
    REAL lanes[LANES];
    for (int v = 0; v < VECTORS; v++)
        sums[v] = SPLAT(0);
    for (int64_t i = 0; i < n; i += LANES)
        for (int v = 0; v < VECTORS; v++)
            sums[v] += LOAD(a + i + v * W) * LOAD(b + i + v * W);
    for (int v = 0; v < VECTORS; v++)
        STORE(lanes + v * W, sums[v]);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            lanes[i] += lanes[i + step];
    return lanes[0];
}

/* Fills the table of one token, [2 * padded], and leaves its coordinates in `position`. Which arithmetic the angles
 * take depends on this token alone, so that a batch changes nothing. */
static void NAME(token_table, R)(const rope_cpu_plan *plan, int64_t token, const token_scratch *scratch,
                                 REAL *position, REAL *table) {
    const rope_args *args = plan->args;
    const int64_t axes = args->axes, n = plan->row, padded = plan->padded;
    const int zipped = plan->zipped, flip = args->inverse;
    const int fits_f32 = read_token(plan, token, scratch);
    const double bound = scratch->bound[0];
    const double *turns_f64 = plan->turns_f64 ? plan->turns_f64 : scratch->turns_f64;

    for (int64_t a = 0; a < axes; a++)
        position[a] = (REAL)scratch->position[a];
#if R_IS_F32
    if (fits_f32 && bound < ROPE_ANGLE_LIMIT_F32) {
        const float *turns_f32 = plan->turns_f32 ? plan->turns_f32 : scratch->turns_f32;
        fill_table_f32(turns_f32, padded, axes, position, NULL, table, n, zipped, flip);
        return;
    }
#else
    (void)fits_f32;
    if (bound < ROPE_ANGLE_LIMIT_F64) {
        fill_table_f64(turns_f64, padded, axes, scratch->position, scratch->position_low, table, n, zipped, flip);
        return;
    }
#endif
    double *wide = scratch->wide;
    if (bound < ROPE_ANGLE_LIMIT_F64)
        fill_table_f64(turns_f64, padded, axes, scratch->position, scratch->position_low, wide, n, 0, flip);
    else
        fill_table_unbounded(plan->freqs_f64 ? plan->freqs_f64 : scratch->angles, padded, axes, scratch->position,
                             scratch->position_low, wide, n, flip);
    for (int64_t i = 0; i < n; i++) {
        table[zipped ? 2 * i : i] = (REAL)wide[i];
        table[zipped ? 2 * i + 1 : padded + i] = (REAL)wide[padded + i];
    }
}

#undef REAL
#undef VEC
#undef W
#undef SPLAT
#undef LOAD
#undef STORE
