/* A CUDA driver without a device, as a library: the functions of csrc/cuda/driver.h, with cuda/kernels.cu compiled
 * in. "Device memory" is the process's own. cuLaunchKernel checks the launch against the limits of real devices and
 * runs the blocks one after the other, the threads of a block as coroutines.
 *
 * Tests steer it by emulation_set and ask it by emulation_get. */
#include "cuda/driver.h"
#include "cuda/kernels.cu"

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(at, size) ((void)(at), (void)(size))
#define __asan_unpoison_memory_region(at, size) ((void)(at), (void)(size))
#endif

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, NO_BINARY = 209, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
enum { MAX_THREADS = 1024, STACK = 64 * 1024, WARP = 32, MEMORY = 48 * 1024, PARAMETERS = 4096 };

/* ---- what tests set and ask ---- */
static struct {
    const char *name;
    long value, reset;
} settings[] = {
    {"seed", 0, 0},            /* of the order in which blocks and threads run; 0: as numbered */
    {"max_grid", 0, 0},        /* blocks of a grid that the device says it takes; 0: 2^31 - 1 */
    {"devices", 2, 2},         /* how many there are */
    {"fail_init", 0, 0},       /* the error of cuInit ... */
    {"fail_load", 0, 0},       /* ... of cuModuleLoadData */
    {"fail_launch", 0, 0},     /* ... of cuLaunchKernel */
    {"capability", 90, 90},    /* major * 10 + minor */
    {"launches", 0, 0},        /* counts */
    {"blocks", 0, 0},          /* of the last launch */
    {"depth", 0, 0},           /* contexts that were made current and not put back */
    {"device", -1, -1},        /* whose context was current at the last launch */
    {"unrelaxed_loads", 0, 0}, /* modules loaded in a thread whose stream captures forbid it */
    {NULL, 0, 0},
};

static long *setting(const char *name) {
    for (int i = 0; settings[i].name; i++)
        if (strcmp(settings[i].name, name) == 0) return &settings[i].value;
    fprintf(stderr, "no setting %s\n", name);
    abort();
}

EXPORT void emulation_set(const char *name, long value) { *setting(name) = value; }
EXPORT long emulation_get(const char *name) { return *setting(name); }
EXPORT void emulation_reset(void) {
    for (int i = 0; settings[i].name; i++)
        settings[i].value = settings[i].reset;
}

static char message[512];
#define FAIL(code, ...) (snprintf(message, sizeof message, __VA_ARGS__), code)

/* ---- coroutines ---- */
typedef enum { READY, AT_BARRIER, AT_SHUFFLE, DONE } state;

typedef struct {
    ucontext_t context;
    jmp_buf jump;
    int started;
} coroutine;

typedef struct {
    coroutine coroutine;
    emulation_index index;
    state state;
    int line;
    unsigned mask, delta;
    int width;
    size_t size;
    uint64_t value;
} thread;

typedef void run_kernel(const void *parameters);

emulation_index emulation_thread, emulation_block, emulation_threads, emulation_blocks;
uint4 emulation_memory[MEMORY / sizeof(uint4)];

static coroutine scheduler = {.started = 1};
static thread threads[MAX_THREADS], *now;
static char *stacks;
static run_kernel *kernel_now;
static const void *parameters_now;

/* Not swapcontext, which asks the kernel for the signal mask each time, where AddressSanitizer need not follow. */
static void switch_to(coroutine *from, coroutine *to) {
#if defined(__SANITIZE_ADDRESS__)
    swapcontext(&from->context, &to->context);
#else
    if (_setjmp(from->jump)) return;
    if (to->started) _longjmp(to->jump, 1);
    to->started = 1;
    setcontext(&to->context);
#endif
}

/* Serves one block after the other. */
static void start(void) {
    for (;;) {
        kernel_now(parameters_now);
        now->state = DONE;
        switch_to(&now->coroutine, &scheduler);
    }
}

static void wait_as(state waiting, int line) {
    thread *const me = now;
    me->state = waiting;
    me->line = line;
    switch_to(&me->coroutine, &scheduler);
}

void emulation_barrier(int line) { wait_as(AT_BARRIER, line); }

void emulation_shuffle_down(void *value, size_t size, unsigned mask, unsigned delta, int width, int line) {
    thread *const me = now;
    me->mask = mask, me->delta = delta, me->width = width, me->size = size;
    me->value = 0;
    memcpy(&me->value, value, size);
    wait_as(AT_SHUFFLE, line);
    memcpy(value, &me->value, size);
}

/* Lets the lanes of a warp go on that all wait for the same shuffle. */
static int shuffle_warp(thread *warp) {
    uint64_t values[WARP];
    for (int lane = 0; lane < WARP; lane++) {
        const thread *t = warp + lane;
        if (t->state != AT_SHUFFLE || t->line != warp->line || t->mask != 0xffffffff || t->width != warp->width ||
            t->delta != warp->delta || t->size != warp->size)
            return 0;
        values[lane] = t->value;
    }
    for (int lane = 0; lane < WARP; lane++) {
        const unsigned from = (unsigned)(lane % warp->width) + warp->delta;
        if (from < (unsigned)warp->width) warp[lane].value = values[(unsigned)lane + warp->delta];
        warp[lane].state = READY;
    }
    return 1;
}

