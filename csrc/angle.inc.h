/* An angle, axis by axis, and then its cos and sin, in the arithmetic R (f32 or f64): SIDE_BY_SIDE values of type
 * VEC, which are vectors of angles on the CPU and single angles in CUDA.
 *
 * Frequencies come in half turns per unit, as a sum high + low of two reals. p * high is kept as the rounded product
 * plus the exact rest (fma); taking whole half turns off the product is exact, so an angle loses nothing to range
 * reduction while it is below ROPE_ANGLE_LIMIT. The polynomials, in half turns from -1/2 to 1/2, are minimax. */
#define VEC NAME(vec, R)
#define INTS NAME(int, R)
#define BITS NAME(bits, R)
#define FROM_BITS NAME(from_bits, R)
#define FMA NAME(fma, R)
#define SPLAT NAME(splat, R)
#define SIGN_BIT (sizeof(NAME(real, R)) * 8 - 1)

typedef struct {
    VEC rest[SIDE_BY_SIDE], tail[SIDE_BY_SIDE]; /* their sum is the angle but for whole half turns */
    INTS odd[SIDE_BY_SIDE];                     /* bit 0: whether the number of half turns taken off is odd */
} NAME(turn, R);

ROPE_INLINE void NAME(turn_start, R)(NAME(turn, R) * turn) {
    EACH turn->rest[v] = turn->tail[v] = SPLAT(0);
    EACH turn->odd[v] = BITS(SPLAT(0));
}

/* takes whole half turns off `from`, into `to` */
#define TAKE_OFF(to, from)                                                                                           \
    do {                                                                                                             \
        EACH shifted[v] = from[v] + ROUND_MAGIC;                                                                     \
        EACH to[v] = from[v] - (shifted[v] - ROUND_MAGIC);                                                           \
        EACH turn->odd[v] ^= BITS(shifted[v]);                                                                       \
    } while (0)

/* Axis number `axis`, from 0 up. position_low: NULL, or what position loses of an integer. */
ROPE_INLINE void NAME(turn_add, R)(NAME(turn, R) * turn, int64_t axis, VEC position, const VEC *position_low,
                                   const VEC *high, const VEC *low) {
    VEC product[SIDE_BY_SIDE], rest[SIDE_BY_SIDE], shifted[SIDE_BY_SIDE];
    EACH product[v] = position * high[v];
    TAKE_OFF(rest, product);
    EACH product[v] = FMA(position, high[v], -product[v]);
    EACH product[v] = FMA(position, low[v], product[v]);
    if (position_low) EACH product[v] = FMA(*position_low, high[v], product[v]);
    EACH turn->tail[v] += product[v];
    if (axis >= 2) TAKE_OFF(turn->rest, turn->rest); /* sums stay below 1, and so their rounding small */
    EACH turn->rest[v] += rest[v];
}

/* `flip` negates the sin. */
ROPE_INLINE void NAME(turn_cos_sin, R)(NAME(turn, R) * turn, int flip, VEC *c, VEC *s) {
    ROPE_CONSTANTS NAME(real, R) sin_terms[] = {SIN_TERMS}, cos_terms[] = {COS_TERMS};
    enum {
        LAST_SIN = sizeof sin_terms / sizeof *sin_terms - 1,
        LAST_COS = sizeof cos_terms / sizeof *cos_terms - 1,
    };
    const INTS flipped = (BITS(SPLAT(0)) + flip) << SIGN_BIT;
    VEC *const r = turn->rest, z[SIDE_BY_SIDE], shifted[SIDE_BY_SIDE];
    EACH r[v] += turn->tail[v];
    TAKE_OFF(r, r);
    EACH z[v] = r[v] * r[v];
    EACH s[v] = SPLAT(sin_terms[LAST_SIN]);
    EACH c[v] = SPLAT(cos_terms[LAST_COS]);
    for (int j = LAST_SIN - 1; j >= 0; j--)
        EACH s[v] = FMA(s[v], z[v], SPLAT(sin_terms[j]));
    for (int j = LAST_COS - 1; j >= 0; j--)
        EACH c[v] = FMA(c[v], z[v], SPLAT(cos_terms[j]));
    EACH s[v] = FMA(r[v], SPLAT(PI), r[v] * FMA(s[v], z[v], SPLAT(PI_LOW)));
    EACH c[v] = FMA(c[v], z[v], SPLAT(1));
    EACH turn->odd[v] <<= SIGN_BIT;
    EACH c[v] = FROM_BITS(BITS(c[v]) ^ turn->odd[v]);
    EACH s[v] = FROM_BITS(BITS(s[v]) ^ turn->odd[v] ^ flipped);
}

#undef TAKE_OFF
#undef VEC
#undef INTS
#undef BITS
#undef FROM_BITS
#undef FMA
#undef SPLAT
#undef SIGN_BIT
#undef SIN_TERMS
#undef COS_TERMS
#undef PI
#undef PI_LOW
#undef ROUND_MAGIC
