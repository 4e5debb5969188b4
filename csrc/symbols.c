#include "symbols.h"

#include <dlfcn.h>
#include <string.h>

const char *rope_load_symbols(void *library, const rope_symbol *symbols, size_t count, void *table) {
    for (size_t i = 0; i < count; i++) {
        void *function = dlsym(library, symbols[i].name);
        if (!function) return symbols[i].name;
        /* ISO C has no conversion from void * to a function pointer; POSIX lets the bytes be copied */
        memcpy((char *)table + symbols[i].offset, &function, sizeof function);
    }
    return NULL;
}
