/* The part of libtorch's stable C interface that is used here, declared by hand: torch's own shim headers are C++.
 * The functions are looked up in the libtorch that is already loaded, so that one binary serves every torch since
 * 2.10. Sources of the declarations: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h.
 *
 * Functions returning int32_t give 0 on success, except the getters of constants. */
#ifndef TORCH_ABI_H
#define TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *torch_tensor; /* owned: delete each exactly once */
typedef struct TorchLibraryOpaque *torch_library;
typedef uint64_t torch_value; /* StableIValue: a tensor handle, int64, double or bool in its low bytes */
typedef void torch_kernel(torch_value *stack, uint64_t inputs, uint64_t outputs);
typedef void torch_range_function(int64_t begin, int64_t end, void *context);

/* The ABI that the kernels follow: 2.10.0 */
#define TORCH_ABI_TARGET 0x020a000000000000u

/* X(since, result, name, arguments) */
#define TORCH_ABI_FUNCTIONS(X)                                                                                       \
    X("2.9", uint64_t, aoti_torch_abi_version, (void))                                                               \
    X("2.9", void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                     \
    X("2.9", int32_t, aoti_torch_library_init_impl,                                                                  \
      (const char *, const char *, const char *, uint32_t, torch_library *))                                         \
    X("2.10", int32_t, torch_library_impl, (torch_library, const char *, torch_kernel *, uint64_t))                  \
    X("2.9", int32_t, aoti_torch_delete_tensor_object, (torch_tensor))                                               \
    X("2.9", int32_t, aoti_torch_get_dim, (torch_tensor, int64_t *))                                                 \
    X("2.9", int32_t, aoti_torch_get_sizes, (torch_tensor, int64_t **))                                              \
    X("2.9", int32_t, aoti_torch_get_strides, (torch_tensor, int64_t **))                                            \
    X("2.9", int32_t, aoti_torch_get_dtype, (torch_tensor, int32_t *))                                               \
    X("2.9", int32_t, aoti_torch_get_device_type, (torch_tensor, int32_t *))                                         \
    X("2.9", int32_t, aoti_torch_get_device_index, (torch_tensor, int32_t *))                                        \
    X("2.10", int32_t, torch_get_const_data_ptr, (torch_tensor, const void **))                                      \
    X("2.10", int32_t, torch_get_mutable_data_ptr, (torch_tensor, void **))                                          \
    X("2.9", int32_t, aoti_torch_empty_strided,                                                                      \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, torch_tensor *))                        \
    X("2.10", int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, torch_range_function *, void *))              \
    X("2.9", int32_t, aoti_torch_device_type_cpu, (void))                                                            \
    X("2.9", int32_t, aoti_torch_device_type_cuda, (void))                                                           \
    X("2.9", int32_t, aoti_torch_dtype_float32, (void))                                                              \
    X("2.9", int32_t, aoti_torch_dtype_float64, (void))                                                              \
    X("2.9", int32_t, aoti_torch_dtype_float16, (void))                                                              \
    X("2.9", int32_t, aoti_torch_dtype_bfloat16, (void))                                                             \
    X("2.9", int32_t, aoti_torch_dtype_uint8, (void))                                                                \
    X("2.9", int32_t, aoti_torch_dtype_int8, (void))                                                                 \
    X("2.9", int32_t, aoti_torch_dtype_int16, (void))                                                                \
    X("2.9", int32_t, aoti_torch_dtype_uint16, (void))                                                               \
    X("2.9", int32_t, aoti_torch_dtype_int32, (void))                                                                \
    X("2.9", int32_t, aoti_torch_dtype_uint32, (void))                                                               \
    X("2.9", int32_t, aoti_torch_dtype_int64, (void))                                                                \
    X("2.9", int32_t, aoti_torch_dtype_uint64, (void))

typedef struct {
#define TORCH_ABI_FIELD(since, result, name, arguments) result(*name) arguments;
    TORCH_ABI_FUNCTIONS(TORCH_ABI_FIELD)
#undef TORCH_ABI_FIELD
} torch_abi_table;

extern torch_abi_table torch;

/* Fills the table; returns 0, or -1 with what is wrong and what to do in `message`. */
int torch_abi_load(char *message, size_t size);

#endif
