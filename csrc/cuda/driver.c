/* The CUDA driver and the kernels on each device: found, loaded and checked at first use. */
#include "driver.h"

#include "error.h"
#include "nvrtc.h"
#include "symbols.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What setup.py embeds: ROPE_CUDA_IMAGE names a file with a fatbin, or ROPE_CUDA_SOURCE one with source for NVRTC. */
#if defined(ROPE_CUDA_IMAGE)
#define ROPE_CUDA_FILE ROPE_CUDA_IMAGE
#elif defined(ROPE_CUDA_SOURCE)
#define ROPE_CUDA_FILE ROPE_CUDA_SOURCE
#define ROPE_CUDA_ARCHITECTURES "source, compiled at first use"
#else
#define ROPE_CUDA_ARCHITECTURES NULL
#endif

#if defined(ROPE_CUDA_FILE)
__asm__(".pushsection .rodata\n"
        ".balign 16\n"
        "rope_cuda_file:\n"
        ".incbin \"" ROPE_CUDA_FILE "\"\n"
        "rope_cuda_file_end:\n"
        ".byte 0\n"
        ".popsection\n");
extern const char rope_cuda_file[] __attribute__((visibility("hidden")));
extern const char rope_cuda_file_end[] __attribute__((visibility("hidden")));
#endif

