#define ROPE_ISA neon
#define ROPE_ISA_NAME "neon"
#define ROPE_BYTES 16
#include "kernels.inc.h"
