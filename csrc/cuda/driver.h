/* The part of the CUDA driver's interface that is used here, declared by hand and found in the driver's library at
 * first use: building and loading this needs nothing of CUDA. Types, versions and numbers are those of cuda.h. */
#ifndef ROPE_DRIVER_H
#define ROPE_DRIVER_H

#include "plan.h"

typedef int cu_device; /* CUdevice; functions give 0 (CUDA_SUCCESS) or an error code (CUresult) */

enum {
    CU_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_COMPUTE_CAPABILITY_MINOR = 76,
    CU_MAX_GRID_DIM_X = 5,
    CU_CAPTURE_MODE_RELAXED = 2
};

/* X(result, name, arguments) */
#define ROPE_DRIVER_FUNCTIONS(X)                                                                                     \
    X(int, cuInit, (unsigned))                                                                                       \
    X(int, cuGetErrorName, (int, const char **))                                                                     \
    X(int, cuGetErrorString, (int, const char **))                                                                   \
    X(int, cuDeviceGet, (cu_device *, int))                                                                          \
    X(int, cuDeviceGetAttribute, (int *, int, cu_device))                                                            \
    X(int, cuDevicePrimaryCtxRetain, (void **, cu_device))                                                           \
    X(int, cuCtxPushCurrent_v2, (void *))                                                                            \
    X(int, cuCtxPopCurrent_v2, (void **))                                                                            \
    X(int, cuThreadExchangeStreamCaptureMode, (int *))                                                               \
    X(int, cuModuleLoadData, (void **, const void *))                                                                \
    X(int, cuModuleGetFunction, (void **, void *, const char *))                                                     \
    X(int, cuMemsetD8Async, (unsigned long long, unsigned char, size_t, void *))                                     \
    X(int, cuLaunchKernel,                                                                                           \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

typedef struct {
#define ROPE_DRIVER_FIELD(result, name, arguments) result(*name) arguments;
    ROPE_DRIVER_FUNCTIONS(ROPE_DRIVER_FIELD)
#undef ROPE_DRIVER_FIELD
} rope_driver;

/* Numbers of the kernels. */
enum {
    ROPE_FUNCTION_SUM,
    ROPE_FUNCTION_ANGLES,
    ROPE_FUNCTION_ROWS, /* the first of rope_rotate and rope_backward, by layout and embedding type */
    ROPE_FUNCTIONS = ROPE_FUNCTION_ROWS + 2 * ROPE_LAYOUTS * ROPE_EMBEDDING_DTYPES
};

static inline int rope_function_rows(int backward, int layout, int dtype) {
    return ROPE_FUNCTION_ROWS + (backward * ROPE_LAYOUTS + layout) * ROPE_EMBEDDING_DTYPES + dtype;
}

/* The kernels of one device, in its primary context, which is torch's. */
typedef struct {
    void *context;
    int max_grid;
    void *functions[ROPE_FUNCTIONS];
} rope_device;

/* The driver and the kernels of a device, made ready at its first use; NULL with what is wrong in *error. */
const rope_device *rope_driver_device(int index, const rope_driver **driver, const char **error);

/* What a driver's function gave, by name: "cuLaunchKernel: CUDA_ERROR_... (text)" */
const char *rope_driver_failure(const rope_driver *driver, const char *function, int result);

#endif