static uint64_t random_state;
static unsigned random_below(unsigned count) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((random_state >> 33) % count);
}

static void shuffle_order(unsigned *order, unsigned count) {
    for (unsigned i = 0; i < count; i++)
        order[i] = i;
    for (unsigned i = count; random_state && i > 1; i--) {
        const unsigned other = random_below(i), last = order[i - 1];
        order[i - 1] = order[other];
        order[other] = last;
    }
}

/* Apart, as GCC takes getcontext for a setjmp that may clobber the variables around it */
static void prepare(coroutine *c, char *stack) {
    getcontext(&c->context);
    c->context.uc_stack.ss_sp = stack;
    c->context.uc_stack.ss_size = STACK;
    makecontext(&c->context, start, 0);
    c->started = 0;
}

static int run_block(size_t memory) {
    const unsigned count = emulation_threads.x;
    unsigned order[MAX_THREADS];
    if (!stacks) stacks = malloc((size_t)MAX_THREADS * STACK);
    if (!stacks) return FAIL(LAUNCH_FAILED, "no memory for stacks");
    __asan_unpoison_memory_region(emulation_memory, MEMORY);
    memset(emulation_memory, 0xff, MEMORY);
    __asan_poison_memory_region((char *)emulation_memory + memory, MEMORY - memory);
    for (unsigned i = 0; i < count; i++) {
        thread *t = threads + i;
        if (t->state != DONE || !t->coroutine.context.uc_stack.ss_sp) /* new, or left where a launch failed */
            prepare(&t->coroutine, stacks + (size_t)i * STACK);
        t->index = (emulation_index){i, 0, 0};
        t->state = READY;
    }
    int result = OK;
    for (;;) {
        unsigned done = 0, at_barrier = 0, moved = 0;
        shuffle_order(order, count);
        for (unsigned i = 0; i < count; i++) {
            now = threads + order[i];
            if (now->state != READY) continue;
            emulation_thread = now->index;
            switch_to(&scheduler, &now->coroutine);
        }
        for (unsigned first = 0; first < count; first += WARP)
            moved += (unsigned)shuffle_warp(threads + first);
        for (unsigned i = 0; i < count; i++) {
            done += threads[i].state == DONE;
            at_barrier += threads[i].state == AT_BARRIER && threads[i].line == threads[0].line;
        }
        if (done == count) break;
        if (at_barrier == count) {
            for (unsigned i = 0; i < count; i++)
                threads[i].state = READY;
            continue;
        }
        if (!moved) {
            unsigned other = 0;
            while (other + 1 < count && threads[other].state == threads[0].state &&
                   threads[other].line == threads[0].line)
                other++;
            static const char *const names[] = {"runs", "is at a barrier", "is at a shuffle", "has ended"};
            result = FAIL(LAUNCH_FAILED, "divergent threads: thread 0 %s (line %d), thread %u %s (line %d)",
                          names[threads[0].state], threads[0].line, other, names[threads[other].state],
                          threads[other].line);
            break;
        }
    }
    __asan_unpoison_memory_region(emulation_memory, MEMORY);
    return result;
}

/* ---- kernels by name ---- */
#define RUNS(kernel, type)                                                                                           \
    static void run_##kernel(const void *parameters) {                                                               \
        _Static_assert(sizeof(type) <= PARAMETERS, "kernel parameters");                                             \
        kernel(*(const type *)parameters);                                                                           \
    }
#define ROWS_OF(X, op, type) X(op##_##type##_interleaved) X(op##_##type##_halves) X(op##_##type##_scalar)
#define ROWS_OF_OP(X, op) ROWS_OF(X, op, f32) ROWS_OF(X, op, f64) ROWS_OF(X, op, f16) ROWS_OF(X, op, bf16)
#define ROWS(X) ROWS_OF_OP(X, rope_rotate) ROWS_OF_OP(X, rope_backward)

RUNS(rope_sum, rope_cuda_sum)
RUNS(rope_angles, rope_cuda_angles_plan)
#define X(kernel) RUNS(kernel, rope_cuda_plan)
ROWS(X)
#undef X

typedef struct {
    const char *name;
    run_kernel *run;
    size_t size;
} kernel;

static const kernel kernels[] = {{"rope_sum", run_rope_sum, sizeof(rope_cuda_sum)},
                                 {"rope_angles", run_rope_angles, sizeof(rope_cuda_angles_plan)},
#define X(kernel) {#kernel, run_##kernel, sizeof(rope_cuda_plan)},
                                 ROWS(X)
#undef X
};

