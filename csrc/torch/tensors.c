#include "tensors.h"

#include "sizes.h"

#include <string.h>

static int64_t live_handles;

int64_t torch_live_handles(void) { return __atomic_load_n(&live_handles, __ATOMIC_RELAXED); }

void fail(call *c, const char *error) {
    if (!c->error) c->error = error;
}

static rope_dtype dtype_of(int32_t dtype) {
    static int32_t codes[ROPE_UNSUPPORTED];
    static int known;
    if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE)) { /* threads may race to store the same values */
        codes[ROPE_F32] = torch.aoti_torch_dtype_float32();
        codes[ROPE_F64] = torch.aoti_torch_dtype_float64();
        codes[ROPE_F16] = torch.aoti_torch_dtype_float16();
        codes[ROPE_BF16] = torch.aoti_torch_dtype_bfloat16();
        codes[ROPE_U8] = torch.aoti_torch_dtype_uint8();
        codes[ROPE_I8] = torch.aoti_torch_dtype_int8();
        codes[ROPE_I16] = torch.aoti_torch_dtype_int16();
        codes[ROPE_U16] = torch.aoti_torch_dtype_uint16();
        codes[ROPE_I32] = torch.aoti_torch_dtype_int32();
        codes[ROPE_U32] = torch.aoti_torch_dtype_uint32();
        codes[ROPE_I64] = torch.aoti_torch_dtype_int64();
        codes[ROPE_U64] = torch.aoti_torch_dtype_uint64();
        __atomic_store_n(&known, 1, __ATOMIC_RELEASE);
    }
    for (int i = 0; i < ROPE_UNSUPPORTED; i++)
        if (codes[i] == dtype) return (rope_dtype)i;
    return ROPE_UNSUPPORTED;
}

/* 0 where a call has no room for more: then the handle is freed. */
static int count_in(call *c, torch_tensor handle) {
    if (c->count == MAX_TENSORS) {
        torch.aoti_torch_delete_tensor_object(handle);
        fail(c, "an operator has more tensors than a call has room for");
        return 0;
    }
    c->handles[c->count++] = handle;
    __atomic_add_fetch(&live_handles, 1, __ATOMIC_RELAXED);
    return 1;
}

/* No memory holds so many elements, and below this no product that the kernels make of sizes overflows: hence an
 * empty dim counts as 1. */
static int too_large(int64_t dims, const int64_t *sizes) {
    int64_t count = 1;
    int overflow = 0;
    for (int64_t d = 0; d < dims; d++)
        overflow |= __builtin_mul_overflow(count, sizes[d] > 1 ? sizes[d] : 1, &count);
    return overflow || count > (int64_t)1 << 47;
}

static tensor describe(call *c, torch_tensor handle) {
    tensor t = {.handle = handle, .dtype = ROPE_UNSUPPORTED};
    int64_t dims, *sizes, *strides;
    int32_t device_type, device_index;
    if (torch.aoti_torch_get_dim(handle, &dims) || torch.aoti_torch_get_sizes(handle, &sizes) ||
        torch.aoti_torch_get_strides(handle, &strides) || torch.aoti_torch_get_dtype(handle, &t.torch_dtype) ||
        torch.aoti_torch_get_device_type(handle, &device_type) ||
        torch.aoti_torch_get_device_index(handle, &device_index)) {
        fail(c, "an argument is not a plain strided tensor");
        return t;
    }
    if (device_index < 0) device_index = 0;
    if (c->count == 1) {
        c->device_type = device_type;
        c->device_index = device_index;
    }
    if (device_type != c->device_type || device_index != c->device_index)
        fail(c, "all tensors must be on one device");
    if (device_type != torch.aoti_torch_device_type_cpu() && device_type != torch.aoti_torch_device_type_cuda())
        fail(c, "tensors must be on the CPU or on a CUDA device");
    if (dims > ROPE_MAX_DIMS) fail(c, "tensors may have at most 16 dimensions");
    if (too_large(dims, sizes)) fail(c, "tensors may have at most 2^47 elements");
    t.dims = (int)dims;
    t.sizes = sizes;
    t.strides = strides;
    t.dtype = dtype_of(t.torch_dtype);
    return t;
}

