#include "error.h"

#include <stdarg.h>
#include <stdio.h>

const char *rope_cuda_error(const char *format, ...) {
    static _Thread_local char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return message;
}
