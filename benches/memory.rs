// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the pools with other allocators: `cargo xtask bench memory`.
// `criterion_group!` generates undocumented items. A benchmark that cannot run may panic.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use tensorstream::pool::{BlockPool, OrderedOptions, PoolConfig, StreamOrderedPool};
use tensorstream::streams::{CpuDevice, Device, StreamPriority};

/// A linear congruential generator, with the constants of Knuth's MMIX.
struct Random(u64);

impl Random {
    /// Returns a number in `0..n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

fn pool(device: &CpuDevice) -> StreamOrderedPool<CpuDevice> {
    let options = OrderedOptions::default().with_segment_bytes(1 << 30);
    StreamOrderedPool::new(device.clone(), options)
}

/// The sizes of the blocks, in bytes.
const SIZES: [usize; 7] = [512, 4096, 20_000, 100_000, 300_000, 7_000, 65_536];

/// Prefetches a value into the cache. Does nothing on processors other than x86-64.
fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: x86-64 always has SSE, and prefetching from a valid reference has no other effect.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(value).cast(),
        );
    }
    black_box(value);
}

/// Measures allocating a block and then freeing a random live block, which the new one replaces.
/// The new block has the same size and stream as the freed block.
fn allocate_and_free(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate+free");
    let device = CpuDevice::with_threads(1).unwrap();
    for (live, streams) in [(1000usize, 1usize), (1000, 8), (100_000, 1), (100_000, 8)] {
        let pool = pool(&device);
        let streams: Vec<_> =
            (0..streams).map(|_| device.create_stream(StreamPriority::Normal).unwrap()).collect();
        let mut random = Random(1);
        let mut blocks: Vec<_> = (0..live)
            .map(|i| pool.allocate_for_stream(SIZES[i % 7], &streams[i % streams.len()]).unwrap())
            .collect();
        let name = format!("{live} live blocks, {} streams", streams.len());
        group.bench_function(BenchmarkId::new("ts-pool", &name), |b| {
            b.iter(|| {
                let i = random.below(live);
                blocks[i] =
                    pool.allocate_for_stream(SIZES[i % 7], &streams[i % streams.len()]).unwrap();
            });
        });
        // A long table of handles does not fit into the caches. The benchmark above waits for the
        // handles that it replaces. This one prefetches the handles, and so does not wait.
        let mut next: VecDeque<_> = [random.below(live), random.below(live)].into();
        group.bench_function(
            BenchmarkId::new("ts-pool, handles prefetched two ahead", &name),
            |b| {
                b.iter(|| {
                    next.push_back(random.below(live));
                    prefetch(&blocks[next[2]]);
                    let i = next.pop_front().unwrap();
                    blocks[i] = pool
                        .allocate_for_stream(SIZES[i % 7], &streams[i % streams.len()])
                        .unwrap();
                });
            },
        );
        if streams.len() == 1 {
            let allocator = Mutex::new(offset_allocator::Allocator::<u32>::with_max_allocs(
                u32::MAX / 2,
                400_000,
            ));
            let granules = |i: usize| SIZES[i % 7].div_ceil(512) as u32;
            let mut blocks: Vec<_> = (0..live)
                .map(|i| allocator.lock().unwrap().allocate(granules(i)).unwrap())
                .collect();
            group.bench_function(BenchmarkId::new("offset-allocator, in a mutex", &name), |b| {
                b.iter(|| {
                    let i = random.below(live);
                    let new = allocator.lock().unwrap().allocate(granules(i)).unwrap();
                    let old = std::mem::replace(&mut blocks[i], new);
                    allocator.lock().unwrap().free(old);
                });
            });
        }
    }
    group.finish();
}

/// Runs RMM's benchmark `random_allocations`, which allocates or frees at random. Sizes are at most
/// 1 MiB.
fn random_allocations(c: &mut Criterion) {
    let mut group = c.benchmark_group("random allocations of up to 1 MiB");
    let device = CpuDevice::with_threads(1).unwrap();
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    for count in [1000usize, 10_000] {
        let pool = pool(&device);
        // Frees count too. Each iteration frees all of its blocks, the last ones at its end.
        group.throughput(Throughput::Elements(2 * count as u64)).sample_size(50);
        group.bench_function(BenchmarkId::new("ts-pool", count), |b| {
            b.iter(|| {
                let (mut random, mut live, mut allocated) = (Random(1), Vec::new(), 0);
                while allocated < count {
                    if live.is_empty() || random.below(2) == 0 {
                        let bytes = 1 + random.below(1 << 20);
                        live.push(pool.allocate_for_stream(black_box(bytes), &stream).unwrap());
                        allocated += 1;
                    } else {
                        drop(live.swap_remove(random.below(live.len())));
                    }
                }
            });
        });
        group.bench_function(BenchmarkId::new("offset-allocator, in a mutex", count), |b| {
            let allocator = Mutex::new(offset_allocator::Allocator::<u32>::with_max_allocs(
                u32::MAX / 2,
                400_000,
            ));
            b.iter(|| {
                let (mut random, mut live, mut allocated) = (Random(1), Vec::new(), 0);
                while allocated < count {
                    if live.is_empty() || random.below(2) == 0 {
                        let granules = (1 + random.below(1 << 20)).div_ceil(512) as u32;
                        live.push(allocator.lock().unwrap().allocate(black_box(granules)).unwrap());
                        allocated += 1;
                    } else {
                        let gone = live.swap_remove(random.below(live.len()));
                        allocator.lock().unwrap().free(gone);
                    }
                }
                live.into_iter().for_each(|block| allocator.lock().unwrap().free(block));
            });
        });
    }
    group.finish();
}

/// Measures acquiring and releasing a block, on one thread and on two threads per core.
fn blocks(c: &mut Criterion) {
    let device = CpuDevice::with_threads(1).unwrap();
    let pool = BlockPool::new(device, PoolConfig::default()).unwrap();
    let free: Vec<_> = (0..64).map(|_| pool.acquire(100_000).unwrap()).collect();
    drop(free);
    let queue = ArrayQueue::new(64);
    (0..64usize).for_each(|i| queue.push(i).unwrap());
    let list = Mutex::new((0..64usize).collect::<Vec<_>>());
    let threads = 2 * std::thread::available_parallelism().unwrap().get();
    let mut group = c.benchmark_group("acquire+release of a block");
    let mut compare = |name: &str, work: &(dyn Fn() + Sync)| {
        group.bench_function(BenchmarkId::new(name, "1 thread"), |b| b.iter(work));
        group.bench_function(BenchmarkId::new(name, format!("{threads} threads")), |b| {
            b.iter_custom(|count| {
                let each = count.div_ceil(threads as u64);
                let began = Instant::now();
                std::thread::scope(|scope| {
                    (0..threads).for_each(|_| drop(scope.spawn(|| (0..each).for_each(|_| work()))));
                });
                began.elapsed()
            });
        });
    };
    compare("ts-pool", &|| drop(black_box(pool.acquire(black_box(100_000)).unwrap())));
    compare("ArrayQueue of crossbeam", &|| queue.push(black_box(queue.pop().unwrap())).unwrap());
    compare("a Vec in a mutex", &|| {
        let taken = list.lock().unwrap().pop().unwrap();
        list.lock().unwrap().push(black_box(taken));
    });
    group.finish();
}

criterion_group!(memory, allocate_and_free, random_allocations, blocks);
criterion_main!(memory);