tensor take(call *c, torch_value value) {
    torch_tensor handle = (torch_tensor)(uintptr_t)value;
    tensor t = {0};
    if (!count_in(c, handle)) return t;
    t = describe(c, handle);
    if (!c->error && torch.torch_get_const_data_ptr(handle, &t.data)) fail(c, "a tensor has no memory of its own");
    /* where the storage was resized to nothing, there is no error, and no memory either */
    if (!c->error && !t.data && count_of(&t) > 0) fail(c, "a tensor has no memory of its own");
    return t;
}

void write_to(call *c, tensor *t) {
    void *data;
    if (c->error) return;
    if (torch.torch_get_mutable_data_ptr(t->handle, &data)) {
        fail(c, "embeddings can't be written to");
        return;
    }
    t->data = data;
    for (int d = 0; d < t->dims; d++)
        if (t->sizes[d] > 1 && t->strides[d] == 0) fail(c, "in place, embeddings may not be expanded");
}

void check_embeddings(call *c, const tensor *t) {
    if (t->dtype >= ROPE_EMBEDDING_DTYPES) fail(c, "embeddings must be float16, bfloat16, float32 or float64");
    if (t->dims < 2) fail(c, "embeddings need the dims of heads and channels");
}

tensor allocate(call *c, int dims, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
    int64_t dense[ROPE_MAX_DIMS], step = 1;
    tensor t = {0};
    if (too_large(dims, sizes)) {
        fail(c, "the result would have more than 2^47 elements");
        return t;
    }
    for (int d = dims - 1; d >= 0; d--) {
        dense[d] = step;
        step *= sizes[d] > 1 ? sizes[d] : 1;
    }
    torch_tensor handle;
    if (torch.aoti_torch_empty_strided(dims, sizes, strides ? strides : dense, dtype, c->device_type, c->device_index,
                                       &handle)) {
        fail(c, "the result could not be allocated");
        return t;
    }
    if (!count_in(c, handle)) return t;
    t = describe(c, handle);
    void *data;
    if (!c->error && torch.torch_get_mutable_data_ptr(handle, &data)) fail(c, "the result has no memory");
    if (!c->error) t.data = data;
    return t;
}

tensor allocate_gradient(call *c, const tensor *t, int wanted) {
    static const int64_t nothing[1] = {0};
    const tensor none = {0};
    if (c->error) return none;
    return allocate(c, wanted ? t->dims : 1, wanted ? t->sizes : nothing, NULL, t->torch_dtype);
}

int64_t count_of(const tensor *t) { return product(t->dims, t->sizes); }

size_t bytes_of(const tensor *t) { return (size_t)(count_of(t) * rope_size_of(t->dtype)); }

void finish(call *c, torch_value *stack, const tensor *results, int result_count) {
    for (int i = 0; i < c->count; i++) {
        int kept = 0;
        for (int r = 0; !c->error && r < result_count; r++)
            kept |= c->handles[i] == results[r].handle;
        if (!kept) torch.aoti_torch_delete_tensor_object(c->handles[i]);
        __atomic_sub_fetch(&live_handles, 1, __ATOMIC_RELAXED);
    }
    if (c->error) torch.aoti_torch_check(false, "nd_rotary", __FILE__, __LINE__, c->error);
    for (int r = 0; r < result_count; r++)
        stack[r] = (torch_value)(uintptr_t)results[r].handle;
}

int same_shape(const tensor *a, const tensor *b) {
    return a->dims == b->dims && memcmp(a->sizes, b->sizes, (size_t)a->dims * sizeof *a->sizes) == 0;
}

int non_overlapping_and_dense(const tensor *t) {
    int done[ROPE_MAX_DIMS] = {0};
    for (int64_t step = 1;;) {
        int found = -1, left = 0;
        for (int d = 0; d < t->dims; d++) {
            if (done[d] || t->sizes[d] < 2) continue;
            left = 1;
            if (t->strides[d] == step) found = d;
        }
        if (!left) return 1;
        if (found < 0) return 0;
        done[found] = 1;
        step *= t->sizes[found];
    }
}
