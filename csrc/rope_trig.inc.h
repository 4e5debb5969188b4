/* Cos and sin of all angles of one token, in the arithmetic R (f32 or f64).
 *
 * A product p * f is kept as the rounded product plus the exact rest (fma), a sum of products likewise (Knuth's
 * TwoSum), so that the angle has all its bits before the reduction, the only place where a large angle loses
 * accuracy. The reduction subtracts k * pi / 2 in two pieces (Cody and Waite): the first subtraction is exact
 * while |angle| < ANGLE_LIMIT. The polynomials are minimax on |r| < 1.02 pi / 4. */
#define REAL NAME(real, R)
#define VEC NAME(vec, R)
#define INTS NAME(int, R)
#define W NAME(W, R)
#define FMA NAME(fma, R)
#define SPLAT NAME(splat, R)
#define LOAD NAME(load, R)
#define STORE NAME(store, R)
#define SIGN_BIT (sizeof(REAL) * 8 - 1)

/* freqs: [axes][stride]. Writes n entries, rounded up to whole vectors: cos and sin in turn where `zipped`, else
 * the cos and, `stride` further on, the sin. `flip` negates the sin. */
static void NAME(fill_table, R)(const REAL *freqs, int64_t stride, int64_t axes, const REAL *position,
                                const REAL *position_low, REAL *table, int64_t n, int zipped, int flip) {
    const INTS flipped = ((INTS){0} + flip) << SIGN_BIT;

    for (int64_t i = 0; i < n; i += W) {
        VEC p = SPLAT(position[0]), f = LOAD(freqs + i), head = p * f, tail = FMA(p, f, -head);
        if (position_low) tail += SPLAT(position_low[0]) * f;
        for (int64_t a = 1; a < axes; a++) {
            p = SPLAT(position[a]);
            f = LOAD(freqs + a * stride + i);
            VEC product = p * f, rest = FMA(p, f, -product), sum = head + product, part = sum - head;
            if (position_low) rest += SPLAT(position_low[a]) * f;
            tail += rest + ((head - (sum - part)) + (product - part));
            head = sum;
        }
        VEC shifted = (head + tail) * TWO_OVER_PI + ROUND_MAGIC, k = shifted - ROUND_MAGIC;
        VEC r = FMA(k, SPLAT(-PI_HALF_HIGH), head);
        r += FMA(k, SPLAT(-PI_HALF_LOW), tail);

        VEC z = r * r, s = SPLAT(SIN_TERMS[TERMS - 1]), c = SPLAT(COS_TERMS[TERMS - 1]);
        for (int j = TERMS - 2; j >= 0; j--) {
            s = FMA(s, z, SPLAT(SIN_TERMS[j]));
            c = FMA(c, z, SPLAT(COS_TERMS[j]));
        }
        s = FMA(r * z, s, r);
        c = FMA(z * z, c, FMA(z, SPLAT((REAL)-0.5), SPLAT((REAL)1)));

        /* the low bits of `shifted` are k modulo 4: odd quadrants swap sin and cos, bit 1 gives the signs */
        INTS quadrant = (INTS)shifted, s_bits = (INTS)s, c_bits = (INTS)c;
        INTS exchange = (s_bits ^ c_bits) & -(quadrant & 1);
        c = (VEC)(c_bits ^ exchange ^ (((quadrant + 1) & 2) << (SIGN_BIT - 1)));
        s = (VEC)(s_bits ^ exchange ^ ((quadrant & 2) << (SIGN_BIT - 1)) ^ flipped);
        if (zipped) {
            STORE(table + 2 * i, NAME(zip_low, R)(c, s));
            STORE(table + 2 * i + W, NAME(zip_high, R)(c, s));
        } else {
            STORE(table + i, c);
            STORE(table + stride + i, s);
        }
    }
}

/* Sum of a[i] * b[i] over n entries (whole blocks of 64 bytes), in an order that no vector width changes. */
static REAL NAME(dot, R)(const REAL *a, const REAL *b, int64_t n) {
    enum { LANES = 64 / sizeof(REAL), VECTORS = 64 / ROPE_BYTES };
    VEC sums[VECTORS];
    REAL lanes[LANES];
    for (int v = 0; v < VECTORS; v++) sums[v] = SPLAT(0);
    for (int64_t i = 0; i < n; i += LANES)
        for (int v = 0; v < VECTORS; v++) sums[v] += LOAD(a + i + v * W) * LOAD(b + i + v * W);
    for (int v = 0; v < VECTORS; v++) STORE(lanes + v * W, sums[v]);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
}

/* Fills the table of one token, [2 * padded], and leaves its coordinates in `position`. Which arithmetic the angles
 * take depends on this token alone, so that a batch changes nothing. */
static void NAME(token_table, R)(const rope_plan *plan, int64_t token, const token_scratch *scratch, REAL *position,
                                 REAL *table) {
    const rope_args *args = plan->args;
    const int64_t axes = args->axes, n = plan->row, padded = plan->padded;
    const int zipped = args->block == 2, flip = args->inverse;
    const int fits_f32 = read_token(plan, token, scratch);
    const double bound = scratch->bound[0];
    const double *freqs = plan->freqs_f64 ? plan->freqs_f64 : scratch->angles_f64;

    for (int64_t a = 0; a < axes; a++) position[a] = (REAL)scratch->position[a];
#if R_IS_F32
    const float *freqs_f32 = plan->freqs_f32 ? plan->freqs_f32 : scratch->angles_f32;
    if (fits_f32 && bound < ROPE_ANGLE_LIMIT_F32) {
        fill_table_f32(freqs_f32, padded, axes, position, NULL, table, n, zipped, flip);
        return;
    }
#else
    (void)fits_f32;
    if (bound < ROPE_ANGLE_LIMIT_F64) {
        fill_table_f64(freqs, padded, axes, scratch->position, scratch->position_low, table, n, zipped, flip);
        return;
    }
#endif
    double *wide = scratch->wide;
    if (bound < ROPE_ANGLE_LIMIT_F64)
        fill_table_f64(freqs, padded, axes, scratch->position, scratch->position_low, wide, n, 0, flip);
    else
        fill_table_unbounded(freqs, padded, axes, scratch->position, scratch->position_low, wide, n, flip);
    for (int64_t i = 0; i < n; i++) {
        table[zipped ? 2 * i : i] = (REAL)wide[i];
        table[zipped ? 2 * i + 1 : padded + i] = (REAL)wide[padded + i];
    }
}

#undef REAL
#undef VEC
#undef INTS
#undef W
#undef FMA
#undef SPLAT
#undef LOAD
#undef STORE
#undef SIGN_BIT
