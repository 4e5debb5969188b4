#define ROPE_ISA avx512
#define ROPE_ISA_NAME "avx512"
#define ROPE_BYTES 64
#include "kernels.inc.h"