/* ---- the driver ---- */
static int contexts[16];
static _Thread_local int *stack[16];
static _Thread_local int capture_mode;
static int module;

EXPORT int cuInit(unsigned flags) {
    (void)flags;
    const int error = (int)*setting("fail_init");
    return error ? FAIL(error, "as the test asked") : OK;
}
EXPORT int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == NO_DEVICE     ? "CUDA_ERROR_NO_DEVICE"
            : error == NO_BINARY     ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : error == NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
            : error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                     : "CUDA_ERROR_UNKNOWN";
    return OK;
}
EXPORT int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = message;
    return OK;
}
EXPORT int cuDeviceGet(cu_device *device, int index) {
    *device = index;
    return index < *setting("devices") ? OK : FAIL(101, "no such device");
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, cu_device device) {
    (void)device;
    const long capability = *setting("capability"), max_grid = *setting("max_grid");
    switch (attribute) {
    case CU_COMPUTE_CAPABILITY_MAJOR: *value = (int)(capability / 10); return OK;
    case CU_COMPUTE_CAPABILITY_MINOR: *value = (int)(capability % 10); return OK;
    case CU_MAX_GRID_DIM_X: *value = max_grid ? (int)max_grid : INT32_MAX; return OK;
    }
    return FAIL(INVALID_VALUE, "no such attribute");
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, cu_device device) {
    *context = contexts + device;
    return OK;
}
EXPORT int cuCtxPushCurrent_v2(void *context) {
    long *const depth = setting("depth");
    if (*depth >= 16) return FAIL(INVALID_VALUE, "contexts were not popped");
    stack[(*depth)++] = context;
    return OK;
}
EXPORT int cuCtxPopCurrent_v2(void **context) {
    long *const depth = setting("depth");
    if (*depth <= 0) return FAIL(INVALID_VALUE, "no context to pop");
    *context = stack[--*depth];
    return OK;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}
EXPORT int cuModuleLoadData(void **to, const void *image) {
    const int error = (int)*setting("fail_load");
    *setting("unrelaxed_loads") += capture_mode != CU_CAPTURE_MODE_RELAXED;
    if (!image || *setting("depth") == 0) return FAIL(INVALID_VALUE, "no image or no context");
    *to = &module;
    return error ? FAIL(error, "as the test asked") : OK;
}
EXPORT int cuModuleGetFunction(void **function, void *of, const char *name) {
    if (of != &module) return FAIL(INVALID_VALUE, "no such module");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) {
            const kernel *const found = kernels + i;
            memcpy(function, &found, sizeof found);
            return OK;
        }
    return FAIL(NOT_FOUND, "no kernel %s", name);
}
EXPORT int cuMemsetD8Async(unsigned long long at, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    if (*setting("depth") == 0) return FAIL(INVALID_VALUE, "no context");
    memset((void *)(uintptr_t)at, value, bytes);
    return OK;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned memory, void *stream, void **parameters,
                          void **extra) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static unsigned char copy[PARAMETERS] __attribute__((aligned(16)));
    const kernel *const of = function;
    const int error = (int)*setting("fail_launch");
    const long max_grid = *setting("max_grid") ? *setting("max_grid") : INT32_MAX, depth = *setting("depth");
    if (error) return FAIL(error, "as the test asked");
    if (depth != 1) return FAIL(INVALID_VALUE, "%ld contexts are current", depth);
    if (stream || extra || !parameters) return FAIL(INVALID_VALUE, "stream or parameters");
    if (grid_x < 1 || grid_x > max_grid || grid_y != 1 || grid_z != 1)
        return FAIL(INVALID_VALUE, "grid of %u x %u x %u blocks", grid_x, grid_y, grid_z);
    if (block_x < 1 || block_x > ROPE_CUDA_THREADS || block_x % WARP || block_y != 1 || block_z != 1)
        return FAIL(INVALID_VALUE, "block of %u x %u x %u threads", block_x, block_y, block_z);
    if (memory > MEMORY) return FAIL(INVALID_VALUE, "%u bytes of shared memory", memory);

    pthread_mutex_lock(&lock);
    *setting("launches") += 1;
    *setting("blocks") = grid_x;
    *setting("device") = (long)(stack[0] - contexts);
    random_state = (uint64_t)*setting("seed");
    memcpy(copy, parameters[0], of->size);
    kernel_now = of->run;
    parameters_now = copy;
    emulation_threads = (emulation_index){block_x, 1, 1};
    emulation_blocks = (emulation_index){grid_x, 1, 1};
    int result = OK;
    unsigned *order = malloc(grid_x * sizeof *order);
    if (order) shuffle_order(order, grid_x);
    for (unsigned i = 0; i < grid_x && !result; i++) {
        emulation_block = (emulation_index){order ? order[i] : i, 0, 0};
        result = run_block(memory);
    }
    free(order);
    pthread_mutex_unlock(&lock);
    return result;
}
