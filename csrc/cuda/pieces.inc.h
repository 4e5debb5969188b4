/* Channels as a thread holds them: included by rows.inc.h. */

/* What a thread holds of a row: PAIRS pairs of channels; or, of channels to be copied, half as much or all. */
#if LAYOUT == ROPE_SCALAR
typedef struct {
    ELEMENT v[2];
} N(piece);
#define WORD ELEMENT
#else
typedef struct {
    uint4 v[LAYOUT == ROPE_HALVES ? 2 : 1];
} N(piece);
#define WORD uint4
#endif
#define PIECE N(piece)

/* `apart`: elements from the first of a pair to the second, or its vector. */
ROPE_INLINE PIECE N(load)(const ELEMENT *at, int64_t apart) {
    PIECE piece;
    piece.v[0] = *(const WORD *)at;
#if LAYOUT != ROPE_INTERLEAVED
    piece.v[1] = *(const WORD *)(at + apart);
#else
    (void)apart;
#endif
    return piece;
}

ROPE_INLINE void N(store)(ELEMENT *at, int64_t apart, PIECE piece) {
    *(WORD *)at = piece.v[0];
#if LAYOUT != ROPE_INTERLEAVED
    *(WORD *)(at + apart) = piece.v[1];
#else
    (void)apart;
#endif
}

ROPE_INLINE void N(unpack)(PIECE piece, REAL *a0, REAL *a1) {
#if LAYOUT == ROPE_SCALAR
    a0[0] = NAME(element_load, E)(piece.v[0]), a1[0] = NAME(element_load, E)(piece.v[1]);
#elif LAYOUT == ROPE_HALVES
    NAME(vector_load, E)(piece.v[0], a0);
    NAME(vector_load, E)(piece.v[1], a1);
#else
    REAL all[2 * PAIRS];
    NAME(vector_load, E)(piece.v[0], all);
    for (int j = 0; j < PAIRS; j++)
        a0[j] = all[2 * j], a1[j] = all[2 * j + 1];
#endif
}

ROPE_INLINE PIECE N(pack)(const REAL *a0, const REAL *a1) {
    PIECE piece;
#if LAYOUT == ROPE_SCALAR
    piece.v[0] = NAME(element_store, E)(a0[0]), piece.v[1] = NAME(element_store, E)(a1[0]);
#elif LAYOUT == ROPE_HALVES
    piece.v[0] = NAME(vector_store, E)(a0);
    piece.v[1] = NAME(vector_store, E)(a1);
#else
    REAL all[2 * PAIRS];
    for (int j = 0; j < PAIRS; j++)
        all[2 * j] = a0[j], all[2 * j + 1] = a1[j];
    piece.v[0] = NAME(vector_store, E)(all);
#endif
    return piece;
}
