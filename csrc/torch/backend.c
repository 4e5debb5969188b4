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

static const char *cpu_rows(call *c, const rope_args *args) {
    (void)c;
    return rope_cpu_run(args, torch_parallel);
}

static const char *cpu_angles(call *c, const rope_args *args, int64_t groups, int64_t group_stride,
                              const rope_operand *angles) {
    (void)c;
    return rope_cpu_angles(args, groups, group_stride, angles, torch_parallel);
}

static const char *cpu_zero(call *c, void *data, size_t bytes) {
    (void)c;
    if (bytes) memset(data, 0, bytes);
    return NULL;
}

static const char *cuda_rows(call *c, const rope_args *args) {
    const rope_cuda_call cuda = cuda_call(c);
    return c->error ? NULL : rope_cuda_run(args, &cuda);
}

static const char *cuda_angles(call *c, const rope_args *args, int64_t groups, int64_t group_stride,
                               const rope_operand *angles) {
    const rope_cuda_call cuda = cuda_call(c);
    return c->error ? NULL : rope_cuda_angles(args, groups, group_stride, angles, &cuda);
}

static const char *cuda_zero(call *c, void *data, size_t bytes) {
    const rope_cuda_call cuda = cuda_call(c);
    return c->error ? NULL : rope_cuda_zero(data, bytes, &cuda);
}

/* A row per device; an error, or NULL. */
static const struct {
    const char *(*rows)(call *c, const rope_args *args);
    const char *(*angles)(call *c, const rope_args *args, int64_t groups, int64_t group_stride,
                          const rope_operand *angles);
    const char *(*zero)(call *c, void *data, size_t bytes);
} backends[] = {{cpu_rows, cpu_angles, cpu_zero}, {cuda_rows, cuda_angles, cuda_zero}};

void run_rows(call *c, const rope_args *args) {
    const char *error = backends[on_cuda(c)].rows(c, args);
    if (error) fail(c, error);
}

void run_angles(call *c, const rope_args *args, int64_t groups, int64_t group_stride, const rope_operand *angles) {
    const char *error = backends[on_cuda(c)].angles(c, args, groups, group_stride, angles);
    if (error) fail(c, error);
}

void fill_with_zeros(call *c, const tensor *t) {
    const char *error = backends[on_cuda(c)].zero(c, (void *)(uintptr_t)t->data, bytes_of(t));
    if (error) fail(c, error);
}
