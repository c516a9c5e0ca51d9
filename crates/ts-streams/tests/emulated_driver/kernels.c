// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs kernels on the host: those of KERNELS, which is CUDA C that is also C, and one for the tests
// of this crate.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline

struct dimension {
    unsigned x;
};

static __thread struct dimension blockIdx, threadIdx, blockDim;

// The threads of a block that wait for each other. There are fewer than were asked for, because
// each is one of the system.
#define THREADS 2

// Where the threads of a block wait. They do so often, and for a short time.
struct barrier {
    unsigned waiting, round;
};

static __thread struct barrier *barrier;

static void wait_for_all(void)
{
    unsigned round = __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == THREADS) {
        barrier->waiting = 0;
        __atomic_add_fetch(&barrier->round, 1, __ATOMIC_RELEASE);
        return;
    }
    for (unsigned tries = 0; __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE) == round; tries++)
        if (tries > 1000)
            sched_yield();
}

#define __syncthreads() wait_for_all()

#include KERNELS

// Adds `value` to each of `count` numbers.
static void add_to_all(u64 numbers, u64 count, u64 value)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        ((u64 *)numbers)[i] += value;
}

static void run_add_to_all(const u64 *a) { add_to_all(a[0], a[1], a[2]); }
static void run_split_tables(const u64 *a) { split_tables(a[0], a[1], a[2]); }
static void run_split_runs(const u64 *a) { split_runs(a[0], a[1], a[2], a[3], a[4], a[5]); }
static void run_split_merge(const u64 *a) { split_merge(a[0], a[1], a[2]); }

struct kernel {
    const char *name;
    int parameters;
    // Whether the threads of a block wait for each other.
    int waits;
    void (*run)(const u64 *arguments);
};

static const struct kernel kernels[] = {
    {"add_to_all", 3, 0, run_add_to_all},
    {"split_tables", 3, 0, run_split_tables},
    {"split_runs", 6, 0, run_split_runs},
    {"split_merge", 3, 1, run_split_merge},
};

const struct kernel *find_kernel(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return 0;
}

struct thread {
    const struct kernel *kernel;
    unsigned blocks, number;
    const u64 *arguments;
    struct barrier *barrier;
};

static void *run_thread(void *of)
{
    struct thread *own = of;
    barrier = own->barrier;
    blockDim.x = THREADS;
    threadIdx.x = own->number;
    for (blockIdx.x = 0; blockIdx.x < own->blocks; blockIdx.x++) {
        own->kernel->run(own->arguments);
        wait_for_all();
    }
    return 0;
}

void run_kernel(const struct kernel *kernel, unsigned blocks, unsigned threads,
                const u64 *arguments)
{
    if (kernel->waits) {
        pthread_t handles[THREADS];
        struct thread each[THREADS];
        struct barrier all = {0, 0};
        for (unsigned i = 0; i < THREADS; i++) {
            each[i] = (struct thread){kernel, blocks, i, arguments, &all};
            pthread_create(&handles[i], 0, run_thread, &each[i]);
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(handles[i], 0);
        return;
    }
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel->run(arguments);
}
