#include "parallel.h"

#include "abi.h"

#include <pthread.h>
#include <stddef.h>

typedef struct {
    int64_t count, grain;
    rope_task *task;
    void *context;
    int failed;
} work;

static void *run(void *argument) {
    work *w = argument;
    w->failed = torch.torch_parallel_for(0, w->count, w->grain, w->task, w->context);
    return NULL;
}

static int forked; /* whether this process is the child of a fork */

static void note_fork(void) { forked = 1; }

int torch_parallel_init(void) { return pthread_atfork(NULL, NULL, note_fork); }

int torch_parallel(int64_t count, int64_t grain, rope_task *task, void *context) {
    work w = {count, grain, task, context, 0};
    pthread_t thread;
    if (count <= grain)
        task(0, count, context);
    else if (!forked)
        run(&w);
    /* OpenMP gives a thread that forks workers which the child lacks, and waits for them forever; a new thread gets
     * workers of its own */
    else if (pthread_create(&thread, NULL, run, &w) == 0)
        pthread_join(thread, NULL);
    else
        task(0, count, context);
    return w.failed;
}
