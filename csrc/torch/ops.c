#include "ops.h"

#include "backend.h"
#include "parallel.h"

int torch_ops_register(void) {
    static const struct {
        const char *name;
        torch_kernel *kernel;
    } kernels[] = {
        {"_rotate", kernel_rotate},
        {"_rotate_", kernel_rotate_},
        {"_rotate_backward", kernel_rotate_backward},
        {"_rotate_qk", kernel_rotate_qk},
        {"_rotate_qk_backward", kernel_rotate_qk_backward},
        {"apply_rope", kernel_rotate},
        {"apply_rope_qk", kernel_rotate_qk},
        {"_rotate_by_angles", kernel_rotate_by_angles},
        {"_rotate_by_angles_", kernel_rotate_by_angles_},
        {"_rotate_by_angles_backward", kernel_rotate_by_angles_backward},
        {"rotate_embeddings", kernel_rotate_by_angles},
        {"_calculate_angles", kernel_calculate_angles},
        {"calculate_rope", kernel_calculate_angles},
    };
    if (torch_parallel_init() != 0) return -1;
    static const char *const devices[] = {"CPU", "CUDA"};
    for (int d = 0; d < 1 + cuda_is_wanted(); d++) {
        /* torch keeps a pointer to the library for as long as the process lives */
        torch_library library;
        if (torch.aoti_torch_library_init_impl("nd_rotary", devices[d], __FILE__, __LINE__, &library)) return -1;
        for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
            if (torch.torch_library_impl(library, kernels[i].name, kernels[i].kernel, TORCH_ABI_TARGET)) return -1;
    }
    return 0;
}
