// SPDX-License-Identifier: MIT OR Apache-2.0
// NVIDIA's cuFile library on the emulated driver. Reads run as work of its streams.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    int cufile, cuda;
} status;

static const status success = {0, 0}, failed = {5001, 0};

// The number of reads until one fails; negative for never.
static long reads_left = -1;

// The number of reads to refuse.
static long refusals = 0;

// Refuses the next `count` reads.
int emulatedRefusals(long count)
{
    __atomic_store_n(&refusals, count, __ATOMIC_SEQ_CST);
    return 0;
}

// Makes a read fail after this many others.
int emulatedReadsLeft(long count)
{
    __atomic_store_n(&reads_left, count, __ATOMIC_SEQ_CST);
    return 0;
}

static void *driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : 0;
}

status cuFileDriverOpen(void) { return driver("emulatedLocate") ? success : failed; }

status cuFileDriverGetProperties(void *properties)
{
    // The version of nvidia-fs.
    unsigned version[2] = {2, 20};
    memcpy(properties, version, sizeof version);
    return success;
}

struct descriptor {
    int kind;
    union {
        int file;
        void *pointer;
    } handle;
};

status cuFileHandleRegister(void **handle, struct descriptor *descriptor)
{
    int *file = malloc(sizeof *file);
    *file = descriptor->handle.file;
    *handle = file;
    return success;
}

void cuFileHandleDeregister(void *handle) { free(handle); }

// Reads to memory of the host. The file is open for direct reads, which need aligned memory.
static ssize_t read_all(int file, char *memory, size_t len, off_t offset)
{
    size_t start = offset % 4096, whole = (start + len + 4095) / 4096 * 4096;
    char *aligned;
    if (posix_memalign((void **)&aligned, 4096, whole))
        return -1;
    ssize_t got = pread(file, aligned, whole, offset - start);
    if (got >= 0) {
        got = got < (ssize_t)start ? 0 : got - (ssize_t)start;
        got = got < (ssize_t)len ? got : (ssize_t)len;
        memcpy(memory, aligned + start, got);
    }
    free(aligned);
    return got;
}

ssize_t cuFileRead(void *handle, void *memory, size_t len, off_t offset, off_t memory_offset)
{
    return read_all(*(int *)handle, (char *)memory + memory_offset, len, offset);
}

struct read {
    int file;
    char *memory;
    size_t *len;
    off_t *offset, *memory_offset;
    ssize_t *done;
};

static void run(void *of)
{
    struct read *read = of;
    char *(*locate)(void *, size_t) = driver("emulatedLocate");
    char *memory = locate(read->memory + *read->memory_offset, *read->len);
    if (!memory)
        *read->done = -5011;
    else if (__atomic_load_n(&reads_left, __ATOMIC_SEQ_CST) >= 0 &&
             __atomic_fetch_sub(&reads_left, 1, __ATOMIC_SEQ_CST) == 0)
        *read->done = -5010;
    else
        *read->done = read_all(read->file, memory, *read->len, *read->offset);
    free(read);
}

status cuFileReadAsync(void *handle, void *memory, size_t *len, off_t *offset, off_t *memory_offset,
                       ssize_t *done, void *stream)
{
    int (*launch)(void *, void (*)(void *), void *) = driver("cuLaunchHostFunc");
    if (__atomic_load_n(&refusals, __ATOMIC_SEQ_CST) > 0) {
        __atomic_fetch_sub(&refusals, 1, __ATOMIC_SEQ_CST);
        return failed;
    }
    struct read *read = malloc(sizeof *read);
    *read = (struct read){*(int *)handle, memory, len, offset, memory_offset, done};
    if (launch(stream, run, read) == 0)
        return success;
    free(read);
    return failed;
}
