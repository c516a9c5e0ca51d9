// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pools on a GPU, where there is one, and on a simulated one, which is to show that the programs
//! here are right.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::io::Write;
use std::time::{Duration, Instant};

use ts_pool::{
    Backing, BlockPool, DeviceBuffer, OrderedOptions, PinnedMemoryPool, PoolConfig,
    StreamOrderedAllocator, StreamOrderedPool, TensorBuffer,
};
use ts_streams::{CudaDevice, Device, SimDevice, SimOptions, Stream, StreamPriority};

/// The device, or a line that says that there is none, past the test harness to whoever counts.
fn gpu() -> Option<CudaDevice> {
    CudaDevice::new(0)
        .inspect_err(|why| {
            let line = format!("skipped: no CUDA device: {why}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
        })
        .ok()
}

/// Numbers that look random (Knuth's MMIX).
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Buffers of four streams come and go, are filled with a byte of their own, and copied to each
/// other; in the end each must have what was meant for it.
fn random_programs<D: Device>(device: &D, backing: Backing, steps: usize) {
    let options = OrderedOptions {
        backing,
        limit_bytes: 8 << 20,
        segment_bytes: 1 << 20,
        ..Default::default()
    };
    let pool = StreamOrderedPool::new(device.clone(), options);
    let streams = [(); 4].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let (mut chance, mut live): (_, Vec<(DeviceBuffer<D>, u8)>) = (Chance(7), Vec::new());
    for step in 0..steps {
        let byte = (step % 251) as u8;
        if live.len() > 20 || (!live.is_empty() && chance.below(5) < 2) {
            let (buffer, byte) = live.swap_remove(chance.below(live.len()));
            let mut bytes = vec![0; buffer.len()];
            buffer.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&found| found == byte), "step {step}");
            continue;
        }
        let stream = &streams[chance.below(4)];
        let bytes = 1 + chance.below(300_000);
        let Ok(mut buffer) = pool.allocate_for_stream(bytes, stream) else { continue };
        match live.iter().find(|(other, _)| other.len() == bytes) {
            Some((other, of_other)) => {
                buffer.copy_from(other).unwrap();
                live.push((buffer, *of_other));
            }
            None => {
                // SAFETY: the buffer is this program's alone, and its stream's order is that of its
                // uses.
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
fn memory_of_a_simulated_gpu_is_given_on_in_order() {
    for backing in [Backing::Segments, Backing::Device] {
        let device = SimDevice::new(SimOptions::default());
        random_programs(&device, backing, 600);
        assert_eq!(device.races(), []);
    }
}

#[test]
fn memory_of_a_gpu_is_given_on_in_order() {
    let Some(device) = gpu() else { return };
    random_programs(&device, Backing::Segments, 20_000);
    random_programs(&device, Backing::Device, 20_000);
}

#[test]
fn blocks_and_tensors_go_to_a_gpu_and_back() {
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

/// What eight streams do in turn: a buffer is allocated, filled, and freed again while others live.
fn workload<D: Device>(device: &D, backing: Backing) -> Duration {
    let options = OrderedOptions { backing, segment_bytes: 256 << 20, ..Default::default() };
    let pool = StreamOrderedPool::new(device.clone(), options);
    let streams = [(); 8].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let run = |count: usize| {
        let (mut chance, mut live) = (Chance(3), Vec::new());
        let began = Instant::now();
        for _ in 0..count {
            if live.len() >= 64 {
                live.swap_remove(chance.below(64));
            }
            let stream = &streams[chance.below(8)];
            live.push(pool.allocate_for_stream(4096 + chance.below(1 << 20), stream).unwrap());
        }
        drop(live);
        device.synchronize().unwrap();
        began.elapsed()
    };
    run(2000);
    run(20_000)
}

/// Says how the pool does beside the driver's own; nothing fails by it.
#[test]
fn the_pool_of_a_gpu_beside_the_drivers() {
    let Some(device) = gpu() else { return };
    let mut ratios: Vec<f64> = (0..9)
        .map(|_| {
            let [own, driver] =
                [Backing::Segments, Backing::Device].map(|backing| workload(&device, backing));
            println!("20,000 allocations on 8 streams: {own:?}, cuMemAllocAsync {driver:?}");
            driver.as_secs_f64() / own.as_secs_f64()
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "the pool is {:.2} times as fast (median of 9; {:.2} to {:.2})",
        ratios[4], ratios[0], ratios[8]
    );
}