enum { MAX_DEVICES = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static rope_driver driver;
static int driver_loaded;
static rope_device *devices[MAX_DEVICES]; /* each written once, or by tests */
static char *test_driver, *nvrtc;

const char *rope_driver_failure(const rope_driver *d, const char *function, int result) {
    const char *name = NULL, *text = NULL;
    d->cuGetErrorName(result, &name);
    d->cuGetErrorString(result, &text);
    return rope_cuda_error("CUDA driver: %s: %s (%s)", function, name ? name : "unknown error", text ? text : "?");
}

const char *rope_cuda_built(void) { return ROPE_CUDA_ARCHITECTURES; }

static const char *load_driver(void) {
    static const rope_symbol functions[] = {
#define ROPE_DRIVER_ROW(result, name, arguments) {#name, offsetof(rope_driver, name)},
        ROPE_DRIVER_FUNCTIONS(ROPE_DRIVER_ROW)
#undef ROPE_DRIVER_ROW
    };
    if (driver_loaded) return NULL;
    void *library = dlopen(test_driver ? test_driver : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return rope_cuda_error("no CUDA driver: %s", dlerror());
    const char *missing = rope_load_symbols(library, functions, sizeof functions / sizeof *functions, &driver);
    if (missing) return rope_cuda_error("this CUDA driver is too old: it has no %s", missing);
    const int result = driver.cuInit(0);
    if (result) return rope_driver_failure(&driver, "cuInit", result);
    driver_loaded = 1;
    return NULL;
}

#define TRY(function, ...)                                                                                           \
    do {                                                                                                             \
        const int result_ = driver.function(__VA_ARGS__);                                                            \
        if (result_) return rope_driver_failure(&driver, #function, result_);                                        \
    } while (0)

static const char *load_functions(rope_device *device, const void *image) {
    static const char *const layouts[ROPE_LAYOUTS] = {
        [ROPE_INTERLEAVED] = "interleaved", [ROPE_HALVES] = "halves", [ROPE_SCALAR] = "scalar"};
    static const char *const types[ROPE_EMBEDDING_DTYPES] = {
        [ROPE_F32] = "f32", [ROPE_F64] = "f64", [ROPE_F16] = "f16", [ROPE_BF16] = "bf16"};
    void *module;
    TRY(cuModuleLoadData, &module, image);
    TRY(cuModuleGetFunction, device->functions + ROPE_FUNCTION_SUM, module, "rope_sum");
    TRY(cuModuleGetFunction, device->functions + ROPE_FUNCTION_ANGLES, module, "rope_angles");
    for (int backward = 0; backward < 2; backward++)
        for (int layout = 0; layout < ROPE_LAYOUTS; layout++)
            for (int type = 0; type < ROPE_EMBEDDING_DTYPES; type++) {
                char name[64];
                snprintf(name, sizeof name, "rope_%s_%s_%s", backward ? "backward" : "rotate", types[type],
                         layouts[layout]);
                TRY(cuModuleGetFunction, device->functions + rope_function_rows(backward, layout, type), module,
                    name);
            }
    return NULL;
}

static const char *load_image(rope_device *device, int index, int architecture) {
#if defined(ROPE_CUDA_SOURCE)
    if (!test_driver || nvrtc) {
        void *code = NULL;
        if (!nvrtc)
            return "the CUDA kernels are here as source and NVRTC, which compiles them, was not found "
                   "(pip install nvidia-cuda-nvrtc, or build where nvcc is)";
        const char *error = rope_nvrtc_compile(nvrtc, rope_cuda_file, (size_t)(rope_cuda_file_end - rope_cuda_file),
                                               architecture, &code);
        if (!error) error = load_functions(device, code);
        free(code);
        return error;
    }
#endif
#if defined(ROPE_CUDA_FILE)
    const void *image = rope_cuda_file;
#else
    const void *image = "";
    if (!test_driver) return "this build has no CUDA kernels";
#endif
    const char *error = load_functions(device, image);
    char reason[512];
    if (!error) return NULL;
    snprintf(reason, sizeof reason, "%s", error);
    return rope_cuda_error("cuda:%d (sm_%d) can't run the kernels of this build (%s): %s. With ND_ROTARY_CUDA=0 in "
                           "the environment plain PyTorch runs instead",
                           index, architecture, rope_cuda_built() ? rope_cuda_built() : "none", reason);
}

static const char *load_device(rope_device *device, int index) {
    int major, minor, mode = CU_CAPTURE_MODE_RELAXED;
    cu_device handle;
    TRY(cuDeviceGet, &handle, index);
    TRY(cuDeviceGetAttribute, &major, CU_COMPUTE_CAPABILITY_MAJOR, handle);
    TRY(cuDeviceGetAttribute, &minor, CU_COMPUTE_CAPABILITY_MINOR, handle);
    TRY(cuDeviceGetAttribute, &device->max_grid, CU_MAX_GRID_DIM_X, handle);
    TRY(cuDevicePrimaryCtxRetain, &device->context, handle);
    TRY(cuCtxPushCurrent_v2, device->context);
    /* loading would end a capture that is under way on one of this thread's streams; it is no part of it */
    const int relaxed = driver.cuThreadExchangeStreamCaptureMode(&mode) == 0;
    const char *error = load_image(device, index, 10 * major + minor);
    if (relaxed) driver.cuThreadExchangeStreamCaptureMode(&mode);
    void *popped;
    driver.cuCtxPopCurrent_v2(&popped);
    return error;
}

const rope_device *rope_driver_device(int index, const rope_driver **to, const char **error) {
    if (index < 0 || index >= MAX_DEVICES) {
        *error = rope_cuda_error("cuda:%d is beyond the %d devices that are supported", index, MAX_DEVICES);
        return NULL;
    }
    rope_device *device = __atomic_load_n(devices + index, __ATOMIC_ACQUIRE);
    if (!device) {
        pthread_mutex_lock(&lock);
        device = devices[index];
        if (!device && !(*error = load_driver())) {
            device = calloc(1, sizeof *device);
            *error = device ? load_device(device, index) : "out of memory";
            if (*error) {
                free(device);
                device = NULL;
            }
            __atomic_store_n(devices + index, device, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
    }
    *to = &driver;
    return device;
}

const char *rope_cuda_prepare(int device) {
    const rope_driver *unused;
    const char *error = NULL;
    return rope_driver_device(device, &unused, &error) ? NULL : error;
}

static void set_path(char **path, const char *to) {
    const size_t size = to ? strlen(to) + 1 : 0;
    free(*path);
    *path = size ? malloc(size) : NULL;
    if (*path) memcpy(*path, to, size);
}

void rope_cuda_use_nvrtc(const char *path) {
    pthread_mutex_lock(&lock);
    set_path(&nvrtc, path);
    pthread_mutex_unlock(&lock);
}

void rope_cuda_use_driver(const char *path) {
    pthread_mutex_lock(&lock);
    set_path(&test_driver, path);
    driver_loaded = 0;
    for (int i = 0; i < MAX_DEVICES; i++) {
        free(devices[i]);
        devices[i] = NULL;
    }
    pthread_mutex_unlock(&lock);
}
