/* The kernels alone, without torch or Python: against plain loops in long double, and every instruction set and
 * order of work against the first, to the bit. `make native`, `sanitize` and `arm` build and run this for the CPU,
 * `cuda` and `cuda-sanitize` for CUDA.
 *
 * The last lines printed hold a checksum of all results, equal on every machine: x86 and NEON too. */
#include "testing.h"

int main(void) {
    uint64_t fast = 0xcbf29ce484222325u, libm = fast;
    test_conversions();
    test_nan();
    test_angles(&fast);
    test_rotations(&fast, &libm);

    test_backend();
    printf("largest errors, of the budgets: f32 %.2f, f64 %.2f, f16 %.2f, bf16 %.2f\n", largest_error[ROPE_F32],
           largest_error[ROPE_F64], largest_error[ROPE_F16], largest_error[ROPE_BF16]);
    printf("fnv of angles beyond the fast path: %016llx\n", (unsigned long long)libm);
    printf("fnv %016llx\n", (unsigned long long)fast);
    printf("%ld checks passed, %ld failed\n", passed, failed);
    return failed != 0;
}
