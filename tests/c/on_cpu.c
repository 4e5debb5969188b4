/* Tests of the CPU backend: on each instruction set in turn. */
#include "testing.h"

const char *run(const rope_args *args, rope_parallel_for *order) { return rope_cpu_run(args, order); }

const char *run_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                       rope_parallel_for *order) {
    return rope_cpu_angles(args, groups, group_stride, angles, order);
}

const char *next_isa(int *index) {
    int usable;
    const char *isa;
    while ((isa = rope_cpu_isa((*index)++, &usable)) != NULL) {
        CHECK(rope_cpu_force_isa(isa) == (usable ? 0 : -1), "%s", isa);
        if (usable) break;
    }
    CHECK(!isa || strcmp(rope_cpu_active_isa(), isa) == 0, "%s", isa);
    return isa;
}

void report_backend(void) {
    const char *isa;
    for (int index = 0; (isa = next_isa(&index)) != NULL;)
        printf("tested: %s\n", isa);
    CHECK(rope_cpu_force_isa("none") == -1 && rope_cpu_force_isa(NULL) == 0, "force_isa");
}
