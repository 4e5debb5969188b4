/* Errors of the CUDA host code, as text. */
#ifndef ROPE_CUDA_ERROR_H
#define ROPE_CUDA_ERROR_H

/* An error of the thread, formatted; valid until the thread's next. */
const char *rope_cuda_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
