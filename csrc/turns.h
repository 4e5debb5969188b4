/* Angles in half turns: what the CPU's vectors and CUDA share. angle.inc.h is included here once for each
 * arithmetic, so vec_<R>, real_<R> and the rest that it names must be there; SIDE_BY_SIDE says how many at once. */
#ifndef ROPE_TURNS_H
#define ROPE_TURNS_H

#include "elements.h"

#define NAME_(name, suffix) name##_##suffix
#define NAME(name, suffix) NAME_(name, suffix)
#define EACH for (int v = 0; v < SIDE_BY_SIDE; v++)

#define R f64
#define SIN_TERMS                                                                                                    \
    -0x1.4abbce625be52p+2, 0x1.466bc6775aa4ap+1, -0x1.32d2cce6263dap-1, 0x1.5078348498c14p-4, -0x1.e3074d9cd5e57p-8, \
        0x1.e8f34ca85ad26p-12, -0x1.6f76d5ba21a9dp-16, 0x1.9ccae52b1197fp-21
#define COS_TERMS                                                                                                    \
    -0x1.3bd3cc9be45dep+2, 0x1.03c1f081b5ac3p+2, -0x1.55d3c7e3cbf6fp+0, 0x1.e1f506891456bp-3, -0x1.a6d1f29e82218p-6, \
        0x1.f9d3882fbcc41p-10, -0x1.b6e1960ec9a71p-14, 0x1.209e5d008d63cp-18, -0x1.2091b73e15891p-23
#define PI 0x1.921fb54442d18p+1
#define PI_LOW 0x1.1a62633145c07p-53
#define ROUND_MAGIC 0x1.8p52 /* adding it leaves an integer in the low bits */
#include "angle.inc.h"
#undef R

#define R f32
#define SIN_TERMS -0x1.4abbc2p+2f, 0x1.466898p+1f, -0x1.324958p-1f, 0x1.3d7174p-4f
#define COS_TERMS -0x1.3bd3ccp+2f, 0x1.03c1e6p+2f, -0x1.55d0b6p+0f, 0x1.e12f22p-3f, -0x1.90162cp-6f
#define PI 0x1.921fb6p+1f
#define PI_LOW -0x1.777a5cp-24f
#define ROUND_MAGIC 0x1.8p23f
#include "angle.inc.h"
#undef R

#endif
