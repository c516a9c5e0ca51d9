// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of `BlockPool` and `PinnedMemoryPool`.

use std::sync::mpsc;

use proptest::prelude::*;
use ts_pool::{BlockPool, ErrorKind, PinnedMemoryPool, PoolConfig, PooledBuffer};
use ts_streams::{CpuDevice, Device, HostFn, SimDevice, SimOptions, Stream, StreamPriority};

const MIB: usize = 1 << 20;

fn small() -> PoolConfig {
    PoolConfig::default()
        .with_pool_bytes(4 * MIB)
        .with_min_block_bytes(4096)
        .with_max_block_bytes(MIB)
        .with_classes(9)
        .with_preallocate(false)
}

#[test]
fn a_dropped_block_is_reused() {
    let device = SimDevice::new(SimOptions::default());
    let pool = BlockPool::new(device.clone(), small()).unwrap();
    let first = pool.acquire(5000).unwrap();
    assert_eq!((first.len(), first.block_bytes()), (5000, 8192));
    let range = first.range();
    drop(first);
    assert_eq!(pool.acquire(8000).unwrap().range().address(), range.address());
    let stats = pool.stats();
    assert_eq!((stats.hits, stats.misses, stats.returns, stats.drops), (1, 1, 2, 0));
    assert_eq!(
        (stats.in_use_bytes, stats.available_bytes, stats.high_water_bytes),
        (0, 8192, 8192)
    );
    assert_eq!((stats.in_use_buffers, stats.available_buffers), (0, 1));
    assert_eq!(format!("{:.1}%", stats.hit_rate()), "50.0%");
    // A block larger than `max_block_bytes` is not kept.
    let large = pool.acquire(2 * MIB).unwrap();
    assert_eq!((pool.stats().in_use_buffers, pool.stats().available_buffers), (1, 1));
    drop(large);
    assert_eq!((pool.stats().drops, pool.stats().pool_bytes), (1, 8192));
    assert_eq!((pool.stats().in_use_buffers, pool.stats().available_buffers), (0, 1));
    pool.clear();
    assert_eq!(device.memory().in_use_bytes, 0);
}

#[test]
fn free_blocks_are_evicted_to_make_room() {
    let device = SimDevice::new(SimOptions::default());
    let pool = BlockPool::new(device.clone(), small()).unwrap();
    let blocks: Vec<_> = (0..4).map(|_| pool.acquire(MIB).unwrap()).collect();
    let error = pool.acquire(4096).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Full && error.to_string().contains("4194304 are in use"),
        "{error}"
    );
    drop(blocks);
    let small: Vec<_> = (0..100).map(|_| pool.acquire(4096).unwrap()).collect();
    assert_eq!(pool.stats().drops, 1);
    // The failed request is a miss, but no buffer.
    assert_eq!((pool.stats().in_use_buffers, pool.stats().available_buffers), (100, 3));
    drop(small);
    assert!(pool.stats().pool_bytes <= 4 * MIB);
    for bytes in [usize::MAX, usize::MAX - 5000, usize::MAX / 2] {
        assert_eq!(pool.acquire(bytes).unwrap_err().kind(), ErrorKind::Full);
    }
    // The pool also evicts free blocks if the device is full.
    let device = SimDevice::new(SimOptions::default().with_total_bytes(MIB + 5000));
    let pool = BlockPool::new(device, self::small()).unwrap();
    drop(pool.acquire(MIB).unwrap());
    drop(pool.acquire(MIB / 2).unwrap());
    assert_eq!(pool.stats().drops, 1);
}

#[test]
fn configurations_have_the_documented_sizes() {
    let device = CpuDevice::with_threads(1).unwrap();
    for (config, first) in [
        (PoolConfig::default(), 64 << 10),
        (PoolConfig::high_throughput(), 1 << 20),
        (PoolConfig::low_memory(), 16 << 10),
    ] {
        let pool = BlockPool::new(device.clone(), config).unwrap();
        assert_eq!(pool.acquire(1).unwrap().block_bytes(), first);
        let largest = pool.acquire(config.max_block_bytes).unwrap();
        assert_eq!(largest.block_bytes(), config.max_block_bytes);
        assert_eq!(pool.stats().hits > 0, config.preallocate);
        assert!(pool.stats().pool_bytes <= config.pool_bytes);
    }
}

