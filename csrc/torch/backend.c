#include "backend.h"

#include "parallel.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t get_stream(int32_t device, void **stream);

static int emulated;

/* torch's function, which is in the part of it that CPU builds lack; NULL without. */
static get_stream *find_get_stream(void) {
    get_stream *function = NULL;
    void *library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void *found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : NULL;
    memcpy(&function, &found, sizeof function);
    return function;
}

int cuda_is_wanted(void) {
    const char *wish = getenv("ND_ROTARY_CUDA");
    return rope_cuda_built() && !(wish && strcmp(wish, "0") == 0) && find_get_stream();
}

void emulate_cuda(const char *driver) {
    rope_cuda_use_driver(driver);
    __atomic_store_n(&emulated, driver != NULL, __ATOMIC_RELAXED);
}

static int on_cuda(const call *c) {
    return c->device_type == torch.aoti_torch_device_type_cuda() || __atomic_load_n(&emulated, __ATOMIC_RELAXED);
}

/* Freed with the call, when work that uses it may still be waiting on the stream: torch gives the memory only to work
 * that comes later on that stream. */
static void *allocate_work_space(size_t bytes, void *context) {
    call *c = context;
    const int64_t size[1] = {(int64_t)bytes};
    return (void *)(uintptr_t)allocate(c, 1, size, NULL, torch.aoti_torch_dtype_uint8()).data;
}

static rope_cuda_call cuda_call(call *c) {
    static get_stream *function;
    rope_cuda_call cuda = {.device = c->device_index, .allocate = allocate_work_space, .context = c};
    if (c->device_type != torch.aoti_torch_device_type_cuda()) return cuda;
    if (!function) function = find_get_stream();
    if (function(c->device_index, &cuda.stream)) fail(c, "torch has no current stream for this device");
    return cuda;
}

void run_rows(call *c, const rope_args *args) {
    const char *error;
    if (on_cuda(c)) {
        const rope_cuda_call cuda = cuda_call(c);
        error = c->error ? NULL : rope_cuda_run(args, &cuda);
    } else {
        error = rope_cpu_run(args, torch_parallel);
    }
    if (error) fail(c, error);
}

void run_angles(call *c, const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles) {
    const char *error;
    if (on_cuda(c)) {
        const rope_cuda_call cuda = cuda_call(c);
        error = c->error ? NULL : rope_cuda_angles(args, groups, group_stride, angles, &cuda);
    } else {
        error = rope_cpu_angles(args, groups, group_stride, angles, torch_parallel);
    }
    if (error) fail(c, error);
}

void fill_with_zeros(call *c, const tensor *t) {
    void *const data = (void *)(uintptr_t)t->data;
    const char *error = NULL;
    if (on_cuda(c)) {
        const rope_cuda_call cuda = cuda_call(c);
        error = c->error ? NULL : rope_cuda_zero(data, bytes_of(t), &cuda);
    } else if (count_of(t) > 0) {
        memset(data, 0, bytes_of(t));
    }
    if (error) fail(c, error);
}
