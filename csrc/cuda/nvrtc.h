/* The CUDA kernels from source, by NVRTC: for builds made where there was no nvcc. */
#ifndef ROPE_NVRTC_H
#define ROPE_NVRTC_H

#include <stddef.h>

/* From source to the code of one architecture (major * 10 + minor), cached on disk; NULL, or an error. Free *code. */
const char *rope_nvrtc_compile(const char *library, const char *source, size_t size, int architecture, void **code);

#endif
