/* Tests of the CUDA backend: tests/cuda_emulation takes the place of a device. */
#include "testing.h"

void emulation_set(const char *name, long value);
long emulation_get(const char *name);

static void *allocations[4];
static int allocation_count;
static void *allocate_on_device(size_t bytes, void *context) {
    (void)context;
    return memset(allocations[allocation_count++] = malloc(bytes), 0xff, bytes); /* NaNs */
}

/* Orders other than `forwards` are blocks and threads by chance in a small grid. */
static rope_cuda_call cuda_call(rope_parallel_for *order) {
    emulation_set("seed", order == forwards ? 0 : 1 + pick(1000000));
    emulation_set("max_grid", order == forwards ? 0 : 1 + pick(5));
    emulation_set("fail_launch", order == refuses);
    rope_cuda_use_driver(EMULATION); /* asks the device anew */
    return (rope_cuda_call){.device = (int)pick(2), .allocate = allocate_on_device};
}

static const char *release_all(const char *error, const rope_cuda_call *call) {
    while (allocation_count)
        free(allocations[--allocation_count]);
    CHECK(emulation_get("depth") == 0, "%ld contexts", emulation_get("depth"));
    CHECK(error || emulation_get("device") == call->device, "device %ld", emulation_get("device"));
    return error;
}

const char *run(const rope_args *args, rope_parallel_for *order) {
    const rope_cuda_call call = cuda_call(order);
    return release_all(rope_cuda_run(args, &call), &call);
}

const char *run_angles(const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles,
                       rope_parallel_for *order) {
    const rope_cuda_call call = cuda_call(order);
    return release_all(rope_cuda_angles(args, groups, group_stride, angles, &call), &call);
}

const char *next_isa(int *index) { return (*index)++ == 0 ? "cuda" : NULL; }

void test_backend(void) { printf("tested: cuda\n"); }
