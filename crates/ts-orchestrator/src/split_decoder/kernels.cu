// SPDX-License-Identifier: MIT OR Apache-2.0
// Decodes chunks of the codec `split` (FORMAT.md) on a GPU. `cargo xtask ptx` compiles this file to
// kernels.ptx. Tests also compile it as C, so it uses only what both languages have.
//
// The host takes chunks apart (steps.rs) and has compared them with their checksums. So no kernel
// checks its input, but none leaves the memory of its arguments.
//
// A decoded plane is first put into the memory of the elements that it is part of: the bytes of `k`
// coded planes of a block of `n` elements of `w` bytes are in its last `k * n` bytes, together for
// each element. `split_merge` replaces them by the elements from front to back. It writes element
// `i` at `w * i`, and later elements still need what is from `(w - k) * n + k * (i + 1)` on, which
// is never below `w * (i + 1)`, because `i + 1 <= n`.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A Huffman code.
struct Code {
    // The weights of the symbols: that of symbol `2 * i` is in the low half of byte `i`.
    u8 weights[128];
    u32 max_bits;
    u32 unused[3];
};

// A run of bytes of a plane.
struct Run {
    // Where the first byte goes, in the slot.
    u64 target;
    // Where the stored bytes or the codewords are, in the piece; or the byte to repeat.
    u32 source;
    // The length of the codewords, in bytes.
    u32 len;
    u32 count;
    // The distance between two bytes in the slot.
    u32 stride;
    // The index of the code, or one of the values below.
    u32 code;
    u32 unused;
};

#define STORED 0xffffffffu
#define REPEATED 0xfffffffeu

// A block of elements, or bytes to copy.
struct Block {
    u64 target;
    u32 count;
    u32 width;
    // Where the planes are, in the piece; `CODED` if they are in the slot.
    u32 planes[8];
};

#define CODED 0xffffffffu

// The entries of the table of a code: the symbol for each `max_bits` bits that begin with its
// codeword, and the length of the codeword in bits, from bit 8 on.
#define TABLE 2048

// Fills the table of each code.
__global__ void split_tables(u64 codes, u64 tables, u64 count)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    const struct Code *code = (const struct Code *)codes + i;
    u16 *table = (u16 *)tables + i * TABLE;
    u32 max_bits = code->max_bits, next[13], w, s, k;
    for (w = 0; w < 13; w++)
        next[w] = 0;
    for (s = 0; s < 256; s++) {
        w = code->weights[s / 2] >> (s % 2 * 4) & 15;
        if (w > 0 && w < 12)
            next[w + 1] += 1u << (w - 1);
    }
    for (w = 1; w < 13; w++)
        next[w] += next[w - 1];
    for (s = 0; s < 256; s++) {
        w = code->weights[s / 2] >> (s % 2 * 4) & 15;
        if (w > 0 && w < 12) {
            u16 entry = (u16)(s | (max_bits + 1 - w) << 8);
            for (k = 0; k < 1u << (w - 1) && next[w] < TABLE; k++)
                table[next[w]++] = entry;
        }
    }
}

// Reads codewords from their end to their beginning.
struct Reader {
    const u32 *piece;
    // The index of the next word to read, plus 1.
    u32 word;
    // The bits that were read, from the highest on, and how many there are.
    u64 bits;
    int have;
};

static __device__ void refill(struct Reader *reader)
{
    if (reader->have <= 32) {
        u32 word = 0;
        if (reader->word > 0)
            word = reader->piece[--reader->word];
        reader->bits |= (u64)word << (32 - reader->have);
        reader->have += 32;
    }
}

static __device__ u8 symbol(struct Reader *reader, const u16 *table, u32 max_bits)
{
    u32 entry = table[reader->bits >> (64 - max_bits)];
    reader->bits <<= entry >> 8;
    reader->have -= (int)(entry >> 8);
    return (u8)entry;
}

