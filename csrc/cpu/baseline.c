#define ROPE_ISA baseline
#define ROPE_ISA_NAME "baseline"
#define ROPE_BYTES 16
#include "kernels.inc.h"
