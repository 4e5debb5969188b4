#define ROPE_ISA avx2
#define ROPE_ISA_NAME "avx2"
#define ROPE_BYTES 32
#include "kernels.inc.h"