// Decodes runs, one in each thread.
__global__ void split_runs(u64 piece_at, u64 codes, u64 tables, u64 runs, u64 slot, u64 count)
{
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    struct Run run = ((const struct Run *)runs)[i];
    const u8 *piece = (const u8 *)piece_at;
    u8 *target = (u8 *)slot + run.target;
    u32 k, stride = run.stride;
    if (run.code == STORED) {
        for (k = 0; k < run.count; k++)
            target[(u64)k * stride] = piece[run.source + k];
        return;
    }
    if (run.code == REPEATED) {
        for (k = 0; k < run.count; k++)
            target[(u64)k * stride] = (u8)run.source;
        return;
    }
    const u16 *table = (const u16 *)tables + (u64)run.code * TABLE;
    u32 max_bits = ((const struct Code *)codes)[run.code].max_bits;
    u32 last = run.source + run.len - 1, end = last * 8, marker = piece[last];
    while (marker > 1) {
        marker >>= 1;
        end++;
    }
    struct Reader reader;
    reader.piece = (const u32 *)piece;
    reader.word = end / 32;
    reader.have = (int)(end % 32);
    reader.bits = 0;
    if (reader.have > 0)
        reader.bits = (u64)reader.piece[reader.word] << (64 - reader.have);
    k = 0;
    if (stride == 1) {
        for (; k < run.count && ((u64)(target + k) & 3) != 0; k++) {
            refill(&reader);
            target[k] = symbol(&reader, table, max_bits);
        }
        for (; k + 4 <= run.count; k += 4) {
            // A refill is enough for two codewords of at most 11 bits.
            u32 four;
            refill(&reader);
            four = symbol(&reader, table, max_bits);
            four |= (u32)symbol(&reader, table, max_bits) << 8;
            refill(&reader);
            four |= (u32)symbol(&reader, table, max_bits) << 16;
            four |= (u32)symbol(&reader, table, max_bits) << 24;
            *(u32 *)(target + k) = four;
        }
    }
    for (; k < run.count; k++) {
        refill(&reader);
        target[(u64)k * stride] = symbol(&reader, table, max_bits);
    }
}

// The number of elements that a thread merges before it waits for the others.
#define EACH 4

// What the threads of a block do before they wait for each other, and what each of them keeps
// meanwhile. On the host, a phase is a loop over the threads.
#ifndef PHASE
#define PHASE
#define KEPT u64 kept[EACH]
#endif

// Returns the bytes of element `i`, rotated back.
static __device__ __forceinline__ u64 element(const u8 *piece, const struct Block *block,
                                              const u8 *coded, u32 width, u32 coded_count, u32 i)
{
    u64 value = 0;
    u32 p, at = 0;
#pragma unroll 2
    for (p = 0; p < width; p++) {
        u8 byte;
        if (block->planes[p] == CODED)
            byte = coded[(u64)i * coded_count + at++];
        else
            byte = piece[block->planes[p] + i];
        value |= (u64)byte << (8 * p);
    }
    if (width == 1)
        return value;
    return value >> 1 | value << (8 * width - 1);
}

static __device__ __forceinline__ void merge(const u8 *piece, const struct Block *block, u8 *target,
                                             u32 width)
{
    u32 p, coded_count = 0, begin;
    KEPT;
    for (p = 0; p < width; p++)
        coded_count += block->planes[p] == CODED;
    const u8 *coded = target + (u64)(width - coded_count) * block->count;
    for (begin = 0; begin < block->count; begin += EACH * blockDim.x) {
        PHASE for (u32 k = 0; k < EACH; k++) {
            u32 i = begin + k * blockDim.x + threadIdx.x;
            if (i < block->count)
                kept[k] = element(piece, block, coded, width, coded_count, i);
        }
        __syncthreads();
        PHASE for (u32 k = 0; k < EACH; k++) {
            u32 i = begin + k * blockDim.x + threadIdx.x;
            if (i >= block->count)
                continue;
            if (width == 1)
                target[i] = (u8)kept[k];
            else if (width == 2)
                ((u16 *)target)[i] = (u16)kept[k];
            else if (width == 4)
                ((u32 *)target)[i] = (u32)kept[k];
            else
                ((u64 *)target)[i] = kept[k];
        }
        __syncthreads();
    }
}

// Merges the planes of blocks, or copies bytes, one block in each block of threads.
__global__ void split_merge(u64 piece_at, u64 blocks, u64 slot)
{
    struct Block block = ((const struct Block *)blocks)[blockIdx.x];
    const u8 *piece = (const u8 *)piece_at;
    u8 *target = (u8 *)slot + block.target;
    // Most elements have two bytes. A constant width lets the compiler unroll loops.
    if (block.width == 2)
        merge(piece, &block, target, 2);
    else
        merge(piece, &block, target, block.width);
}
