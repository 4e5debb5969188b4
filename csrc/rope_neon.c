#define ROPE_ISA neon
#define ROPE_ISA_NAME "neon"
#define ROPE_BYTES 16
#include "rope_kernels.inc.h"