#[test]
fn is_pinned_depends_on_the_device() {
    let cpu = PinnedMemoryPool::new(CpuDevice::with_threads(1).unwrap(), PoolConfig::low_memory())
        .unwrap();
    assert!(!cpu.is_pinned());
    let simulated =
        PinnedMemoryPool::new(SimDevice::new(SimOptions::default()), PoolConfig::low_memory())
            .unwrap();
    assert!(simulated.is_pinned());
    assert_eq!(simulated.acquire(100).unwrap().len(), 100);
    assert_eq!((simulated.stats().hits, simulated.stats().misses), (1, 1));
}

#[test]
fn release_after_waits_for_the_stream() {
    let device = CpuDevice::with_threads(1).unwrap();
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let pool = BlockPool::new(device, small()).unwrap();
    let (open, gate) = mpsc::channel::<()>();
    stream
        .launch_host_fn(HostFn::new(move || {
            let _ = gate.recv();
        }))
        .unwrap();
    pool.acquire(4096).unwrap().release_after(&stream).unwrap();
    assert_eq!(pool.stats().in_use_bytes, 4096);
    drop(open);
    stream.synchronize().unwrap();
    assert_eq!((pool.stats().in_use_bytes, pool.stats().returns), (0, 1));
}

#[test]
fn threads_never_share_a_block() {
    let pool = BlockPool::new(CpuDevice::with_threads(1).unwrap(), small()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let pool = pool.clone();
            scope.spawn(move || {
                for round in 0..5000 {
                    let sizes = [4096, 20_000, 4096].map(|size| size + round % 97 + thread);
                    let blocks: Vec<PooledBuffer<_>> =
                        sizes.iter().map(|&size| pool.acquire(size).unwrap()).collect();
                    let pairs = [(0, 1), (0, 2), (1, 2)];
                    assert!(
                        pairs.iter().all(|&(a, b)| !blocks[a].range().overlaps(blocks[b].range()))
                    );
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.in_use_bytes, stats.hits + stats.misses), (0, 120_000));
}

proptest! {
    #[test]
    fn statistics_match_the_operations(
        program in prop::collection::vec((any::<bool>(), 1..2 * MIB, any::<usize>()), 1..200),
    ) {
        let device = SimDevice::new(SimOptions::default());
        let pool = BlockPool::new(device.clone(), small()).unwrap();
        let mut live: Vec<PooledBuffer<SimDevice>> = Vec::new();
        let (mut acquired, mut failed) = (0, 0);
        for (acquires, bytes, which) in program {
            if acquires {
                match pool.acquire(bytes) {
                    Ok(block) => {
                        prop_assert!(block.block_bytes() >= bytes && block.len() == bytes);
                        prop_assert!(
                            live.iter().all(|other| !other.range().overlaps(block.range()))
                        );
                        live.push(block);
                        acquired += 1;
                    }
                    Err(error) => {
                        prop_assert_eq!(error.kind(), ErrorKind::Full);
                        // All free blocks were evicted before the request failed.
                        prop_assert_eq!(pool.stats().available_bytes, 0);
                        failed += 1;
                    }
                }
            } else if !live.is_empty() {
                live.swap_remove(which % live.len());
            }
            let stats = pool.stats();
            prop_assert_eq!(
                stats.in_use_bytes,
                live.iter().map(PooledBuffer::block_bytes).sum::<usize>()
            );
            prop_assert_eq!(stats.pool_bytes, device.memory().in_use_bytes);
            prop_assert!(
                stats.pool_bytes <= 4 * MIB && stats.high_water_bytes >= stats.in_use_bytes
            );
            prop_assert_eq!(stats.hits + stats.misses, acquired + failed);
        }
    }
}
