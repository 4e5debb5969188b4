#include "abi.h"

#include "symbols.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if defined(__APPLE__)
#define LIBTORCH "libtorch_cpu.dylib"
#else
#define LIBTORCH "libtorch_cpu.so"
#endif

torch_abi_table torch;

static const rope_symbol functions[] = {
#define TORCH_ABI_ROW(since, result, name, arguments) {#name, offsetof(torch_abi_table, name)},
    TORCH_ABI_FUNCTIONS(TORCH_ABI_ROW)
#undef TORCH_ABI_ROW
};

static const char *since(const char *name) {
#define TORCH_ABI_ROW(since, result, function, arguments)                                                            \
    if (strcmp(name, #function) == 0) return since;
    TORCH_ABI_FUNCTIONS(TORCH_ABI_ROW)
#undef TORCH_ABI_ROW
    return "a later version";
}

int torch_abi_load(char *message, size_t size) {
    void *library = dlopen(LIBTORCH, RTLD_NOLOAD | RTLD_LAZY);
    if (!library) {
        snprintf(message, size, "torch is not loaded (%s was not found in this process): import torch first",
                 LIBTORCH);
        return -1;
    }
    const char *missing = rope_load_symbols(library, functions, sizeof functions / sizeof *functions, &torch);
    if (missing)
        snprintf(message, size,
                 "this torch has no %s, which came with torch %s: nd_rotary_encodings needs torch >= 2.10 "
                 "(pip install --upgrade torch)",
                 missing, since(missing));
    return missing ? -1 : 0;
}
