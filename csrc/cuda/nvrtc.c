#define _POSIX_C_SOURCE 200809L

#include "nvrtc.h"

#include "error.h"
#include "symbols.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILES = 32 };

/* X(name, arguments): all give 0 (NVRTC_SUCCESS) or an error code */
#define NVRTC_FUNCTIONS(X)                                                                                           \
    X(nvrtcVersion, (int *, int *))                                                                                  \
    X(nvrtcCreateProgram, (void **, const char *, const char *, int, const char *const *, const char *const *))      \
    X(nvrtcCompileProgram, (void *, int, const char *const *))                                                       \
    X(nvrtcGetProgramLogSize, (void *, size_t *))                                                                    \
    X(nvrtcGetProgramLog, (void *, char *))                                                                          \
    X(nvrtcGetCUBINSize, (void *, size_t *))                                                                         \
    X(nvrtcGetCUBIN, (void *, char *))                                                                               \
    X(nvrtcDestroyProgram, (void **))

typedef struct {
#define NVRTC_FIELD(name, arguments) int(*name) arguments;
    NVRTC_FUNCTIONS(NVRTC_FIELD)
#undef NVRTC_FIELD
} nvrtc_table;

static const char *load(const char *path, nvrtc_table *nvrtc) {
    static const rope_symbol functions[] = {
#define NVRTC_ROW(name, arguments) {#name, offsetof(nvrtc_table, name)},
        NVRTC_FUNCTIONS(NVRTC_ROW)
#undef NVRTC_ROW
    };
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return rope_cuda_error("NVRTC can't be loaded: %s", dlerror());
    const char *missing = rope_load_symbols(library, functions, sizeof functions / sizeof *functions, nvrtc);
    return missing ? rope_cuda_error("%s has no %s", path, missing) : NULL;
}

/* NVRTC looks for its other library by name alone; one that is loaded is found. */
static void load_builtins(const char *path, int major, int minor) {
    char other[1024];
    const char *const slash = strrchr(path, '/');
    const int length = snprintf(other, sizeof other, "%.*slibnvrtc-builtins.so.%d.%d",
                                slash ? (int)(slash - path) + 1 : 0, path, major, minor);
    if (length > 0 && (size_t)length < sizeof other) dlopen(other, RTLD_NOW | RTLD_GLOBAL);
}

/* `source` is name, NUL, text, NUL and so on; the first is the program, the others are what it includes. */
static const char *compile(const nvrtc_table *nvrtc, const char *source, size_t size, int architecture, void **code,
                           size_t *code_size) {
    const char *names[MAX_FILES], *texts[MAX_FILES];
    int files = 0;
    for (const char *next = source; next < source + size && files < MAX_FILES; files++) {
        names[files] = next;
        texts[files] = next + strlen(next) + 1;
        next = texts[files] + strlen(texts[files]) + 1;
    }
    char target[32];
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d", architecture);
    const char *const options[] = {target, "--fmad=false", "--std=c++17"};
    void *program = NULL;
    if (files == 0 || nvrtc->nvrtcCreateProgram(&program, texts[0], names[0], files - 1, texts + 1, names + 1))
        return "NVRTC refused the source of the CUDA kernels";
    const char *error = NULL;
    const int result = nvrtc->nvrtcCompileProgram(program, 3, options);
    if (result) {
        size_t log_size = 0;
        char *log = NULL;
        if (!nvrtc->nvrtcGetProgramLogSize(program, &log_size) && (log = calloc(log_size + 1, 1)))
            nvrtc->nvrtcGetProgramLog(program, log);
        error = rope_cuda_error("NVRTC can't compile the CUDA kernels for sm_%d (error %d): %.600s", architecture,
                                result, log ? log : "");
        free(log);
    } else if (nvrtc->nvrtcGetCUBINSize(program, code_size) || !(*code = malloc(*code_size)) ||
               nvrtc->nvrtcGetCUBIN(program, *code)) {
        error = "NVRTC gave no code";
        free(*code);
        *code = NULL;
    }
    nvrtc->nvrtcDestroyProgram(&program);
    return error;
}

static uint64_t hash(const char *bytes, size_t count) {
    uint64_t value = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++)
        value = (value ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return value;
}

/* The cached file's path, its folders made; 0 where there can be none. */
static int cache_path(char *path, size_t size, uint64_t key, int architecture, int major, int minor) {
    const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char folder[512];
    int length;
    if (base && base[0] == '/')
        length = snprintf(folder, sizeof folder, "%s", base);
    else if (home && home[0] == '/')
        length = snprintf(folder, sizeof folder, "%s/.cache", home);
    else
        return 0;
    if (length < 0 || (size_t)length + 32 > sizeof folder) return 0;
    mkdir(folder, 0777);
    strcat(folder, "/nd_rotary_encodings");
    mkdir(folder, 0777);
    length = snprintf(path, size, "%s/%016llx-sm_%d-nvrtc-%d.%d.cubin", folder, (unsigned long long)key, architecture,
                      major, minor);
    return length > 0 && (size_t)length < size;
}

/* A file is the hash of the code and the code: one that was cut short, or is another's, is none. */
static void *read_cached(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    uint64_t wanted;
    long size = -1;
    char *code = NULL;
    if (fread(&wanted, sizeof wanted, 1, file) == 1 && !fseek(file, 0, SEEK_END)) size = ftell(file);
    size -= (long)sizeof wanted;
    if (size > 0 && (code = malloc((size_t)size)) &&
        (fseek(file, (long)sizeof wanted, SEEK_SET) || fread(code, (size_t)size, 1, file) != 1 ||
         hash(code, (size_t)size) != wanted)) {
        free(code);
        code = NULL;
    }
    fclose(file);
    return code;
}

/* Written elsewhere and moved there at once, so that processes at the same time see all of it or nothing. */
static void write_cached(const char *path, const void *code, size_t size) {
    char other[1100];
    snprintf(other, sizeof other, "%s.%ld", path, (long)getpid());
    FILE *file = fopen(other, "wb");
    if (!file) return; /* then it is compiled again the next time */
    const uint64_t check = hash(code, size);
    int failed = fwrite(&check, sizeof check, 1, file) != 1 || fwrite(code, size, 1, file) != 1;
    failed |= fclose(file) != 0;
    if (failed || rename(other, path) != 0) remove(other);
}

const char *rope_nvrtc_compile(const char *library, const char *source, size_t size, int architecture, void **code) {
    nvrtc_table nvrtc;
    int major, minor;
    char path[1024];
    size_t code_size = 0;
    const char *error = load(library, &nvrtc);
    if (error) return error;
    if (nvrtc.nvrtcVersion(&major, &minor)) return "NVRTC doesn't know its version";
    const int cached = cache_path(path, sizeof path, hash(source, size), architecture, major, minor);
    if (cached && (*code = read_cached(path))) return NULL;
    load_builtins(library, major, minor);
    error = compile(&nvrtc, source, size, architecture, code, &code_size);
    if (!error && cached) write_cached(path, *code, code_size);
    return error;
}
