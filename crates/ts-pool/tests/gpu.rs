// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the pools on a GPU, if there is one. A simulated GPU runs some of the same programs,
//! and checks the programs themselves.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // a panic fails the test

use std::io::Write;
use std::time::{Duration, Instant};

use ts_pool::{
    Backing, BlockPool, DeviceBuffer, OrderedOptions, PinnedMemoryPool, PoolConfig,
    StreamOrderedAllocator, StreamOrderedPool, TensorBuffer,
};
use ts_streams::{CudaDevice, Device, SimDevice, SimOptions, Stream, StreamPriority};

/// Opens GPU 0. If there is none, prints a line to stdout in a way that the test harness does not
/// capture. `cargo xtask` counts these lines.
fn gpu() -> Option<CudaDevice> {
    CudaDevice::new(0)
        .inspect_err(|error| {
            let line = format!("skipped: no CUDA device: {error}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
        })
        .ok()
}

/// A linear congruential generator, with the constants of Knuth's MMIX.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Allocates and frees buffers on four streams. Fills each new buffer with a byte, or with the
/// contents of another buffer. Checks the contents of every buffer before freeing it.
fn random_programs<D: Device>(device: &D, backing: Backing, steps: usize) {
    let options = OrderedOptions::default()
        .with_backing(backing)
        .with_limit_bytes(8 << 20)
        .with_segment_bytes(1 << 20);
    let pool = StreamOrderedPool::new(device.clone(), options);
    let streams = [(); 4].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let (mut random, mut live): (_, Vec<(DeviceBuffer<D>, u8)>) = (Random(7), Vec::new());
    for step in 0..steps {
        let byte = (step % 251) as u8;
        if live.len() > 20 || (!live.is_empty() && random.below(5) < 2) {
            let (buffer, byte) = live.swap_remove(random.below(live.len()));
            let mut bytes = vec![0; buffer.len()];
            buffer.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&found| found == byte), "step {step}");
            continue;
        }
        let stream = &streams[random.below(4)];
        let bytes = 1 + random.below(300_000);
        let Ok(mut buffer) = pool.allocate_for_stream(bytes, stream) else { continue };
        match live.iter().find(|(other, _)| other.len() == bytes) {
            Some((other, of_other)) => {
                buffer.copy_from(other).unwrap();
                live.push((buffer, *of_other));
            }
            None => {
                // SAFETY: only this function uses the buffer, on the buffer's own stream.
                unsafe { stream.fill(buffer.range().unwrap(), byte) }.unwrap();
                live.push((buffer, byte));
            }
        }
    }
    for (buffer, byte) in live {
        let mut bytes = vec![0; buffer.len()];
        buffer.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&found| found == byte));
    }
    device.synchronize().unwrap();
    assert_eq!(pool.stats().in_use_bytes, 0);
}

#[test]
fn a_simulated_gpu_reuses_memory_in_stream_order() {
    for backing in [Backing::Segments, Backing::Device] {
        let device = SimDevice::new(SimOptions::default());
        random_programs(&device, backing, 600);
        assert_eq!(device.races(), []);
    }
}

#[test]
fn a_gpu_reuses_memory_in_stream_order() {
    let Some(device) = gpu() else { return };
    random_programs(&device, Backing::Segments, 20_000);
    random_programs(&device, Backing::Device, 20_000);
}

#[test]
fn blocks_and_tensors_round_trip_through_a_gpu() {
    let Some(device) = gpu() else { return };
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
    assert!(pinned.is_pinned());
    let pool = BlockPool::new(device, PoolConfig::low_memory()).unwrap();
    let bytes: Vec<u8> = (0..1_000_000).map(|i| (i % 253) as u8).collect();
    for _ in 0..10 {
        let (mut near, mut far) =
            (pinned.acquire(bytes.len()).unwrap(), pool.acquire(bytes.len()).unwrap());
        near.write(0, &bytes, &stream).unwrap();
        far.write(0, &bytes, &stream).unwrap();
        let mut back = vec![0; bytes.len()];
        far.read(0, &mut back, &stream).unwrap();
        assert!(back == bytes);
        far.release_after(&stream).unwrap();
    }
    let buffer = TensorBuffer::cpu(bytes.clone()).to_gpu(0).unwrap();
    assert!(buffer.is_gpu() && buffer.to_gpu(0).unwrap().to_host().unwrap() == bytes);
}

/// Times 20,000 allocations and frees on eight streams, with up to 64 live buffers.
fn workload<D: Device>(device: &D, backing: Backing) -> Duration {
    let options = OrderedOptions::default().with_backing(backing).with_segment_bytes(256 << 20);
    let pool = StreamOrderedPool::new(device.clone(), options);
    let streams = [(); 8].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let run = |count: usize| {
        let (mut random, mut live) = (Random(3), Vec::new());
        let began = Instant::now();
        for _ in 0..count {
            if live.len() >= 64 {
                live.swap_remove(random.below(64));
            }
            let stream = &streams[random.below(8)];
            live.push(pool.allocate_for_stream(4096 + random.below(1 << 20), stream).unwrap());
        }
        drop(live);
        device.synchronize().unwrap();
        began.elapsed()
    };
    run(2000);
    run(20_000)
}

/// Prints the speed of the pool relative to the driver's allocator. Does not fail if the pool is
/// slow.
#[test]
fn speed_relative_to_the_drivers_allocator() {
    let Some(device) = gpu() else { return };
    let mut ratios: Vec<f64> = (0..9)
        .map(|_| {
            let [own, driver] =
                [Backing::Segments, Backing::Device].map(|backing| workload(&device, backing));
            println!("20,000 allocations on 8 streams: pool {own:?}, cuMemAllocAsync {driver:?}");
            driver.as_secs_f64() / own.as_secs_f64()
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "the pool is {:.2} times as fast as the driver (median of 9; {:.2} to {:.2})",
        ratios[4], ratios[0], ratios[8]
    );
}
