// SPDX-License-Identifier: MIT OR Apache-2.0
// Runs kernels on the host: those of KERNELS, which is CUDA C that is also C, and one for the tests
// of this crate.

#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline

struct dimension {
    unsigned x;
};

static __thread struct dimension blockIdx, threadIdx, blockDim;

// The threads of a block run one after the other. Where they wait for each other, KERNELS is
// divided into phases, in each of which all of them run; each keeps something from phase to phase.
#define MOST_THREADS 1024
#define PHASE for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
#define KEPT static __thread u64 all_kept[MOST_THREADS][EACH]
#define kept all_kept[threadIdx.x]
#define __syncthreads()

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
    // Whether the kernel is divided into phases.
    int has_phases;
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

void run_kernel(const struct kernel *kernel, unsigned blocks, unsigned threads,
                const u64 *arguments)
{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        if (kernel->has_phases)
            kernel->run(arguments);
        else
            PHASE kernel->run(arguments);
    }
}
