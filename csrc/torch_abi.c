#include "torch_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if defined(__APPLE__)
#define LIBTORCH "libtorch_cpu.dylib"
#else
#define LIBTORCH "libtorch_cpu.so"
#endif

torch_abi_table torch;

static const struct {
    const char *name, *since;
    size_t offset;
} functions[] = {
#define TORCH_ABI_ROW(since, result, name, arguments) {#name, since, offsetof(torch_abi_table, name)},
    TORCH_ABI_FUNCTIONS(TORCH_ABI_ROW)
#undef TORCH_ABI_ROW
};

int torch_abi_load(char *message, size_t size) {
    void *library = dlopen(LIBTORCH, RTLD_NOLOAD | RTLD_LAZY);
    if (!library) {
        snprintf(message, size, "torch is not loaded (%s was not found in this process): import torch first",
                 LIBTORCH);
        return -1;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function) {
            snprintf(message, size,
                     "this torch has no %s, which came with torch %s: nd_rotary_encodings needs torch >= 2.10 "
                     "(pip install --upgrade torch)",
                     functions[i].name, functions[i].since);
            return -1;
        }
        /* ISO C has no conversion from void * to a function pointer; POSIX lets the bytes be copied */
        memcpy((char *)&torch + functions[i].offset, &function, sizeof function);
    }
    return 0;
}
